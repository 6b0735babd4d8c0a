"""Which rank computes which rows of the indexer, planned on the host from lengths that every rank knows.

A row costs the keys it scores. Two schemes:

- **contiguous** (vLLM's cost-balanced row sharding): ranks take consecutive runs of rows of equal cost. Runs differ
  in length: a fresh prompt gives rank 0 1/sqrt(ranks) of all rows, so the static capacity that every rank pads to, and
  with it the exchange of ids, may be sqrt(ranks) times what is needed.
- **balanced**: the rows are cut into small tiles of equal length, and each rank is dealt the same number of tiles, the
  costliest first to the rank with the least load. Every rank has rows / ranks rows in every step, so the shapes are
  the smallest there are and one program serves all steps. The costs differ by a tile or so; for one prompt the deal
  is the zigzag, which is exact because costs grow linearly.

Both give a `RowPlan`, which travels to the device as data: a new plan compiles nothing.
"""

import dataclasses
import heapq
import itertools
from collections.abc import Sequence

import jax
import numpy as np


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowPlan:
    """Rows of a step dealt to ranks, each row of the split range to exactly one.

    Attributes:
      rows: Rows of each rank [ranks, capacity] int32, -1 beyond its share.
      source: Where each row of the step comes back from in the gathered [ranks * capacity] results [T] int32; -1 for
        rows outside the split range: decode rows before it and padding after it.
    """

    rows: np.ndarray | jax.Array
    source: np.ndarray | jax.Array


def row_costs(seq_lens: Sequence[int] | np.ndarray, query_lens: Sequence[int] | np.ndarray, ratio: int) -> np.ndarray:
    """Keys that each row scores [sum(query_lens)] int64.

    Args:
      seq_lens: Tokens of each request with those of this step [requests].
      query_lens: Tokens of each request in this step [requests].
      ratio: Tokens of an index key: 1, or kpool.
    """
    seq_lens, query_lens = np.asarray(seq_lens, np.int64), np.asarray(query_lens, np.int64)
    if ratio <= 0:
        raise ValueError(f"ratio must be positive, got {ratio=}")
    if seq_lens.shape != query_lens.shape or seq_lens.ndim != 1:
        raise ValueError(f"seq_lens and query_lens must have one shape, got {seq_lens.shape} and {query_lens.shape}")
    if np.any(query_lens < 0) or np.any(query_lens > seq_lens):
        raise ValueError(f"query_lens must lie within seq_lens, got {query_lens.tolist()} and {seq_lens.tolist()}")
    first = np.cumsum(query_lens) - query_lens
    row_in_request = np.arange(query_lens.sum()) - np.repeat(first, query_lens)
    return (np.repeat(seq_lens - query_lens, query_lens) + 1 + row_in_request) // ratio


