"""Attention split by tokens inside a TP group: each rank attends all heads of its share of the rows.

A row's selected records are read once for all heads instead of once a rank, which is what sparse attention with few
heads a rank waits for. Queries travel from heads to rows and outputs back, by all_to_all.

With `axes=TP_AXES` every rank must be able to read all records (`ckv_gather`). Under the stock path split over
`axes=(QSPLIT,)` and let `attend` be `dcp_sparse_mla`, which handles the heads of the other DCP ranks.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from sharding.mesh import TP_AXES


def token_split(
    q: jax.Array,
    attend: Callable[[jax.Array, Any], Any],
    rows: Any,
    *,
    axes: Sequence[str] = TP_AXES,
    tile: int | None = None,
) -> Any:
    """Attend with all heads on this rank's share of the rows. Call it inside `shard_map` on all ranks alike.

    Args:
      q: Queries of this rank's heads [T, h, ...].
      attend: Maps queries of some rows and of all heads along `axes` [t, H, ...], and those rows of `rows`, to a pytree
        of [t, H, ...]. Heads are in the order of the ranks.
      rows: Pytree of what else the rows need [T, ...], such as slots and counts; the same on the ranks of `axes`.
        Rows that are added to divide evenly hold -1.
      axes: Mesh axes to split over.
      tile: Consecutive rows dealt together, round robin. None gives each rank one run, which is even only when the
        rows are: padding at the end leaves the last ranks idle.

    Returns:
      What `attend` returns, for all rows and this rank's heads [T, h, ...].
    """
    ranks = jax.lax.axis_size(tuple(axes))
    if ranks == 1:
        return attend(q, rows)
    total = q.shape[0]
    tile = -(-total // ranks) if tile is None else tile
    if tile <= 0:
        raise ValueError(f"tile must be positive, got {tile=}")
    deals = -(-total // (ranks * tile))
    rank = jax.lax.axis_index(tuple(axes))

    def deal(x: jax.Array) -> jax.Array:
        """[T, ...] to [ranks, t, ...]."""
        padding = deals * ranks * tile - total
        x = jnp.pad(x, ((0, padding), *((0, 0),) * (x.ndim - 1)), constant_values=-1)
        x = x.reshape(deals, ranks, tile, *x.shape[1:])
        return jnp.swapaxes(x, 0, 1).reshape(ranks, deals * tile, *x.shape[3:])

    def collect(x: jax.Array) -> jax.Array:
        """[ranks, t, h, ...] of the rows' ranks to [T, h, ...]."""
        x = jnp.swapaxes(x.reshape(ranks, deals, tile, *x.shape[2:]), 0, 1)
        return x.reshape(-1, *x.shape[3:])[:total]

    def to_rows(x: jax.Array) -> jax.Array:
        """Heads [T, h, ...] to rows [t, H, ...]."""
        x = jax.lax.all_to_all(deal(x), tuple(axes), 0, 0)  # [ranks of the heads, t, h, ...]
        return jnp.swapaxes(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])

    def to_heads(x: jax.Array) -> jax.Array:
        """Rows [t, H, ...] to heads [T, h, ...]."""
        x = jnp.swapaxes(x.reshape(x.shape[0], ranks, -1, *x.shape[2:]), 0, 1)
        return collect(jax.lax.all_to_all(x, tuple(axes), 0, 0))

    mine = jax.tree.map(lambda x: deal(x)[rank], rows)
    return jax.tree.map(to_heads, attend(to_rows(q), mine))
