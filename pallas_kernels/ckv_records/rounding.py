"""Arithmetic of the quantised records, the same to the last bit on every backend.

XLA divides approximately on GPUs (`div.full.f32`, `rcp.approx.f32`, a product with the reciprocal of a constant) and
exactly on CPUs, and converts float32 to e4m3 through float16 on some backends. A value that falls on the middle between
two codes would be stored differently. What is here uses only operations that IEEE 754 fixes, or integers.
"""

import jax
import jax.numpy as jnp

E4M3_MAX = 448.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX = 6.0

_MANTISSA = 0x7FFFFF
_IMPLICIT_ONE = 0x800000


def _bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.uint32)


def _from_bits(bits: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _exponent(bits: jax.Array) -> jax.Array:
    """Biased exponent, int32."""
    return ((bits >> 23) & 0xFF).astype(jnp.int32)


def divide(x: jax.Array, y: jax.Array) -> jax.Array:
    """`x / y` rounded to nearest even, as IEEE 754 has it.

    Args:
      x: float32; a subnormal counts as 0.
      y: float32 of a shape that broadcasts to x's, positive and normal.

    Returns:
      float32 of the common shape; a quotient below the smallest normal is 0.
    """
    x, y = jnp.broadcast_arrays(x, y)
    bx, by = _bits(x), _bits(y)
    mx, my = (bx & _MANTISSA) | _IMPLICIT_ONE, (by & _MANTISSA) | _IMPLICIT_ONE
    below = mx < my
    exponent = _exponent(bx) - _exponent(by) + 127 - below.astype(jnp.int32)
    # Long division of the mantissas, 8 bits a step: the quotient's 24 bits and one more to round by.
    quotient = jnp.ones_like(mx)
    rest = jnp.where(below, mx << 1, mx) - my
    for _ in range(3):
        rest = rest << 8
        digit = rest // my
        rest = rest - digit * my
        quotient = (quotient << 8) | digit
    # The middle between two floats is no quotient of two floats: the bit after the last decides alone.
    mantissa = (quotient >> 1) + (quotient & 1)
    # A mantissa rounded up to 2**24 carries into the exponent by itself.
    magnitude = (jnp.clip(exponent, 0, 254).astype(jnp.uint32) << 23) + (mantissa - _IMPLICIT_ONE)
    magnitude = jnp.where(exponent > 0, magnitude, 0)
    magnitude = jnp.where(exponent > 254, jnp.uint32(0x7F800000), magnitude)
    magnitude = jnp.where(_exponent(bx) == 0, 0, magnitude)
    exact = _from_bits(magnitude | ((bx >> 31) << 31))
    return jnp.where(jnp.isfinite(x) & jnp.isfinite(y), exact, x / y)


def _round_to_step(x: jax.Array, mantissa_bits: int, min_exponent: int) -> jax.Array:
    """Round to nearest even on the grid of a small float; below `min_exponent` the steps stay as wide as there."""
    exponent = jnp.maximum(_exponent(_bits(x)) - 127, min_exponent) - mantissa_bits
    step = _from_bits((exponent + 127).astype(jnp.uint32) << 23)
    inverse = _from_bits((127 - exponent).astype(jnp.uint32) << 23)
    return jnp.round(x * inverse) * step


def round_to_e4m3(x: jax.Array) -> jax.Array:
    """Nearest e4m3 value, ties to even, beyond 448 saturated; NaN stays NaN. float32 in and out."""
    # Clamping first keeps every step's reciprocal finite; it changes nothing, since 448 is the largest code.
    return _round_to_step(jnp.clip(x, -E4M3_MAX, E4M3_MAX), 3, -6)


def encode_e4m3(x: jax.Array) -> jax.Array:
    """Codes of `round_to_e4m3(x)`, as float8_e4m3fn of the same shape."""
    return round_to_e4m3(x).astype(jnp.float8_e4m3fn)


def encode_e2m1(x: jax.Array) -> jax.Array:
    """Nearest e2m1 value, ties to even, beyond 6 saturated, as PTX `cvt.rn.satfinite.e2m1x2.f32`.

    Args:
      x: float32. NaN becomes 6, which is what the instruction does: e2m1 has no NaN.

    Returns:
      Codes of the same shape, uint8 in the low nibble: a sign bit, then an index into `E2M1_VALUES`.
    """
    nan = jnp.isnan(x)
    magnitude = jnp.clip(jnp.where(nan, E2M1_MAX, jnp.abs(x)), 0.0, E2M1_MAX)
    halves = jnp.round(2.0 * magnitude)  # 0, 0.5, 1, 1.5, 2 are codes 0 to 4
    ones = jnp.round(magnitude) + 2.0  # 2, 3, 4 are codes 4 to 6
    twos = jnp.round(0.5 * magnitude) + 4.0  # 4, 6 are codes 6 and 7
    code = jnp.where(magnitude < 2.0, halves, jnp.where(magnitude < 4.0, ones, twos)).astype(jnp.uint8)
    sign = jnp.where(nan, jnp.uint8(0), (_bits(x) >> 28).astype(jnp.uint8) & 8)
    return code | sign


def decode_e2m1(codes: jax.Array) -> jax.Array:
    """Values of e2m1 codes (uint8 below 16), float32."""
    table = jnp.asarray([*E2M1_VALUES, *(-v for v in E2M1_VALUES)], jnp.float32)
    return table[codes]


def amax(x: jax.Array) -> jax.Array:
    """Largest magnitude along the last axis, kept as 1. NaN is passed over, as `fmaxf` does: it spoils no neighbour."""
    return jnp.max(jnp.where(jnp.isnan(x), 0.0, jnp.abs(x)), axis=-1, keepdims=True)


def quantize_power_of_two(x: jax.Array, amax_floor: float) -> tuple[jax.Array, jax.Array]:
    """Quantise rows to e4m3 with a power-of-two scale ("ue8m0" rounding of DeepSeek-V3.2's indexer).

    `scale = 2**ceil(log2(max(amax, amax_floor) / 448))`, values `x / scale`. Both are exact up to the rounding to e4m3.

    Args:
      x: Rows [..., D], float32 or bfloat16.
      amax_floor: Smallest magnitude that a row is scaled for. vLLM's `indexer_k_quant_and_cache` has 1e-4 for keys,
        its per-token quantisation of index queries 1e-10.

    Returns:
      Values [..., D] float8_e4m3fn and scale [..., 1] float32.
    """
    x = x.astype(jnp.float32)
    bits = _bits(jnp.maximum(amax(x), jnp.float32(amax_floor)))
    # 448 is 1.75 * 2**8: a mantissa above 1.75 needs the next power of two.
    exponent = _exponent(bits) - 8 + ((bits & _MANTISSA) > 0x600000).astype(jnp.int32)
    scale = _from_bits(exponent.astype(jnp.uint32) << 23)
    inverse = _from_bits((254 - exponent).astype(jnp.uint32) << 23)
    return encode_e4m3(x * inverse), scale
