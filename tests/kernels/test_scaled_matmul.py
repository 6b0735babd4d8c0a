"""Block-scaled FP8 products: the reference against float64, the quantisation of rows, and what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.scaled_matmul import grouped_scaled_matmul, quantize_rows, scaled_matmul
from tests.kernels.scaled_matmul_cases import BLOCK, E4M3, make

grouped = jax.jit(functools.partial(grouped_scaled_matmul, out_dtype=jnp.float32))


@pytest.mark.parametrize(
    ("sizes", "columns", "contracted", "rows"),
    [
        ([40], 136, 384, None),  # a partial block of columns
        ([5, 0, 17, 1], 128, 256, None),
        ([0, 0, 9], 8, 128, 30),  # empty groups in front, rows of no group behind
        ([0, 0], 8, 128, 4),
    ],
)
def test_reference_equals_float64(sizes, columns, contracted, rows):
    product = make(sizes, columns, contracted, rows=rows)
    got = grouped(*product.arrays())
    assert got.shape == (len(product.x), columns) and got.dtype == jnp.float32
    if product.real_rows:
        assert product.error(got) < 1e-6


def test_groups_inside_a_stack():
    """The weights of one layer of a stack, named by where they begin."""
    product = make([5, 9], 16, 128)
    x, x_scale, weights, scales, sizes = product.arrays()
    stack, stack_scales = (np.concatenate([a[::-1], a[:1], a]) for a in (weights, scales))
    got = grouped(x, x_scale, stack, stack_scales, sizes, first_group=jnp.int32(3))
    np.testing.assert_array_equal(got, grouped(*product.arrays()))


def test_dense_is_one_group():
    product = make([33], 264, 256)
    x, x_scale, weights, scales, _ = product.arrays()
    got = scaled_matmul(x, x_scale, weights[0], scales[0], out_dtype=jnp.float32)
    assert product.error(got) < 1e-6
    np.testing.assert_array_equal(
        scaled_matmul(x, x_scale, weights[0], scales[0]), got.astype(jnp.bfloat16)
    )  # bfloat16 rounds once


def test_quantised_rows_equal_numpy():
    """A block's largest value becomes 448, every value the nearest code; scales are of blocks, rows behind them."""
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(7, 384)) * 2.0 ** rng.uniform(-9, 9, (7, 1))).astype(np.float32)
    x[3, 128:256] = 0
    values, scale = jax.jit(quantize_rows)(x)
    assert values.dtype == E4M3 and scale.shape == (3, 7)
    blocks = x.reshape(7, 3, BLOCK)
    want = np.maximum(np.abs(blocks).max(axis=2), 1e-10) / np.float32(448)
    np.testing.assert_allclose(scale, want.T, rtol=3e-7)
    codes = (blocks / np.asarray(scale).T[:, :, None]).astype(E4M3).reshape(7, 384)
    np.testing.assert_array_equal(np.asarray(values).view(np.uint8), codes.view(np.uint8))
    assert (np.abs(np.asarray(values, np.float32)).reshape(7, 3, BLOCK).max(axis=2)[x[:, ::BLOCK] != 0] == 448).all()


def test_quantised_rows_with_powers_of_two():
    """The scale is rounded up to a power of two, as DeepSeek-V3.2 declares it: values keep their mantissas."""
    x = np.float32([[1.75, 0.5] * 64, [1.8, 0.5] * 64])
    values, scale = quantize_rows(jnp.asarray(x), power_of_two=True)
    np.testing.assert_array_equal(scale, [[2.0**-8, 2.0**-7]])
    np.testing.assert_array_equal(np.asarray(values[:, 1], np.float32), [128, 64])


def test_error_of_a_product_against_float32():
    """Rows and weights of normal values lose 2.6% each to e4m3, together 3.7% (root mean squares)."""
    rng = np.random.default_rng(1)
    x, weight = rng.normal(size=(64, 512)), rng.normal(size=(256, 512)) * 0.02
    values, scale = quantize_rows(jnp.asarray(x, jnp.float32))
    scales = np.abs(weight).reshape(2, BLOCK, 4, BLOCK).max(axis=(1, 3)) / 448
    codes = (weight / np.repeat(np.repeat(scales, BLOCK, axis=0), BLOCK, axis=1)).astype(E4M3)
    got = scaled_matmul(values, scale, codes, scales.astype(np.float32), out_dtype=jnp.float32)
    exact = codes.astype(np.float64) * np.repeat(np.repeat(scales, BLOCK, axis=0), BLOCK, axis=1)

    def error(want):
        return np.linalg.norm(np.asarray(got) - want) / np.linalg.norm(want)

    assert error(x @ exact.T) == pytest.approx(0.026, abs=0.002)  # the rows alone
    assert error(x @ weight.T) == pytest.approx(0.037, abs=0.002)


def test_bad_arguments_are_named():
    x, x_scale, weights, scales, sizes = make([4, 5], 136, 256).arrays()
    bad = [
        ({"x": x.astype(np.float32)}, "x must have dtype float8_e4m3fn, got float32"),
        ({"x": x[:, :200]}, "columns of x must be a positive multiple of 128"),
        ({"x_scale": x_scale.T}, r"x_scale must have shape \[2, 9\], got \[9, 2\]"),
        ({"weights": weights[0]}, r"weights must have shape \[G, N, 256\]"),
        ({"weights": weights[:, :, :128]}, r"weights must have shape \[G, N, 256\], got \[2, 136, 128\]"),
        ({"weight_scales": scales[:, :1]}, r"weight_scales must have shape \[2, 2, 2\], got \[2, 1, 2\]"),
        ({"weight_scales": scales.astype(np.float64)}, "weight_scales must have dtype float32, got float64"),
        ({"group_sizes": sizes[:1]}, r"group_sizes must have shape \[2\], got \[1\]"),
        (
            {"group_sizes": sizes[:0], "first_group": jnp.int32(0)},
            r"group_sizes must name 1 to 2 groups, got shape \[0\]",
        ),
        ({"first_group": 0}, "first_group must be an array, got int"),
        ({"out_dtype": jnp.float16}, "out_dtype must be one of bfloat16, float32, got float16"),
        ({"implementation": "cutlass"}, r"implementation='cutlass' is not one of \["),
    ]
    names = ("x", "x_scale", "weights", "weight_scales", "group_sizes")
    for change, message in bad:
        with pytest.raises(ValueError, match=f"^grouped_scaled_matmul: {message}"):
            grouped_scaled_matmul(**(dict(zip(names, (x, x_scale, weights, scales, sizes), strict=True)) | change))
    with pytest.raises(ValueError, match=r"cannot run this call: the number of columns 129 is no multiple of 8"):
        scaled_matmul(x, x_scale, weights[0, :129], scales[0], implementation="mosaic_hopper")
    with pytest.raises(ValueError, match="quantize_rows: columns of x must be a multiple of 128"):
        quantize_rows(jnp.zeros((2, 100)))
    with pytest.raises(ValueError, match="quantize_rows: x must have dtype float32, bfloat16, got float16"):
        quantize_rows(jnp.zeros((2, 128), jnp.float16))


def test_no_rows_and_no_choice():
    """Nothing is an answer too; without a choice the definition runs, whatever the device."""
    x, x_scale, weights, scales, _ = make([0], 16, 128).arrays()
    assert scaled_matmul(x, x_scale, weights[0], scales[0]).shape == (0, 16)
    assert scaled_matmul(x, x_scale, weights[0], scales[0], implementation="mosaic_hopper").shape == (0, 16)
