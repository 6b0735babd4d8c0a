"""The definition of the fused scoring and selection: row tiles through the two reference operations."""

import jax

from pallas_kernels.lightning_indexer import reference as indexer_reference
from pallas_kernels.tiling import map_row_tiles, rows_per_tile
from pallas_kernels.topk import reference as topk_reference


def index_topk(
    q: jax.Array,
    k: jax.Array,
    weights: jax.Array,
    key_start: jax.Array,
    key_end: jax.Array,
    top_k: int,
    *,
    k_scale: jax.Array | None,
    return_scores: bool,
    workspace_bytes: int,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.index_topk.api.index_topk`."""
    rows, heads, _ = q.shape

    def select(tile):
        q, weights, start, end = tile
        scores = indexer_reference.lightning_indexer(q, k, weights, start, end, k_scale=k_scale, clean_logits=False)
        return topk_reference.topk(scores, top_k, start, end, return_scores=return_scores)

    # [Hi, S] products, their relu, and a few [S] rows of scores and keys
    bytes_per_row = 4 * k.shape[0] * (2 * heads + 4)
    tile = rows_per_tile(rows, bytes_per_row, workspace_bytes)
    return map_row_tiles(select, (q, weights, key_start, key_end), tile)
