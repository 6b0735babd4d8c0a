"""Scores and selects on Hopper: tiles of rows through the indexer's kernel and the top-k's.

Of very long rows the indexer also keeps the highest score of every 16 keys, and the top-k reads only those maxima and
the 2048 blocks that can hold a winner. Shorter rows are read once as a whole, which costs the same there.
"""

import functools
from typing import cast

import jax

from pallas_kernels.lightning_indexer import mosaic_hopper as indexer_kernel
from pallas_kernels.tiling import map_row_tiles, rows_per_tile
from pallas_kernels.topk import mosaic_blocks
from pallas_kernels.topk import mosaic_hopper as topk_kernel

BLOCK_ROWS = 64  # query rows that the indexer scores together
# On an H200 the selection of 4096 x 131072 took 0.79 ms from whole rows and 0.81 ms from block maxima.
BLOCK_MAX_FROM = 1 << 19  # keys


def why_not(q: jax.Array, k: jax.Array, top_k: int) -> str | None:
    """Why the kernels cannot run the call, or None."""
    return indexer_kernel.why_not(q) or topk_kernel.why_not(k.shape[0], top_k)


def uses_block_max(keys: int, top_k: int) -> bool:
    """Whether rows of this many keys are selected from block maxima."""
    return keys >= BLOCK_MAX_FROM and mosaic_blocks.why_not(keys, top_k) is None


def tile_rows(rows: int, bytes_per_row: int, workspace_bytes: int) -> int:
    """Rows of a tile: whole blocks of the indexer where they fit the workspace, and tiles of about one size."""
    most = rows_per_tile(rows, bytes_per_row, workspace_bytes)
    if most < BLOCK_ROWS or most == rows:
        return most
    most = most // BLOCK_ROWS * BLOCK_ROWS
    tiles = -(-rows // most)
    return min(most, -(-rows // (tiles * BLOCK_ROWS)) * BLOCK_ROWS)


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
    """See `pallas_kernels.index_topk.api.index_topk`. Valid ids are ascending."""
    rows, keys = q.shape[0], k.shape[0]
    by_blocks = uses_block_max(keys, top_k)

    def select(tile):
        q, weights, start, end = tile
        score = functools.partial(indexer_kernel.lightning_indexer, q, k, weights, start, end, clean_logits=False)
        if by_blocks:
            scores, block_max = score(k_scale=k_scale, block_max=True)
            return mosaic_blocks.topk(scores, block_max, top_k, start, end, return_scores=return_scores)
        scores = cast(jax.Array, score(k_scale=k_scale))
        return topk_kernel.topk(scores, top_k, start, end, return_scores=return_scores)

    maxima = -(-keys // mosaic_blocks.BLOCK) if by_blocks else 0
    tile = tile_rows(rows, 4 * (keys + maxima), workspace_bytes)
    return map_row_tiles(select, (q, weights, key_start, key_end), tile)
