"""Block FP8: equal to NumPy bit for bit, for whole weights, partial blocks at the edges, and slabs."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dsa_jax.quantization import dequantize_blocks, scale_shape
from tests.model.checkpoint_cases import bits, dequantize

pytestmark = pytest.mark.quick
jitted = jax.jit(dequantize_blocks, static_argnames="block_size")


def random_weight(shape, block_size, seed=0):
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, shape, dtype=np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0  # NaN has its own test.
    scale = rng.uniform(1e-4, 3, scale_shape(shape, block_size)).astype(np.float32)
    return codes.view(ml_dtypes.float8_e4m3fn), scale


@pytest.mark.parametrize(
    ("shape", "block_size"),
    [
        ((256, 384), (128, 128)),
        ((576, 200), (128, 128)),  # kv_a_proj_with_mqa has 576 rows: 5 blocks, the last of 64
        ((3, 5), (128, 128)),
        ((7, 9), (3, 4)),
        ((1, 1), (1, 1)),
    ],
)
def test_equal_to_numpy_bit_for_bit(shape, block_size):
    weight, scale = random_weight(shape, block_size)
    out = jitted(weight, scale, block_size=block_size)
    assert out.dtype == jnp.float32
    np.testing.assert_array_equal(bits(out), bits(dequantize(weight, scale, block_size)))


def test_every_code_of_e4m3_has_its_value():
    weight = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).reshape(16, 16)
    out = np.asarray(jitted(weight, np.full((1, 1), 2, np.float32), block_size=(128, 128)))
    np.testing.assert_array_equal(out, weight.astype(np.float32) * 2)
    assert np.isnan(out).sum() == 2 and np.nanmax(out) == 896


def test_a_slab_takes_the_scales_of_its_blocks():
    """Rows and columns of a rank begin anywhere in the whole weight, and where is known only on the device."""
    block_size = (3, 4)
    weight, scale = random_weight((10, 14), block_size)
    whole = dequantize(weight, scale, block_size)
    for row in range(6):
        for column in range(8):
            slab = np.s_[row : row + 5, column : column + 7]
            out = jitted(weight[slab], scale, block_size=block_size, offset=(row, column))
            np.testing.assert_array_equal(bits(out), bits(whole[slab]))


def test_too_few_scales_show_as_nan():
    weight, _ = random_weight((4, 4), (2, 2))
    out = jitted(weight, np.ones((1, 2), np.float32), block_size=(2, 2))
    assert np.isnan(out[2:]).all() and np.isfinite(out[:2]).all()


def test_scale_shape_counts_partial_blocks():
    assert scale_shape((576, 6144), (128, 128)) == (5, 48)
    assert scale_shape((8, 1, 129), (128, 128)) == (8, 1, 2)


@pytest.mark.parametrize(
    ("weight", "scale", "block_size", "message"),
    [
        ((4,), (1, 1), (2, 2), "2 dimensions"),
        ((4, 4), (2,), (2, 2), "2 dimensions"),
        ((4, 4), (2, 2), (0, 2), "block_size"),
    ],
)
def test_wrong_arguments(weight, scale, block_size, message):
    weight = jnp.zeros(weight, jnp.float8_e4m3fn)
    with pytest.raises(ValueError, match=message):
        dequantize_blocks(weight, jnp.ones(scale, jnp.float32), block_size=block_size)


def test_scales_must_be_float32():
    with pytest.raises(ValueError, match="bfloat16"):
        dequantize_blocks(jnp.zeros((4, 4), jnp.float8_e4m3fn), jnp.ones((2, 2), jnp.bfloat16), block_size=(2, 2))
