"""The indexer's kernels on a real GPU against the float32 definition; run with `-m gpu`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.lightning_indexer import lightning_indexer, mosaic_hopper, reference

pytestmark = pytest.mark.gpu
FP8, BF16 = jnp.float8_e4m3fn, jnp.bfloat16
# Hopper's tensor cores accumulate products of e4m3 with fewer bits than float32 has.
TOLERANCE = {"float8_e4m3fn": 3e-4, "bfloat16": 1e-5}


@pytest.fixture(autouse=True, scope="module")
def _needs_hopper():
    if jax.devices()[0].platform != "gpu" or jax.devices()[0].compute_capability != "9.0":
        pytest.skip("needs a Hopper GPU")


def _inputs(rows, keys, heads, dim, dtype, scaled, seed=0):
    """Random operands with rows of every kind: empty, reversed, short, from the first and to the last key."""
    rng = np.random.default_rng(seed)
    start, end = rng.integers(0, keys, rows), rng.integers(0, keys + 1, rows)
    start[::7], end[::5] = 0, keys
    operands = (
        jnp.asarray(rng.normal(size=(rows, heads, dim)), dtype),
        jnp.asarray(rng.normal(size=(keys, dim)), dtype),
        jnp.asarray(rng.normal(size=(rows, heads)), jnp.float32),
        jnp.asarray(start, jnp.int32),
        jnp.asarray(end, jnp.int32),
    )
    return operands, jnp.asarray(rng.uniform(0.5, 1.5, keys), jnp.float32) if scaled else None


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize(
    ("rows", "keys", "heads", "dim", "dtype", "scaled"),
    [
        (1, 100, 64, 128, FP8, True),
        (64, 384, 32, 128, FP8, True),
        (70, 1000, 8, 128, FP8, False),
        (200, 3001, 64, 128, FP8, True),  # rows of an odd number of keys
        (130, 20500, 32, 64, FP8, True),
        (130, 2050, 16, 128, BF16, True),
        (300, 4097, 64, 128, BF16, False),
        (130, 2050, 8, 64, BF16, True),
        (5, 40000, 3, 128, BF16, True),
    ],
)
def test_matches_the_reference(rows, keys, heads, dim, dtype, scaled, clean):
    operands, scale = _inputs(rows, keys, heads, dim, dtype, scaled)
    want = np.asarray(reference.lightning_indexer(*operands, k_scale=scale))
    visible = np.isfinite(want)
    got, highest = mosaic_hopper.lightning_indexer(*operands, k_scale=scale, clean_logits=clean, block_max=True)
    got, highest = np.asarray(got), np.asarray(highest)
    if clean:
        np.testing.assert_array_equal(np.isneginf(got), ~visible)
    error = np.linalg.norm(got[visible] - want[visible]) / np.linalg.norm(want[visible])
    assert error < TOLERANCE[jnp.dtype(dtype).name]

    def blocks(scores):
        padded = np.pad(scores, ((0, 0), (0, -keys % 16)), constant_values=-np.inf)
        return padded.reshape(rows, -1, 16).max(axis=2)

    seen = np.isfinite(blocks(want))
    np.testing.assert_array_equal(highest[seen], blocks(np.where(visible, got, -np.inf))[seen])
    if clean:
        np.testing.assert_array_equal(np.isneginf(highest), ~seen)


@pytest.mark.parametrize("dtype", [FP8, BF16])
def test_repeats_and_does_not_depend_on_the_batch(dtype):
    operands, scale = _inputs(300, 5000, 32, 128, dtype, True)
    first = np.asarray(lightning_indexer(*operands, k_scale=scale, implementation="mosaic_hopper"))
    for _ in range(20):
        again = lightning_indexer(*operands, k_scale=scale, implementation="mosaic_hopper")
        np.testing.assert_array_equal(again, first)
    q, k, weights, start, end = operands
    row = slice(123, 124)
    alone = lightning_indexer(q[row], k, weights[row], start[row], end[row], k_scale=scale)
    np.testing.assert_array_equal(alone, first[row])


def test_nan_key_scores_zero():
    operands, _ = _inputs(100, 900, 8, 128, BF16, False)
    q, k, weights, _, _ = operands
    start, end = jnp.zeros(100, jnp.int32), jnp.full(100, 900, jnp.int32)
    got = np.asarray(lightning_indexer(q, k.at[77].set(jnp.nan), weights, start, end, implementation="mosaic_hopper"))
    assert (got[:, 77] == 0).all()
    assert not np.isnan(got).any()


def test_inside_shard_map_and_jit():
    devices = np.asarray(jax.devices())
    mesh = jax.sharding.Mesh(devices, ("x",))
    operands, _ = _inputs(64 * len(devices), 2000, 16, 128, BF16, False)
    rows, whole = jax.sharding.PartitionSpec("x"), jax.sharding.PartitionSpec()
    sharded = jax.jit(
        jax.shard_map(
            lightning_indexer, mesh=mesh, in_specs=(rows, whole, rows, rows, rows), out_specs=rows, check_vma=False
        )
    )
    np.testing.assert_array_equal(sharded(*operands), lightning_indexer(*operands))