def plan_contiguous(
    seq_lens: Sequence[int] | np.ndarray,
    query_lens: Sequence[int] | np.ndarray,
    *,
    ratio: int,
    ranks: int,
    min_rows_per_rank: int,
    max_rows_per_rank: int | None = None,
) -> tuple[int, ...] | None:
    """Cut the rows into runs of equal cost, one a rank (vLLM #54394).

    All in int64: the total passes int32 at 65536 rows. The row that reaches a rank's target belongs to the next rank,
    and every rank gets a row.

    Args:
      seq_lens: Tokens of each request with those of this step [requests].
      query_lens: Tokens of each request in this step [requests].
      ratio: Tokens of an index key: 1, or kpool.
      ranks: How many ranks to split over.
      min_rows_per_rank: Fewer rows a rank than this are not worth the exchange.
      max_rows_per_rank: Static capacity of a rank, at the price of balance; None leaves the runs as they come.

    Returns:
      Number of rows of each rank, or None when every rank should compute all rows.
    """
    if ranks <= 0:
        raise ValueError(f"ranks must be positive, got {ranks=}")
    costs = row_costs(seq_lens, query_lens, ratio)
    rows = len(costs)
    if ranks < 2 or rows < ranks * max(1, min_rows_per_rank):
        return None
    cumulated = np.cumsum(costs)
    total = int(cumulated[-1])
    if total <= 0:
        return None
    targets = np.array([i * total // ranks for i in range(1, ranks)], np.int64)
    bounds = [0, *np.searchsorted(cumulated, targets, side="left").tolist(), rows]
    most = rows if max_rows_per_rank is None else max_rows_per_rank
    if most * ranks < rows:
        raise ValueError(f"{max_rows_per_rank=} on {ranks=} cannot hold {rows} rows")
    for i in range(1, ranks):
        bounds[i] = min(max(bounds[i], bounds[i - 1] + 1), bounds[i - 1] + most)
    for i in range(ranks - 1, 0, -1):
        bounds[i] = max(min(bounds[i], bounds[i + 1] - 1), bounds[i + 1] - most)
    return tuple(int(size) for size in np.diff(bounds))


def contiguous_plan(sizes: Sequence[int], *, rows: int, first_row: int = 0, capacity: int | None = None) -> RowPlan:
    """Plan that gives rank r the next `sizes[r]` rows.

    Args:
      sizes: Rows of each rank, as from `plan_contiguous`.
      rows: Rows T of the step, padding included.
      first_row: First row that is split; the decode rows before it stay out of the plan.
      capacity: Rows that every rank pads to; None means the largest size. Keep it fixed over the steps, or each new
        value compiles a new program.

    Raises:
      ValueError: A size passes the capacity, or the rows end beyond T.
    """
    capacity = max(sizes) if capacity is None else capacity
    if max(sizes) > capacity:
        raise ValueError(f"{sizes=} must not pass {capacity=}")
    bounds = first_row + np.concatenate([[0], np.cumsum(np.asarray(sizes, np.int64))])
    return _plan([np.arange(a, b) for a, b in itertools.pairwise(bounds)], rows, capacity)


def balanced_capacity(rows: int, *, ranks: int, tile: int) -> int:
    """Rows of every rank in the balanced scheme: a function of static shapes only."""
    for name, value in (("rows", rows), ("ranks", ranks), ("tile", tile)):
        if value <= 0:
            raise ValueError(f"{name} must be positive, got {name}={value}")
    return -(-rows // (tile * ranks)) * tile


def balanced_plan(costs: np.ndarray, *, rows: int, ranks: int, tile: int, first_row: int = 0) -> RowPlan:
    """Plan that deals tiles of rows of equal length so that all ranks have the same number and about the same cost.

    Args:
      costs: Cost of each row to split, as from `row_costs` [n] int64.
      rows: Rows T of the step, padding included.
      ranks: How many ranks to split over.
      tile: Consecutive rows dealt together; small tiles balance better, tiles of the kernel's rows run better.
      first_row: First row that is split; the decode rows before it stay out of the plan.

    Returns:
      A plan of capacity `balanced_capacity(rows, ranks=ranks, tile=tile)`; every rank's rows ascend.
    """
    capacity = balanced_capacity(rows, ranks=ranks, tile=tile)
    costs = np.asarray(costs, np.int64)
    tiles = -(-len(costs) // tile)
    tile_costs = np.pad(costs, (0, tiles * tile - len(costs))).reshape(tiles, tile).sum(axis=1)
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    # Ranks with room, by load; tiles of no cost, such as those that end before the first pool, even out by number.
    load = [(0, 0, rank) for rank in range(ranks)]
    for index in np.argsort(-tile_costs, kind="stable").tolist():
        cost, number, rank = heapq.heappop(load)
        dealt[rank].append(index)
        if (number + 1) * tile < capacity:
            heapq.heappush(load, (cost + int(tile_costs[index]), number + 1, rank))
    row = np.arange(tile)
    shares = [(np.array(sorted(mine), np.int64)[:, None] * tile + row).ravel() for mine in dealt]
    return _plan([first_row + share[share < len(costs)] for share in shares], rows, capacity)


def rank_costs(plan: RowPlan, costs: np.ndarray, *, first_row: int = 0) -> np.ndarray:
    """Cost of each rank under a plan [ranks] int64; max over mean is its imbalance."""
    rows = np.asarray(plan.rows, np.int64)
    own = rows >= 0
    return np.where(own, np.asarray(costs, np.int64)[np.where(own, rows - first_row, 0)], 0).sum(axis=1)


def _plan(shares: Sequence[np.ndarray], rows: int, capacity: int) -> RowPlan:
    """Pad the shares of the ranks to one capacity and invert them."""
    last = max((int(share.max()) for share in shares if len(share)), default=-1)
    if last >= rows:
        raise ValueError(f"the split rows end at row {last}, beyond {rows=}")
    table = np.full((len(shares), capacity), -1, np.int32)
    source = np.full(rows, -1, np.int32)
    for rank, share in enumerate(shares):
        table[rank, : len(share)] = share
        source[share] = rank * capacity + np.arange(len(share))
    return RowPlan(rows=table, source=source)
