"""The benchmark of sparse MLA at tiny sizes, with plain forms in place of the kernels: its cases, checks and report."""

import argparse
import importlib
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.sparse_mla import reference

SCRIPTS = Path(__file__).parents[2] / "scripts"
OPTIONS = argparse.Namespace(rows=32, keys=160, peers=None, variants=True)


def plain_attention(q, kv, ids, *, plan=None, config=None, implementation=None, kv_lora_rank=512, **options):
    """`plan.sparse_mla` or the public function without a kernel."""
    options = dict(num_valid=None, kv_format=None, out_dtype=q.dtype, workspace_bytes=1 << 30) | options
    return reference.sparse_mla(q, kv, ids, kv_lora_rank=kv_lora_rank, **options)


def plain_lists(rows, k, keys, group):
    """`union.build` without a kernel; only the first list is made."""

    def make(ids, lengths):
        first = jnp.unique(ids[: group * k], size=group * k, fill_value=keys)
        return first, None, jnp.sum(first < keys)[None]

    return make


@pytest.fixture
def bench(monkeypatch):
    """The two scripts, with kernels replaced and one short group a case."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    kernels, op = (importlib.import_module(name) for name in ("bench_kernels", "bench_ops_sparse_mla"))
    for name, value in dict(GROUPS=1, CALLS=1, WARM_UP=1, REST_SECONDS=0.0, RESTED_CALLS=1).items():
        monkeypatch.setattr(kernels, name, value)
    monkeypatch.setattr(op, "K", 24)
    monkeypatch.setattr(op.plan, "sparse_mla", plain_attention)
    monkeypatch.setattr(op, "sparse_mla", plain_attention)
    monkeypatch.setattr(op.union, "build", plain_lists)
    monkeypatch.setattr(op.gather_alone, "build", lambda rows, k, keys: lambda kv, ids: jnp.zeros(rows))
    yield kernels, op
    for cached in (op._ids, op._kv, op._program, op._public, op._reference):
        cached.cache_clear()
    for name in ("bench_kernels", "bench_ops_sparse_mla", "bench_case", "gather_alone"):
        sys.modules.pop(name, None)


def test_names_cover_what_was_asked_for_and_are_different(bench):
    names = [case.name for case in bench[1].cases(OPTIONS)]
    assert len(set(names)) == len(names)
    for heads in (8, 16, 32, 64, 128):
        for form in ("", ", fp8 records"):
            assert f"heads={heads} rows=32 keys=160 k=24 random ids{form}" in names or heads >= 64
    for kind in ("window", "sorted", "shared", "random"):
        assert any(f"heads=64 rows=32 keys=160 k=24 {kind} ids" in name for name in names)
    assert sum("one rope slot" in name for name in names) == 7
    assert sum(name.startswith("decode") for name in names) == 8


def test_cases_pass_their_checks_and_report_ratios(bench):
    kernels, op = bench
    some = [
        op._attention(32, 160, 8, "shared"),
        op._attention(32, 160, 8, "sorted", form="fp8 records", as_given=True),
        op._attention(32, 160, 8, "window", form="one rope slot"),
        op._decode(1, 160, 8, records=True),
        op._lists(32, 160, 4, "random"),
        op._gather(32, 160, "random"),
    ]
    for case in some:
        result = kernels.measure(case)
        assert "failed" not in result and result["ms"] > 0, result
        if "fp8" in case.name or "one rope" in case.name:
            assert result["peer"]["name"] == "ours on bf16 rows" and result["time_over_peer"] > 0


def test_a_wrong_kernel_gets_no_time(bench, monkeypatch):
    kernels, op = bench
    monkeypatch.setattr(op.plan, "sparse_mla", lambda q, kv, ids, **_: (jnp.zeros((*q.shape[:2], 512)), None))
    for form in ("bf16", "fp8 records"):
        result = kernels.measure(op._attention(32, 160, 8, "random", form=form))
        assert result["failed"] == "the error is above the tolerance" and "ms" not in result


def test_flash_mla_gets_the_same_ids_and_padded_heads(bench, monkeypatch):
    """Its Python interface, with NumPy in place of PyTorch."""
    kernels, op = bench
    seen = []

    class Torch:
        bfloat16 = "bfloat16"
        manual_seed = staticmethod(lambda seed: None)
        randn = staticmethod(lambda *shape, **_: np.zeros(shape))
        tensor = staticmethod(lambda x, **_: np.asarray(x))
        cuda = argparse.Namespace(synchronize=lambda: None)

    def flash_mla_sparse_fwd(q, kv, ids, scale, use_legacy=False):
        seen.append((q.shape, kv.shape, ids.shape, use_legacy))

    monkeypatch.setitem(sys.modules, "torch", Torch)
    monkeypatch.setitem(sys.modules, "flash_mla", argparse.Namespace(flash_mla_sparse_fwd=flash_mla_sparse_fwd))
    result = kernels.measure(op._attention(32, 160, 16, "random", flash_mla=True))
    assert result["peer"]["name"].endswith("16 heads padded to 64")
    assert set(seen) == {((32, 64, 576), (160, 1, 576), (32, 1, 24), True)}
    assert jax.devices()[0].platform == "cpu" and "time_over_peer" in result
