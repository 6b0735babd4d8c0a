"""The definition of the lightning indexer's scores in plain jnp."""

import jax
import jax.numpy as jnp


def lightning_indexer(
    q: jax.Array,
    k: jax.Array,
    weights: jax.Array,
    key_start: jax.Array,
    key_end: jax.Array,
    *,
    k_scale: jax.Array | None = None,
    clean_logits: bool = True,
) -> jax.Array:
    """See `pallas_kernels.lightning_indexer.api.lightning_indexer`. Holds [T, Hi, S] float32 at once."""
    # float8 has few dot kernels outside NVIDIA GPUs, and its products are exact in float32.
    q, k = q.astype(jnp.float32), k.astype(jnp.float32)
    dots = jnp.einsum("thd,sd->ths", q, k, precision=jax.lax.Precision.HIGHEST)  # [T, Hi, S]
    # where, not maximum: a NaN key must not become a zero score, and -0.0 must not appear.
    dots = jnp.where(dots > 0, dots, jnp.where(jnp.isnan(dots), dots, 0.0))
    scores = jnp.einsum("ths,th->ts", dots, weights, precision=jax.lax.Precision.HIGHEST)  # [T, S]
    if k_scale is not None:
        scores = scores * k_scale[None, :]
    if clean_logits:
        ids = jnp.arange(k.shape[0], dtype=jnp.int32)[None, :]
        visible = (ids >= key_start[:, None]) & (ids < key_end[:, None])
        scores = jnp.where(visible, scores, -jnp.inf)
    return scores
