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

    def select(tile):
        q, weights, start, end = tile
        scores = indexer_reference.lightning_indexer(q, k, weights, start, end, k_scale=k_scale, clean_logits=False)
        return topk_reference.topk(scores, top_k, start, end, return_scores=return_scores)

    bytes_per_row = indexer_reference.bytes_per_row(q.shape[1], k.shape[0])
    tile = rows_per_tile(q.shape[0], bytes_per_row, workspace_bytes)
    return map_row_tiles(select, (q, weights, key_start, key_end), tile)
