"""The block-scaled FP8 product's kernel on a real GPU against float64; run with `-m gpu`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.scaled_matmul import grouped_scaled_matmul, mosaic_hopper, quantize_rows, scaled_matmul
from tests.kernels.scaled_matmul_cases import BLOCK, make

pytestmark = pytest.mark.gpu
# Hopper's tensor cores accumulate products of e4m3 with fewer bits than float32 has.
TOLERANCE = {"float32": 3e-4, "bfloat16": 3e-3}
kernel = jax.jit(
    functools.partial(grouped_scaled_matmul, implementation="mosaic_hopper"), static_argnames=("out_dtype",)
)


@pytest.fixture(autouse=True, scope="module")
def _needs_hopper():
    if jax.devices()[0].platform != "gpu" or jax.devices()[0].compute_capability != "9.0":
        pytest.skip("needs a Hopper GPU")


def _placed(product):
    return tuple(map(jnp.asarray, product.arrays()))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("sizes", "columns", "contracted", "rows"),
    [
        ([1], 256, 128, None),
        ([200], 576, 1536, None),  # a partial block of columns
        ([7], 8, 256, None),
        ([300, 0, 1, 77, 128, 5], 512, 512, 900),  # rows behind the last group
        ([0] * 30 + [3] * 70, 256, 6144, None),  # more blocks than stages, many short groups
        ([1000, 24], 2048, 2048, None),
    ],
)
def test_matches_float64(sizes, columns, contracted, rows, dtype):
    product = make(sizes, columns, contracted, rows=rows)
    got = kernel(*_placed(product), out_dtype=dtype)
    assert got.shape == (len(product.x), columns) and got.dtype == jnp.dtype(dtype)
    assert product.error(got) < TOLERANCE[dtype]
    assert np.isfinite(np.asarray(got[: product.real_rows], np.float32)).all()


def test_groups_inside_a_stack():
    """The weights of one layer, named by where they begin, are not those of its neighbours."""
    product = make([300, 0, 77], 256, 512)
    x, x_scale, weights, scales, sizes = _placed(product)
    stack, stack_scales = (jnp.concatenate([a[::-1], a, a[::-1]]) for a in (weights, scales))
    got = kernel(x, x_scale, stack, stack_scales, sizes, first_group=jnp.int32(3), out_dtype="float32")
    np.testing.assert_array_equal(got, kernel(x, x_scale, weights, scales, sizes, out_dtype="float32"))


def test_every_element_of_a_block_has_its_own_place():
    """Products of one row and one column each, exact in every format: no element lands in another's place."""
    rows, columns = 200, 264
    x, weights = np.zeros((rows, BLOCK), np.float32), np.zeros((1, columns, BLOCK), np.float32)
    x[np.arange(rows), np.arange(rows) % BLOCK] = 1 + np.arange(rows) % 7
    weights[0, np.arange(columns), np.arange(columns) % BLOCK] = 1 + np.arange(columns) % 5
    arguments = [jnp.asarray(a, jnp.float8_e4m3fn) for a in (x, weights)]
    for dtype in TOLERANCE:
        got = kernel(
            arguments[0],
            jnp.ones((1, rows)),
            arguments[1],
            jnp.ones((1, 3, 1)),
            jnp.asarray([rows], jnp.int32),
            out_dtype=dtype,
        )
        np.testing.assert_array_equal(np.asarray(got, np.float32), x @ weights[0].T)


@pytest.mark.parametrize("config", [mosaic_hopper.Config(warpgroups=w, halves=h) for w, h in ((1, 1), (3, 1), (1, 2))])
def test_other_tiles(config):
    product = make([300, 0, 1, 77, 128, 5], 512, 512)
    run = functools.partial(mosaic_hopper.grouped_scaled_matmul, out_dtype=jnp.float32, config=config)
    assert product.error(jax.jit(run)(*_placed(product), jnp.int32(0))) < TOLERANCE["float32"]


def test_repeats_and_does_not_depend_on_the_neighbours():
    """The same bits every time, and for a group alone: every tile adds the blocks of K in one order."""
    arguments = _placed(make([300, 5, 129], 512, 2048))
    first = np.asarray(kernel(*arguments, out_dtype="float32"))
    for _ in range(20):
        np.testing.assert_array_equal(kernel(*arguments, out_dtype="float32"), first)
    x, x_scale, weights, scales, _ = arguments
    alone = scaled_matmul(
        x[300:305],
        x_scale[:, 300:305],
        weights[1],
        scales[1],
        out_dtype=jnp.float32,
        implementation="mosaic_hopper",
    )
    np.testing.assert_array_equal(alone, first[300:305])


def test_quantised_rows_are_those_of_the_cpu():
    """Scales to the last bits, values within one code."""
    x = np.random.default_rng(0).normal(size=(500, 768)).astype(np.float32)
    values, scale = jax.jit(quantize_rows)(jnp.asarray(x))
    want = np.abs(x.reshape(500, 6, BLOCK)).max(axis=2).T / 448
    np.testing.assert_allclose(scale, want, rtol=1e-6)
    real = np.asarray(values, np.float32) * np.repeat(np.asarray(scale).T, BLOCK, axis=1)
    assert np.abs(real - x).max() < 2**-4 * np.abs(x).max()
    assert np.linalg.norm(real - x) / np.linalg.norm(x) == pytest.approx(0.026, abs=0.003)


def test_inside_shard_map_and_jit():
    devices = np.asarray(jax.devices())
    mesh, rows, whole = (
        jax.sharding.Mesh(devices, ("x",)),
        jax.sharding.PartitionSpec("x"),
        jax.sharding.PartitionSpec(),
    )
    x, x_scale, weights, scales, _ = _placed(make([64 * len(devices)], 256, 512))
    run = functools.partial(scaled_matmul, implementation="mosaic_hopper", out_dtype=jnp.float32)
    specs = (rows, jax.sharding.PartitionSpec(None, "x"), whole, whole)
    sharded = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=rows, check_vma=False))
    arguments = (x, x_scale, weights[0], scales[0])
    np.testing.assert_array_equal(sharded(*arguments), run(*arguments))
