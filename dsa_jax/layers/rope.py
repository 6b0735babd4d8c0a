"""Rotary position embedding: default and YaRN frequencies, interleaved and half-split pairs."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from dsa_jax.config import RopeConfig, YarnConfig


def _yarn_ramp(yarn: YarnConfig, theta: float, dim: int) -> np.ndarray:
    """Share of interpolation of each frequency [dim / 2]: 0 keeps it, 1 divides it by the factor (Peng et al. 2023)."""

    def correction(rotations: float) -> float:
        return dim * math.log(yarn.original_max_position_embeddings / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(correction(yarn.beta_fast)), 0)
    high = min(math.ceil(correction(yarn.beta_slow)), dim - 1)
    high = high if high != low else high + 0.001
    return np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def frequencies(rope: RopeConfig, dim: int) -> tuple[np.ndarray, float]:
    """Angular frequencies [dim / 2] float64 and the factor on cos and sin."""
    freq = rope.theta ** -(np.arange(0, dim, 2, dtype=np.float64) / dim)
    if rope.yarn is None:
        return freq, 1.0
    yarn = rope.yarn
    ramp = _yarn_ramp(yarn, rope.theta, dim)
    freq = freq / yarn.factor * ramp + freq * (1 - ramp)
    return freq, _mscale(yarn.factor, yarn.mscale) / _mscale(yarn.factor, yarn.mscale_all_dim)


def cos_sin(rope: RopeConfig | None, dim: int, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine [T, dim / 2] float32 at `positions` [T] int32; `dim` is 0 without a positional encoding."""
    if rope is None:
        empty = jnp.zeros((positions.shape[0], dim // 2), jnp.float32)
        return empty, empty
    freq, factor = frequencies(rope, dim)
    angle = positions.astype(jnp.float32)[:, None] * jnp.asarray(freq, jnp.float32)
    return jnp.cos(angle) * jnp.float32(factor), jnp.sin(angle) * jnp.float32(factor)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, *, interleave: bool) -> jax.Array:
    """Rotate pairs of the last axis.

    Args:
      x: [T, ..., dim].
      cos: [T, dim / 2] float32.
      sin: [T, dim / 2] float32.
      interleave: Pairs are (0, 1), (2, 3), ... when True, else (0, dim / 2), (1, dim / 2 + 1), ...

    Returns:
      The rotated pairs at their places, dtype of x.
    """
    shape = (cos.shape[0], *(1,) * (x.ndim - 2), cos.shape[1])
    cos, sin = cos.reshape(shape), sin.reshape(shape)
    half = x.shape[-1] // 2
    y = x.astype(jnp.float32)
    if interleave:
        pairs = y.reshape(*x.shape[:-1], half, 2)
        a, b = pairs[..., 0], pairs[..., 1]
        return jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(x.shape).astype(x.dtype)
    a, b = y[..., :half], y[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
