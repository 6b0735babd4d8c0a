"""Plans of rows: the published vectors, the balance they promise, and every row dealt once."""

import json
import pathlib

import jax
import numpy as np
import pytest

from sharding.row_partition import (
    balanced_capacity,
    balanced_plan,
    contiguous_plan,
    plan_contiguous,
    rank_costs,
    row_costs,
)

VECTORS = pathlib.Path(__file__).parents[1] / "fixtures" / "vectors"
PLANNER = json.loads((VECTORS / "planner.json").read_text())["cases"]


@pytest.mark.parametrize("case", PLANNER)
def test_vectors(case):
    sizes = plan_contiguous(
        case["seq_lens"],
        case["query_lens"],
        ratio=case["ratio"],
        ranks=case["ranks"],
        min_rows_per_rank=case["min_rows_per_rank"],
    )
    assert sizes == (None if case["sizes"] is None else tuple(case["sizes"]))


def test_more_ranks_than_rows_is_not_split():
    assert plan_contiguous([50], [3], ratio=1, ranks=4, min_rows_per_rank=0) is None


def shape(name, floor, ranks):
    """Lengths of a step in the shapes that upstream's tests name."""
    rows = floor * ranks
    return {
        "fresh": ([2 * rows], [2 * rows]),
        "prefix": ([2 * rows + 200_000], [2 * rows]),
        "ragged": ([rows, 7, rows // 2 + 3, 5000], [rows, 7, rows // 2, 1]),
        "tail": ([17 * rows], [rows + 5]),
        "tight": ([rows + 2], [rows + 2]),
        "deep_first": ([500_000 + rows, rows], [rows // 3, rows]),
    }[name]


SHAPES = ["fresh", "prefix", "ragged", "tail", "tight", "deep_first"]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("name", SHAPES)
def test_both_schemes_are_balanced(name, ranks):
    seq_lens, query_lens = shape(name, 8192, ranks)
    costs = row_costs(seq_lens, query_lens, 4)
    sizes = plan_contiguous(seq_lens, query_lens, ratio=4, ranks=ranks, min_rows_per_rank=8192)
    assert sizes is not None
    assert sum(sizes) == len(costs)
    equal = [len(part) for part in np.array_split(np.arange(len(costs)), ranks)]

    def imbalance(plan):
        loads = rank_costs(plan, costs)
        assert loads.sum() == costs.sum()
        return loads.max() / loads.mean()

    even, planned = (imbalance(contiguous_plan(s, rows=len(costs))) for s in (equal, sizes))
    assert planned <= even + 1e-9
    assert planned < 1.02
    loads = rank_costs(balanced_plan(costs, rows=len(costs), ranks=ranks, tile=32), costs)
    assert loads.max() - loads.mean() <= 32 * costs.max()
    assert imbalance(balanced_plan(costs, rows=len(costs), ranks=ranks, tile=8)) < 1.01
    if name in ("prefix", "deep_first"):
        assert planned < 1.001


def test_a_run_is_as_long_as_the_capacity_allows():
    free = plan_contiguous([8192], [8192], ratio=1, ranks=4, min_rows_per_rank=0)
    held = plan_contiguous([8192], [8192], ratio=1, ranks=4, min_rows_per_rank=0, max_rows_per_rank=2560)
    assert max(free) == 4095
    assert held == (2560, 2560, 1974, 1098)
    with pytest.raises(ValueError, match=r"max_rows_per_rank=2047 .* cannot hold 8192 rows"):
        plan_contiguous([8192], [8192], ratio=1, ranks=4, min_rows_per_rank=0, max_rows_per_rank=2047)


def test_random_batches_deal_every_row_once():
    rng = np.random.default_rng(7)
    for _ in range(60):
        ranks = int(rng.integers(2, 9))
        query_lens = rng.integers(0, 60, int(rng.integers(1, 6)))
        seq_lens = query_lens + rng.integers(0, 400, len(query_lens)) * rng.integers(0, 2)
        decode, padding = int(rng.integers(0, 6)), int(rng.integers(0, 14))
        costs = row_costs(seq_lens, query_lens, int(rng.choice([1, 4])))
        rows = decode + len(costs) + padding
        plans = []
        cap = -(-len(costs) // ranks) + int(rng.integers(0, 9))
        sizes = plan_contiguous(seq_lens, query_lens, ratio=1, ranks=ranks, min_rows_per_rank=0, max_rows_per_rank=cap)
        if sizes is not None:
            assert min(sizes) >= 1
            plans.append(contiguous_plan(sizes, rows=rows, first_row=decode, capacity=cap))
        if rows:
            tile = int(rng.integers(1, 20))
            plans.append(balanced_plan(costs, rows=rows, ranks=ranks, tile=tile, first_row=decode))
            assert plans[-1].rows.shape == (ranks, balanced_capacity(rows, ranks=ranks, tile=tile))
        for plan in plans:
            check_plan(plan, rows, range(decode, decode + len(costs)))


def check_plan(plan, rows, split):
    """Each row of `split` sits in one place, `source` finds it there, and every rank's rows ascend before the -1."""
    assert plan.rows.dtype == plan.source.dtype == np.int32
    flat = plan.rows.ravel()
    assert sorted(flat[flat >= 0].tolist()) == list(split)
    for share in plan.rows:
        count = int(np.sum(share >= 0))
        assert np.all(share[count:] == -1)
        assert np.all(np.diff(share[:count]) > 0)
    assert plan.source.shape == (rows,)
    for row in range(rows):
        assert (plan.source[row] >= 0) == (row in split)
        if row in split:
            assert flat[plan.source[row]] == row


def test_padding_at_the_end_of_the_step_is_not_in_the_plan():
    plan = contiguous_plan([7, 17, 9, 13], rows=64, first_row=5)
    check_plan(plan, 64, range(5, 51))
    assert [int(share[0]) for share in plan.rows] == [5, 12, 29, 38]


def test_zigzag_is_what_a_whole_prompt_gets():
    plan = balanced_plan(row_costs([64], [64], 1), rows=64, ranks=4, tile=8)
    assert plan.rows[:, ::8].tolist() == [[0, 56], [8, 48], [16, 40], [24, 32]]


def test_rows_without_cost_are_dealt_too():
    plan = balanced_plan(np.zeros(16, np.int64), rows=32, ranks=4, tile=2)
    assert np.sum(plan.rows >= 0, axis=1).tolist() == [4, 4, 4, 4]


def test_a_new_plan_compiles_nothing():
    traces = []

    @jax.jit
    def load(plan):
        traces.append(plan)
        return plan.rows.sum() + plan.source.sum()

    for seq in (64, 640):
        load(balanced_plan(row_costs([seq], [40], 1), rows=64, ranks=4, tile=4))
    assert len(traces) == 1
    for seq in (64, 640):
        sizes = plan_contiguous([seq], [40], ratio=1, ranks=4, min_rows_per_rank=0)
        load(contiguous_plan(sizes, rows=64, capacity=32))
    assert len(traces) == 2


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="query_lens must lie within seq_lens"):
        row_costs([3], [4], 1)
    with pytest.raises(ValueError, match="ratio must be positive, got ratio=0"):
        row_costs([3], [3], 0)
    with pytest.raises(ValueError, match="one shape"):
        row_costs([3, 4], [3], 1)
    with pytest.raises(ValueError, match="ranks must be positive, got ranks=0"):
        plan_contiguous([3], [3], ratio=1, ranks=0, min_rows_per_rank=0)
    with pytest.raises(ValueError, match="must not pass capacity=3"):
        contiguous_plan([4, 2], rows=8, capacity=3)
    with pytest.raises(ValueError, match="end at row 8, beyond rows=8"):
        contiguous_plan([4, 2], rows=8, first_row=3)
    with pytest.raises(ValueError, match="tile must be positive"):
        balanced_capacity(8, ranks=2, tile=0)
