"""Which rank of a DCP group holds which token of a request, and where.

Positions are dealt to the W ranks in runs of `interleave`: run c goes to rank c % W. The formulas take NumPy int64 on
the host and jnp int32 inside a step, scalars or arrays of any shape; a position or index below 0 means "none" and
stays -1. With `kpool` the same formulas apply to pools, with `pool_interleave` for the interleave.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# An int, a NumPy array or a jax array of integers.
Integers = Any


def check_ownership(*, ranks: int, interleave: int, page_size: int | None = None, kpool: int = 1) -> None:
    """Raise ValueError unless tokens can be dealt to ranks this way.

    Args:
      ranks: Size W of the DCP group.
      interleave: Tokens in a run.
      page_size: Tokens of one rank in a page of the cache; a page must hold whole runs. None skips the check.
      kpool: Tokens in a pool of the indexer; a run must hold whole pools when there are several ranks.
    """
    for name, value in (("ranks", ranks), ("interleave", interleave), ("kpool", kpool)):
        if value <= 0:
            raise ValueError(f"{name} must be positive, got {name}={value}")
    if page_size is not None:
        if page_size <= 0:
            raise ValueError(f"page_size must be positive, got {page_size=}")
        if page_size % interleave:
            raise ValueError(f"{page_size=} must be divisible by {interleave=}")
        if page_size % kpool:
            raise ValueError(f"{page_size=} must be divisible by {kpool=}")
    if ranks > 1 and interleave % kpool:
        raise ValueError(f"{interleave=} must be divisible by {kpool=} when {ranks=}: a pool may not be split")


def pool_interleave(interleave: int, kpool: int) -> int:
    """Pools in a run, for the formulas of this module on pools; 1 when runs and pools have no common geometry."""
    return max(1, interleave // kpool)


def owner_of(position: Integers, *, ranks: int, interleave: int) -> Integers:
    """Rank that holds a global position, or -1 for none."""
    xp = _namespace(position)
    return xp.where(position < 0, -1, position // interleave % ranks)


def local_of(position: Integers, *, ranks: int, interleave: int) -> Integers:
    """Index of a global position among those of its owner, or -1 for none."""
    xp = _namespace(position)
    return xp.where(position < 0, -1, position // (ranks * interleave) * interleave + position % interleave)


def global_of(local: Integers, rank: Integers, *, ranks: int, interleave: int) -> Integers:
    """Global position of a rank's local index, or -1 for none: the inverse of `owner_of` and `local_of`."""
    xp = _namespace(local, rank)
    position = local // interleave * (ranks * interleave) + rank * interleave + local % interleave
    return xp.where(local < 0, -1, position)


def local_length(length: Integers, rank: Integers, *, ranks: int, interleave: int) -> Integers:
    """How many of the first `length` positions a rank holds; also its causal bound for a row that sees `length`."""
    xp = _namespace(length, rank)
    base = length // interleave // ranks * interleave
    return base + xp.clip(length - base * ranks - rank * interleave, 0, interleave)


def local_lengths(lengths: Integers, *, ranks: int, interleave: int) -> Integers:
    """`local_length` of every rank: [ranks, *lengths.shape]; the sum over ranks is `lengths`."""
    xp = _namespace(lengths)
    shape = (ranks,) + (1,) * lengths.ndim
    rank = xp.arange(ranks, dtype=lengths.dtype).reshape(shape)
    return local_length(lengths[None], rank, ranks=ranks, interleave=interleave)


def local_slot(local: Integers, requests: Integers, block_table: Integers, *, page_size: int) -> Integers:
    """Row of a rank's cache that holds a local index; the same for any number of ranks and interleave.

    Args:
      local: Local indices [...], -1 for none.
      requests: Request of each index, of a shape that broadcasts to theirs; any value for none.
      block_table: Pages of each request [requests, max_pages], -1 for a page not given.
      page_size: Tokens of one rank in a page.

    Returns:
      Slots [...] of the block table's dtype: -1 for none, for a request or an index outside the table, and for an
      index on a page that is not given.
    """
    xp = _namespace(local, block_table)
    page = local // page_size
    inside = (local >= 0) & (page < block_table.shape[1]) & (requests >= 0) & (requests < block_table.shape[0])
    physical = block_table[xp.where(inside, requests, 0), xp.where(inside, page, 0)]
    return xp.where(inside & (physical >= 0), physical * page_size + local % page_size, -1)


def slot_mapping(
    positions: Integers,
    requests: Integers,
    block_table: Integers,
    rank: Integers,
    *,
    ranks: int,
    interleave: int,
    page_size: int,
) -> Integers:
    """Row of a rank's cache that each token is written to.

    Args:
      positions: Global position of each token in its request [T], -1 for padding.
      requests: Request of each token [T]; any value for padding.
      block_table: Pages of each request [requests, max_pages], -1 for none. One page stands for `page_size * ranks`
        positions and holds `page_size` of them on every rank.
      rank: The rank whose cache is meant.
      ranks: Size of the DCP group.
      interleave: Tokens in a run.
      page_size: Tokens of one rank in a page.

    Returns:
      Slots [T] of the inputs' integer dtype; -1 where the rank does not hold the token, which must not be written:
      scatter with `mode="drop"`, because JAX takes -1 for the last row otherwise.
    """
    check_ownership(ranks=ranks, interleave=interleave, page_size=page_size)
    xp = _namespace(positions, block_table)
    owned = owner_of(positions, ranks=ranks, interleave=interleave) == rank
    local = xp.where(owned, local_of(positions, ranks=ranks, interleave=interleave), -1)
    return local_slot(local, requests, block_table, page_size=page_size)


def _namespace(*values: Integers) -> Any:
    """Jnp when any of the values lives there, else NumPy."""
    return jnp if any(isinstance(value, jax.Array) for value in values) else np
