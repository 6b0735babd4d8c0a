"""The definition of the lightning indexer's scores in plain jnp."""

import jax
import jax.numpy as jnp

from pallas_kernels.tiling import map_row_tiles, rows_per_tile

WORKSPACE_BYTES = 1 << 30


def bytes_per_row(heads: int, keys: int) -> int:
    """Memory that one query row needs at a time: the products of its heads, their relu, and a few rows of scores."""
    return 4 * keys * (2 * heads + 4)


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
    """See `pallas_kernels.lightning_indexer.api.lightning_indexer`. Rows are tiled to hold WORKSPACE_BYTES at most."""
    # float8 has few dot kernels outside NVIDIA GPUs, and its products are exact in float32.
    k = k.astype(jnp.float32)

    def score(tile):
        q, weights, start, end = tile
        dots = jnp.einsum("thd,sd->ths", q.astype(jnp.float32), k, precision=jax.lax.Precision.HIGHEST)  # [t, Hi, S]
        # where, not maximum: a NaN product gives 0, as the max instruction of GPUs does.
        relu = jnp.where(dots > 0, dots, 0.0)
        scores = jnp.sum(weights[:, :, None] * relu, axis=1)  # [t, S]
        if k_scale is not None:
            scores = scores * k_scale[None, :]
        if clean_logits:
            ids = jnp.arange(k.shape[0], dtype=jnp.int32)[None, :]
            visible = (ids >= start[:, None]) & (ids < end[:, None])
            scores = jnp.where(visible, scores, -jnp.inf)
        return scores

    tile = rows_per_tile(q.shape[0], bytes_per_row(q.shape[1], k.shape[0]), WORKSPACE_BYTES)
    return map_row_tiles(score, (q, weights, key_start, key_end), tile)
