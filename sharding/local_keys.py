"""The keys of a step on each rank of a DCP group: one buffer a rank, request after request, local order inside.

A buffer has room for the history and for the chunk's own tokens. What holds for tokens holds for the indexer's pools,
with lengths and interleave counted in pools, and for index keys dealt to fewer ranks than the records are.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sharding.ownership import local_length, local_lengths, local_of, local_slot, owner_of


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KeyLayout:
    """Where each request's keys stand in the buffer of each rank; the same on all ranks.

    Attributes:
      lens: Keys of each request on each rank [ranks, requests] int32, those of this step included.
      starts: Their first buffer row [ranks, requests] int32.
    """

    lens: Any
    starts: Any

    @property
    def ranks(self) -> int:
        """Number of ranks that the keys are dealt to."""
        return self.lens.shape[0]


def key_layout(seq_lens: Any, *, ranks: int, interleave: int) -> KeyLayout:
    """Layout for requests of `seq_lens` keys [requests], a NumPy or jax array; a length of 0 is allowed."""
    lens = local_lengths(seq_lens, ranks=ranks, interleave=interleave)
    return KeyLayout(lens=lens, starts=lens.cumsum(axis=1, dtype=lens.dtype) - lens)


def rows_needed(layout: KeyLayout, multiple: int = 1) -> int:
    """Buffer rows that the fullest rank needs, rounded up; `layout` is NumPy's."""
    most = int(np.asarray(layout.lens, np.int64).sum(axis=1).max(initial=0))
    return -(-most // multiple) * multiple


def row_key_ranges(
    layout: KeyLayout, requests: jax.Array, visible: jax.Array, rank: jax.Array | int, *, interleave: int
) -> tuple[jax.Array, jax.Array]:
    """Range of a rank's buffer that each row sees: the first `visible` keys of its request that the rank holds.

    Args:
      layout: Where the keys stand.
      requests: Request of each row [T] int32, -1 for padding.
      visible: Keys that the row sees over all ranks [T] int32.
      rank: Whose buffer.
      interleave: Keys in a run.

    Returns:
      First row and one past the last row [T] int32; both 0 for padding. The range may be empty on some ranks.
    """
    real = requests >= 0
    start = jnp.where(real, layout.starts[rank][jnp.where(real, requests, 0)], 0)
    held = local_length(jnp.where(real, visible, 0), rank, ranks=layout.ranks, interleave=interleave)
    return start, start + held


def local_rows(
    layout: KeyLayout, positions: jax.Array, requests: jax.Array, rank: jax.Array | int, *, interleave: int
) -> jax.Array:
    """Buffer row of each key on a rank.

    Args:
      layout: Where the keys stand.
      positions: Global positions [...] int32, -1 for none.
      requests: Their requests, of a shape that broadcasts to theirs; any value for none.
      rank: Whose buffer.
      interleave: Keys in a run.

    Returns:
      Rows [...] int32, -1 for none, for a position that another rank holds, and for one beyond its request.
    """
    ranks = layout.ranks
    owned = (owner_of(positions, ranks=ranks, interleave=interleave) == rank) & (requests >= 0)
    request = jnp.where(requests >= 0, requests, 0)
    local = local_of(positions, ranks=ranks, interleave=interleave)
    inside = owned & (local < layout.lens[rank][request])
    return jnp.where(inside, layout.starts[rank][request] + local, -1)


def history_slots(
    layout: KeyLayout,
    context_lens: jax.Array,
    block_table: jax.Array,
    rank: jax.Array | int,
    *,
    rows: int,
    interleave: int,
    page_size: int,
) -> jax.Array:
    """Row of a rank's cache behind each row of its buffer; the same for all layers of a step.

    Args:
      layout: Where the keys stand, those of this step included.
      context_lens: Keys of each request in the cache before the step [requests] int32.
      block_table: Pages of each request [requests, max_pages] int32, -1 for none.
      rank: Whose buffer.
      rows: Rows of the buffer.
      interleave: Keys in a run.
      page_size: Keys of one rank in a page.

    Returns:
      Slots [rows] int32, -1 where the buffer holds no history: rows of the step's own keys, and the end.
    """
    row = jnp.arange(rows, dtype=jnp.int32)
    # The last request that starts at or before the row: those without keys share their start with the next one.
    request = jnp.searchsorted(layout.starts[rank], row, side="right").astype(jnp.int32) - 1
    local = row - layout.starts[rank][request]
    history = local_length(context_lens, rank, ranks=layout.ranks, interleave=interleave)
    return local_slot(jnp.where(local < history[request], local, -1), request, block_table, page_size=page_size)
