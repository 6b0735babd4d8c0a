"""Sparse MLA on a real GPU against a float64 oracle, with FlashMLA's own inputs and tolerances."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.sparse_mla import sparse_mla, union
from pallas_kernels.sparse_mla.plan import Plan
from pallas_kernels.testing import random_ids, shared_ids, window_ids
from tests.gpu.sparse_mla_cases import LATENT, SCALE, assert_close, inputs, oracle, run

pytestmark = pytest.mark.gpu

PLANS = [
    pytest.param(64, Plan(1, 1, False), id="64-direct"),
    pytest.param(64, Plan(1, 1, True), id="64-ordered"),
    pytest.param(64, Plan(1, 5, False), id="64-split"),
    pytest.param(128, Plan(1, 1, False), id="128-direct"),
    pytest.param(128, Plan(1, 3, True), id="128-ordered-split"),
    pytest.param(32, Plan(2, 1, True), id="32-union"),
    pytest.param(16, Plan(4, 1, True), id="16-union"),
    pytest.param(16, Plan(4, 4, True), id="16-union-split"),
    pytest.param(16, Plan(1, 1, False), id="16-direct"),
    pytest.param(8, Plan(8, 1, True), id="8-union"),
    pytest.param(24, None, id="24-padded"),
]


@pytest.mark.parametrize(("heads", "chosen"), PLANS)
@pytest.mark.parametrize("k", [300, 512])
def test_equals_float64(heads, chosen, k):
    rng = np.random.default_rng(heads + k)
    q, kv = inputs(rng, 301, heads, 4000)
    ids = random_ids(rng, 301, 4000, k)
    assert_close(run(q, kv, ids, chosen=chosen), oracle(q, kv, ids))


@pytest.mark.parametrize(("heads", "chosen"), PLANS)
def test_invalid_ids_lengths_and_duplicates(heads, chosen):
    rng = np.random.default_rng(heads)
    rows, keys, k = 145, 3000, 320
    q, kv = inputs(rng, rows, heads, keys)
    ids = random_ids(rng, rows, keys, k)
    ids[rng.random(ids.shape) < 0.1] = -1
    ids[0] = -1  # all invalid
    ids[1, :-1] = -1
    ids[1, -1] = 7  # a single valid id, last
    ids[2, :64] = keys + 3  # a first block without a valid key
    ids[3, 10] = ids[3, 11]  # twice counts twice
    ids[4] = np.iinfo(np.int32).max
    ids[5] = np.iinfo(np.int32).min
    lengths = rng.integers(0, k + 1, rows).astype(np.int32)
    lengths[:7] = [k, k, k, k, k, k, -5]
    lengths[7] = k + 100
    assert_close(run(q, kv, ids, lengths, chosen), oracle(q, kv, ids, lengths))


@pytest.mark.parametrize(("heads", "chosen"), PLANS)
def test_nan_stays_with_the_rows_that_select_it(heads, chosen):
    rng = np.random.default_rng(heads)
    q, kv = inputs(rng, 64, heads, 1000)
    ids = random_ids(rng, 64, 1000, 200)
    ids[np.isin(ids, (11, 13, 0, 999))] = -1
    ids[17, 5] = 11
    kv = kv.at[jnp.asarray([11, 0, 999])].set(jnp.nan).at[13].set(jnp.inf)
    assert_close(run(q, kv, ids, chosen=chosen), oracle(q, kv, ids))
    kv = kv.at[11].set(1.0)
    q = q.at[9].set(jnp.nan)
    assert_close(run(q, kv, ids, chosen=chosen), oracle(q, kv, ids))


@pytest.mark.parametrize(("heads", "chosen"), PLANS)
def test_repeats_are_bitwise_equal(heads, chosen):
    rng = np.random.default_rng(heads)
    q, kv = inputs(rng, 200, heads, 4000)
    ids = shared_ids(rng, 200, 4000, 256)
    first = run(q, kv, ids, chosen=chosen)
    for _ in range(20):
        for a, b in zip(first, run(q, kv, ids, chosen=chosen), strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("rows", [1, 2, 9, 64])
@pytest.mark.parametrize("heads", [8, 16, 64, 128])
def test_decode(rows, heads):
    rng = np.random.default_rng(rows)
    q, kv = inputs(rng, rows, heads, 20000)
    ids = random_ids(rng, rows, 20000, 2048)
    assert_close(run(q, kv, ids), oracle(q, kv, ids))


def test_one_row_one_key_and_few_ids():
    rng = np.random.default_rng(0)
    q, kv = inputs(rng, 1, 64, 1)
    assert_close(run(q, kv, np.zeros((1, 1), np.int32)), oracle(q, kv, np.zeros((1, 1), np.int32)))
    q, kv = inputs(rng, 5, 8, 9)
    ids = random_ids(rng, 5, 9, 7)
    assert_close(run(q, kv, ids, out_dtype=jnp.bfloat16), oracle(q, kv, ids))


def test_width_without_rope():
    rng = np.random.default_rng(0)
    q, kv = inputs(rng, 150, 64, 700, width=512)
    ids = random_ids(rng, 150, 700, 128)
    assert_close(run(q, kv, ids), oracle(q, kv, ids))


def test_seventy_thousand_rows():
    rng = np.random.default_rng(0)
    q, kv = inputs(rng, 70000, 8, 5000)
    ids = window_ids(rng, 70000, 5000, 64, window=128)
    out, lse = run(q, kv, ids)
    rows = np.asarray([0, 1, 7, 8, 35001, 69992, 69999])
    assert_close((out[rows], lse[rows]), oracle(q[rows], kv, ids[rows]))
    assert bool(jnp.isfinite(lse).all())


def test_rows_beyond_two_gigabytes():
    rng = np.random.default_rng(0)
    keys = 2_000_000  # 2.3 GB
    q, kv = inputs(rng, 16, 16, 4096)
    kv = jnp.tile(kv, (keys // 4096 + 1, 1))[:keys]
    ids = random_ids(rng, 16, 100_000, 256) + np.int32(keys - 100_000)
    small = np.asarray(ids % 4096)
    assert_close(run(q, kv, ids), oracle(q, kv[:4096], small))


def test_lists_are_unions_in_ascending_order():
    rng = np.random.default_rng(0)
    ids = shared_ids(rng, 37, 600_000, 512)
    lengths = rng.integers(0, 513, 37).astype(np.int32)
    lists, masks, counts = (np.asarray(x) for x in union.build(37, 512, 600_000, 8)(ids.reshape(-1), lengths))
    for group, count in enumerate(counts):
        rows = range(group * 8, min(37, group * 8 + 8))
        want = {}
        for row in rows:
            for key in ids[row, : lengths[row]]:
                want[int(key)] = want.get(int(key), 0) | 1 << (row - group * 8)
        start = group * 8 * 512
        got = list(zip(lists[start : start + count], masks[start : start + count].view(np.uint8), strict=True))
        assert got == sorted(want.items())


def test_default_implementation_is_the_kernel():
    rng = np.random.default_rng(0)
    q, kv = inputs(rng, 70, 16, 1000)
    ids = jnp.asarray(random_ids(rng, 70, 1000, 128))
    kwargs = dict(softmax_scale=SCALE, kv_lora_rank=LATENT)
    chosen = sparse_mla(q, kv, ids, **kwargs)
    explicit = sparse_mla(q, kv, ids, implementation="mosaic_hopper", **kwargs)
    for a, b in zip(chosen, explicit, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
