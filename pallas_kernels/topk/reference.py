"""The definition of the exact top-k in plain jnp."""

import jax
import jax.numpy as jnp

_OUTSIDE = -(2**31)
_NAN = _OUTSIDE + 1
_INFINITY_BITS = 0x7F800000


def sortable_key(scores: jax.Array) -> jax.Array:
    """Int32 keys in the order of the float32 `scores`: NaN lowest, then -inf .. +inf, with -0.0 equal to 0.0.

    On bits alone: comparing floats flushes subnormal scores to 0 on some backends, and only under jit.
    """
    bits = jax.lax.bitcast_convert_type(scores, jnp.int32)
    magnitude = bits & jnp.int32(0x7FFFFFFF)
    key = jnp.where(bits < 0, -magnitude, magnitude)
    return jnp.where(magnitude > _INFINITY_BITS, jnp.int32(_NAN), key)


def topk(
    scores: jax.Array, k: int, key_start: jax.Array, key_end: jax.Array, *, return_scores: bool = False
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.topk.api.topk`. A full sort on GPUs for k above 16."""
    columns = scores.shape[1]
    key_start = jnp.maximum(key_start, 0)
    ids = jnp.arange(columns, dtype=jnp.int32)[None, :]
    visible = (ids >= key_start[:, None]) & (ids < key_end[:, None])
    keys = jnp.where(visible, sortable_key(scores), jnp.int32(_OUTSIDE))
    # On integers lax.top_k is a total order and takes the lower column of equal keys.
    best, picked = jax.lax.top_k(keys, min(k, columns))
    valid = best > _OUTSIDE
    picked = picked.astype(jnp.int32)
    chosen = jnp.where(valid, picked - key_start[:, None], -1)
    pad = ((0, 0), (0, k - chosen.shape[1]))
    chosen = jnp.pad(chosen, pad, constant_values=-1)
    if not return_scores:
        return chosen
    values = jnp.where(valid, jnp.take_along_axis(scores, picked, axis=1), -jnp.inf)
    return chosen, jnp.pad(values, pad, constant_values=-jnp.inf)
