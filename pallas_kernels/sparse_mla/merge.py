"""Merge of attention over parts of the keys."""

import jax
import jax.numpy as jnp

from pallas_kernels.checks import check_array


def merge_weights(lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Weights of the parts and the log-sum-exp of their union.

    Args:
      lse: Log-sum-exp of each part [R, ...] float32, natural log. NaN and +inf count as -inf: an empty part.

    Returns:
      Weights [R, ...] that sum to 1, or are all 0 where every part is empty; and the merged lse [...].
    """
    lse = jnp.where(jnp.isnan(lse) | (lse == jnp.inf), -jnp.inf, lse)
    top = jnp.max(lse, axis=0)
    top = jnp.where(top == -jnp.inf, 0.0, top)
    parts = jnp.exp(lse - top)
    total = jnp.sum(parts, axis=0)
    empty = total == 0
    merged = jnp.where(empty, -jnp.inf, top + jnp.log(jnp.where(empty, 1.0, total)))
    return parts / jnp.where(empty, 1.0, total), merged


def weigh(out: jax.Array, weight: jax.Array) -> jax.Array:
    """`weight * out` in float32 where a weight of 0 gives 0 even if the part holds NaN.

    Args:
      out: Output of a part [..., D].
      weight: Its weight [...] float32.
    """
    weight = weight[..., None]
    return jnp.where(weight == 0, 0.0, weight * out.astype(jnp.float32))


def merge_partials(out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Merge attention outputs over disjoint sets of keys into attention over their union.

    Args:
      out: Outputs [R, T, H, D] of the R parts, float32 or bfloat16.
      lse: Natural log-sum-exp [R, T, H] float32; NaN, +inf and -inf mark an empty part.

    Returns:
      Output [T, H, D] float32 and lse [T, H] float32. Where all parts are empty: 0 and -inf.

    Raises:
      ValueError: The shapes or dtypes do not fit.
    """
    check_array("merge_partials", "out", out, ("R", "T", "H", "D"), (jnp.float32, jnp.bfloat16))
    check_array("merge_partials", "lse", lse, out.shape[:3], (jnp.float32,))
    if out.shape[0] == 0:
        raise ValueError(f"merge_partials: out must hold at least one part, got shape {list(out.shape)}")
    out, lse = jnp.asarray(out), jnp.asarray(lse)
    weights, merged = merge_weights(lse)
    return jnp.sum(weigh(out, weights), axis=0), merged
