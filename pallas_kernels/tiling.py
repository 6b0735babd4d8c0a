"""Row tiling, which bounds the memory of an operation whatever its number of rows."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def rows_per_tile(rows: int, bytes_per_row: int, workspace_bytes: int) -> int:
    """How many rows fit the workspace: at least 1, at most `rows`."""
    return max(1, min(rows, workspace_bytes // max(1, bytes_per_row)))


def map_row_tiles(fn: Callable[[Any], Any], rows: Any, tile: int) -> Any:
    """Apply `fn` to tiles of at most `tile` leading rows of the pytree `rows` and concatenate what it returns.

    Tiles run one after another and are read where they lie: no copy of `rows` is made. Where no size near `tile`
    divides the number of rows, the last tile overlaps the one before it, so that one program serves all tiles.

    Args:
      fn: Maps a pytree of [t, ...] arrays to a pytree of [t, ...] arrays, row by row.
      rows: Pytree of arrays [T, ...].
      tile: Rows of a tile, positive.
    """
    total = jax.tree.leaves(rows)[0].shape[0]
    if tile >= total:
        return fn(rows)
    # Tiles that divide the rows need no copy to join what they return.
    tile = next((size for size in range(tile, tile // 2, -1) if total % size == 0), tile)
    tiles = -(-total // tile)

    def run(index):
        start = jnp.minimum(index * tile, total - tile)
        return fn(jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, tile), rows))

    done = jax.lax.map(run, jnp.arange(tiles, dtype=jnp.int32))
    overlap = tiles * tile - total

    def join(x):  # [tiles, tile, ...]
        if overlap == 0:
            return x.reshape(total, *x.shape[2:])
        head = x[:-1].reshape(total - tile + overlap, *x.shape[2:])
        return jnp.concatenate([head, x[-1, overlap:]])

    return jax.tree.map(join, done)
