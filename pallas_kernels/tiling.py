"""Row tiling, which bounds the memory of an operation whatever its number of rows."""

from collections.abc import Callable
from typing import Any

import jax


def rows_per_tile(rows: int, bytes_per_row: int, workspace_bytes: int) -> int:
    """How many rows fit the workspace: at least 1, at most `rows`."""
    return max(1, min(rows, workspace_bytes // max(1, bytes_per_row)))


def map_row_tiles(fn: Callable[[Any], Any], rows: Any, tile: int) -> Any:
    """Apply `fn` to tiles of at most `tile` leading rows of the pytree `rows` and concatenate what it returns.

    `fn` maps a pytree of [t, ...] arrays to a pytree of [t, ...] arrays, row by row. Tiles run one after another.
    """
    total = jax.tree.leaves(rows)[0].shape[0]
    if tile >= total:
        return fn(rows)
    whole = total // tile * tile
    stacked = jax.tree.map(lambda x: x[:whole].reshape(whole // tile, tile, *x.shape[1:]), rows)
    done = jax.lax.map(fn, stacked)
    done = jax.tree.map(lambda x: x.reshape(whole, *x.shape[2:]), done)
    if whole == total:
        return done
    rest = fn(jax.tree.map(lambda x: x[whole:], rows))
    return jax.tree.map(lambda a, b: jax.numpy.concatenate([a, b]), done, rest)
