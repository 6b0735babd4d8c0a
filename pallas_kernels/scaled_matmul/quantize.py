"""Quantisation of activations for a block-scaled FP8 product."""

import jax
import jax.numpy as jnp

from pallas_kernels.checks import check_array
from pallas_kernels.ckv_records.rounding import E4M3_MAX, amax, encode_e4m3, quantize_power_of_two

OP = "quantize_rows"
BLOCK = 128
# Keeps the scale of a row of zeros normal; vLLM's per-token quantisation has the same floor.
AMAX_FLOOR = 1e-10


def quantize_rows(x: jax.Array, *, power_of_two: bool = False) -> tuple[jax.Array, jax.Array]:
    """Quantise rows to e4m3 with one scale for each 128 columns (DeepSeek-V3's activations, "1 x 128").

    `scale = max(amax, 1e-10) / 448` and values `x / scale`, rounded to nearest even. A division by a scale that is no
    power of two may round differently in its last bit on another backend, and with it a value near the middle of two
    codes.

    Args:
      x: Rows [M, K], float32 or bfloat16; K is a multiple of 128.
      power_of_two: Whether scales are rounded up to powers of two (`scale_fmt: ue8m0` of DeepSeek-V3.2).

    Returns:
      Values [M, K] float8_e4m3fn, and scales [K / 128, M] float32: those that a tile of rows needs lie together.

    Raises:
      ValueError: x has the wrong rank or dtype, or K is no multiple of 128.
    """
    check_array(OP, "x", x, ("M", "K"), (jnp.float32, jnp.bfloat16))
    rows, columns = x.shape
    if columns % BLOCK:
        raise ValueError(f"{OP}: columns of x must be a multiple of {BLOCK}, got shape {list(x.shape)}")
    groups = x.reshape(rows, columns // BLOCK, BLOCK).astype(jnp.float32)
    if power_of_two:
        values, scale = quantize_power_of_two(groups, AMAX_FLOOR)
    else:
        scale = jnp.maximum(amax(groups), AMAX_FLOOR) / E4M3_MAX
        values = encode_e4m3(groups / scale)
    return values.reshape(rows, columns), scale[:, :, 0].T
