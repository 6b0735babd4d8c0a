"""Attention over the shards of a DCP group equals attention of one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from dsa_jax.testing import users_mesh
from sharding import dcp_attention
from sharding.dcp_attention import dcp_sparse_mla, owned_slots
from sharding.mesh import DCP, TP_AXES
from tests.sharding.harness import (
    BATCH,
    attend,
    attention,
    collectives,
    i32,
    on_every_rank,
    run_on_every_rank,
)

HEADS, LATENT, ROPE, VALUE, SELECTED = 8, 6, 2, 3, 9
SCALE = 0.3


def program(qsplit, dcp, interleave, *, project=False, dtype=jnp.float32, axis_type=AxisType.Auto):
    """The stock path as a program that returns every rank's heads."""
    case = attention()
    kv = BATCH.deal(case.records, dcp, interleave, rows=184).reshape(-1, LATENT + ROPE)
    args = (
        jnp.asarray(case.q, dtype),
        jnp.asarray(kv, dtype),
        i32(case.ids),
        i32(BATCH.requests),
        BATCH.layout(dcp, interleave),
        jnp.asarray(case.value_up, dtype) if project else None,
    )
    specs = (P(None, TP_AXES), P(DCP), P(), P(), P(), P(TP_AXES))

    def local(q, kv, ids, requests, layout, value_up):
        slots, count = owned_slots(ids, requests, layout, jax.lax.axis_index(DCP), interleave=interleave)
        return dcp_sparse_mla(
            q, kv, slots, count, softmax_scale=SCALE, kv_lora_rank=LATENT, value_up=value_up, out_dtype=jnp.float32
        )

    return local, users_mesh(1, qsplit, dcp, axis_type), specs, args


def check(out, lse, project):
    """Compare with one device, and look for rows that must be empty."""
    expected, expected_lse = attend(project)
    out = np.moveaxis(out, 0, 1).reshape(expected.shape)
    lse = np.moveaxis(lse, 0, 1).reshape(expected_lse.shape)
    np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6, atol=1e-6)
    empty = np.all(attention().ids < 0, axis=1)
    assert empty.sum() > 2
    assert np.all(out[empty] == 0)
    assert np.all(lse[empty] == -np.inf)


CASES = [
    (1, 8, 1, False, AxisType.Auto),
    (2, 4, 4, True, AxisType.Explicit),
    (4, 2, 16, False, AxisType.Explicit),
    (8, 1, 1, True, AxisType.Auto),
]


@pytest.mark.parametrize(("qsplit", "dcp", "interleave", "project", "axis_type"), CASES)
def test_equals_one_device(qsplit, dcp, interleave, project, axis_type):
    settings = program(qsplit, dcp, interleave, project=project, axis_type=axis_type)
    check(*run_on_every_rank(*settings, check_vma=interleave != 16), project)


@pytest.mark.parametrize("bad_lse", [-np.inf, np.inf, np.nan])
def test_nan_of_a_rank_without_tokens_does_not_spread(monkeypatch, bad_lse):
    real = dcp_attention.sparse_mla

    def spoiled(*args, **kwargs):
        out, lse = real(*args, **kwargs)
        empty = lse == -jnp.inf
        return jnp.where(empty[..., None], jnp.nan, out), jnp.where(empty, bad_lse, lse)

    monkeypatch.setattr(dcp_attention, "sparse_mla", spoiled)
    check(*run_on_every_rank(*program(2, 4, 1)), project=False)


def test_bfloat16_partials_stay_close():
    fn, mesh, specs, args = program(2, 4, 1, dtype=jnp.bfloat16)
    out, _ = run_on_every_rank(fn, mesh, specs, args)
    expected, _ = attend(False)
    out = np.moveaxis(out, 0, 1).reshape(expected.shape)
    assert np.max(np.abs(out - expected)) < 0.05


def test_only_queries_and_outputs_travel():
    def kinds(*settings, **options):
        return collectives(*on_every_rank(*program(*settings, **options)))

    rows, local = BATCH.rows, HEADS // 8
    moved = [
        ("all-gather", f"f32[{rows},{4 * local},{LATENT + ROPE}]"),
        ("all-gather", f"f32[4,{rows},{4 * local}]"),
        ("reduce-scatter", f"f32[{rows},{local},{LATENT}]"),
    ]
    assert kinds(2, 4, 1) == moved
    narrow = ("reduce-scatter", f"f32[{rows},{local},{VALUE}]")
    weights = ("all-gather", f"f32[{4 * local},{VALUE},{LATENT}]")
    assert kinds(2, 4, 1, project=True) == sorted([*moved[:2], weights, narrow])
    assert kinds(8, 1, 1, project=True) == []


def test_owned_slots_are_in_front_and_in_order():
    layout = BATCH.layout(2, 1)
    requests = i32([0, 3, 3, 4, -1])
    ids = i32([[5, -1, 2, 59, 3, 60], [-1, -1, -1, -1, -1, -1], [89, 88, 1, 0, 2, 4], [0, 1, 2, 3, -1, -1], [0] * 6])
    find = jax.jit(functools.partial(owned_slots, interleave=1), static_argnums=3)
    for rank in (0, 1):
        slots, count = find(ids, requests, layout, rank)
        starts = np.asarray(layout.starts)[rank]
        for t, request in enumerate([0, 3, 3, 4, -1]):
            length = 0 if request < 0 else BATCH.seq_lens[request]
            owned = [g for g in ids[t].tolist() if 0 <= g < length and g % 2 == rank]
            expected = [int(starts[request]) + g // 2 for g in owned]
            assert slots[t].tolist() == expected + [-1] * (6 - len(expected))
            assert count[t] == len(expected)


def test_tokens_after_the_row_are_dropped_by_the_global_length():
    layout = jax.tree.map(i32, dcp_attention.KeyLayout(np.array([[2], [2], [1], [1]]), np.zeros((4, 1))))
    ids = i32([[0, 1, 2, 3, 4, 5]])
    counts = [
        owned_slots(ids, i32([0]), layout, rank, interleave=1, visible=i32([visible]))[1].tolist()[0]
        for visible in (6, 5)
        for rank in range(4)
    ]
    assert counts == [2, 2, 1, 1, 2, 1, 1, 1]
