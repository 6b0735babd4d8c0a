"""The schedules of sparse MLA that no GPU had run when they were written: records, and one slot for the rope."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.ckv_records import ckv_format, pack, unpack
from pallas_kernels.sparse_mla import mosaic_hopper, sparse_mla
from pallas_kernels.sparse_mla.plan import Plan
from pallas_kernels.testing import random_ids, shared_ids
from tests.gpu.sparse_mla_cases import LATENT, SCALE, assert_close, inputs, oracle, run

pytestmark = pytest.mark.gpu

ROWS, KEYS, K = 145, 3000, 320
ONE_ROPE = mosaic_hopper.Config(one_rope=True)
PLANS = [
    pytest.param(64, Plan(1, 1, False), id="64-direct"),
    pytest.param(64, Plan(1, 5, False), id="64-split"),
    pytest.param(128, Plan(1, 3, True), id="128-ordered-split"),
    pytest.param(32, Plan(2, 1, True), id="32-union"),
    pytest.param(16, Plan(4, 1, True), id="16-union"),
    pytest.param(16, Plan(4, 4, True), id="16-union-split"),
    pytest.param(8, Plan(8, 1, True), id="8-union"),
    pytest.param(24, None, id="24-padded"),
]


def fp8(width=576):
    """The format of records of that many values."""
    return ckv_format("fp8_ds_mla", kv_lora_rank=LATENT, qk_rope_head_dim=width - LATENT)


@functools.partial(jax.jit, static_argnums=0)
def _packed(width, kv):
    records = pack(fp8(width), kv)
    return records, unpack(fp8(width), records, dtype=jnp.bfloat16)


def record_inputs(rng, rows, heads, keys, width=576):
    """Queries, records and their values in bf16, which the kernel's are bit for bit."""
    q, kv = inputs(rng, rows, heads, keys, width)
    return q, *_packed(width, kv)


def hard_ids(rng, rows, keys, k):
    """Ids with holes, an empty row, empty blocks and duplicates; and lengths."""
    ids = random_ids(rng, rows, keys, k)
    ids[rng.random(ids.shape) < 0.1] = -1
    ids[0] = -1
    ids[1, :-1], ids[1, -1] = -1, 7  # a single valid id, last
    ids[2, :64] = keys + 3  # a first block without a valid key
    ids[3, 10] = ids[3, 11]  # twice counts twice
    ids[4], ids[5] = np.iinfo(np.int32).max, np.iinfo(np.int32).min
    lengths = rng.integers(0, k + 1, rows).astype(np.int32)
    lengths[:8] = [k, k, k, k, k, k, -5, k + 100]
    return ids, lengths


def check_all(call, q, kv, values, heads):
    """Random ids, hard ids, repeats: with one program."""
    rng = np.random.default_rng(heads)
    ids = random_ids(rng, ROWS, KEYS, K)
    assert_close(call(q, kv, ids), oracle(q, values, ids))
    ids, lengths = hard_ids(rng, ROWS, KEYS, K)
    assert_close(call(q, kv, ids, lengths), oracle(q, values, ids, lengths))
    ids = shared_ids(rng, ROWS, KEYS, K)
    first = call(q, kv, ids)
    for _ in range(20):
        for a, b in zip(first, call(q, kv, ids), strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize(("heads", "chosen"), PLANS)
def test_records(heads, chosen):
    q, kv, values = record_inputs(np.random.default_rng(heads), ROWS, heads, KEYS)
    call = functools.partial(run, chosen=chosen, kv_format=fp8())
    check_all(call, q, kv, values, heads)
    rng = np.random.default_rng(heads)
    ids = random_ids(rng, ROWS, KEYS, K)
    ids[np.isin(ids, (11, 13, 0, KEYS - 1))] = -1
    ids[17, 5] = 11
    bad = kv.at[jnp.asarray([11, 0, KEYS - 1])].set(255).at[13, 512:516].set(255)  # NaN everywhere; a NaN scale
    values = values.at[11].set(jnp.nan)
    assert_close(call(q, bad, ids), oracle(q, values, ids))


@pytest.mark.parametrize(("heads", "chosen"), [PLANS[0], PLANS[2], PLANS[4], PLANS[5], PLANS[6]])
def test_one_slot_for_the_rope(heads, chosen):
    q, kv = inputs(np.random.default_rng(heads), ROWS, heads, KEYS)
    check_all(functools.partial(run, chosen=chosen, config=ONE_ROPE), q, kv, kv, heads)


@pytest.mark.parametrize("heads", [64, 16])
def test_records_give_the_bits_of_their_values_in_bf16(heads):
    rng = np.random.default_rng(0)
    q, kv, values = record_inputs(rng, ROWS, heads, KEYS)
    ids = shared_ids(rng, ROWS, KEYS, K)
    for got, want in zip(run(q, kv, ids, kv_format=fp8()), run(q, values, ids), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


@pytest.mark.parametrize("heads", [64, 8])
@pytest.mark.parametrize("rows", [1, 9, 64])
def test_decode_of_records(rows, heads):
    rng = np.random.default_rng(rows)
    q, kv, values = record_inputs(rng, rows, heads, 20000)
    ids = random_ids(rng, rows, 20000, 2048)
    assert_close(run(q, kv, ids, kv_format=fp8()), oracle(q, values, ids))


@pytest.mark.parametrize("packed", [False, True], ids=["bf16", "records"])
@pytest.mark.parametrize(("rows", "heads"), [(40, 64), (40, 8), (1, 64), (9, 8)])
def test_flash_has_no_rope_and_2051_ids(rows, heads, packed):
    rng = np.random.default_rng(rows)
    q, kv, values = record_inputs(rng, rows, heads, 20000, width=512)
    ids = random_ids(rng, rows, 20000, 2051)
    got = run(q, kv if packed else values, ids, kv_format=fp8(512) if packed else None)
    assert_close(got, oracle(q, values, ids))


def test_records_beyond_two_gigabytes():
    rng = np.random.default_rng(0)
    keys = 3_500_000  # 2.3 GB
    q, kv, values = record_inputs(rng, 16, 16, 4096)
    kv = jnp.tile(kv, (keys // 4096 + 1, 1))[:keys]
    ids = random_ids(rng, 16, 100_000, 256) + np.int32(keys - 100_000)
    assert_close(run(q, kv, ids, kv_format=fp8()), oracle(q, values, np.asarray(ids % 4096)))


def test_the_public_function_reads_records_by_name():
    rng = np.random.default_rng(0)
    q, kv, values = record_inputs(rng, 70, 16, 1000)
    ids = random_ids(rng, 70, 1000, 128)
    got = sparse_mla(
        q,
        kv,
        jnp.asarray(ids),
        softmax_scale=SCALE,
        kv_lora_rank=LATENT,
        kv_format=fp8(),
        out_dtype=jnp.float32,
        implementation="mosaic_hopper",
    )
    assert_close(got, oracle(q, values, ids))
