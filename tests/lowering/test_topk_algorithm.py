"""The body of the Hopper top-k, run thread by thread on the CPU with a check for races."""

import dataclasses

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pallas_kernels.topk import mosaic_blocks, mosaic_hopper, mosaic_rows, mosaic_select, mosaic_stream
from pallas_kernels.topk.arg_specs import KINDS, expected_ids, score_row
from tests.lowering import simt

THREADS = 128


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch):
    for module in (mosaic_select, mosaic_stream, mosaic_rows, mosaic_blocks):
        monkeypatch.setattr(module, "em", simt)


def _block(layout, seen):
    simt.Machine.start(layout.threads)
    arrays = [simt.Array.of(np.full(size, 99, dtype), shared=True) for size, dtype in mosaic_rows.shared_arrays(layout)]
    block = mosaic_rows.make_block(layout, arrays)
    if seen is not None:
        _watch(block, seen)
    block.initialise()
    return block


def run(scores, k, starts, ends, *, slices=1, blocks=2, seen=None, maxima=None, **changes):
    """Ids and scores of the kernel for flat (row, slice) pairs; `seen` counts what happened on the way."""
    config = mosaic_hopper.TopkConfig(warpgroups=1, **changes)
    layout = mosaic_hopper.make_layout(config, scores.shape[1], k, slices)
    rows = len(starts)
    ids = simt.Array.of(np.full(rows * k, 7777, np.int32))
    values = simt.Array.of(np.full(rows * k, 7777, np.float32))
    bounds = [simt.Array.of(np.asarray(x, np.int32)) for x in (starts, ends)]
    arrays = simt.Array.of(scores.reshape(-1)), *bounds, ids, values
    for index in range(blocks):
        block = _block(layout, seen)
        if maxima is None:
            walk = mosaic_rows.Rows(rows, blocks, block, *arrays)
        else:
            listed = simt.Array.of(np.full(-(-k // THREADS) * THREADS, 99, np.int32), shared=True)
            walk = mosaic_blocks.BlockRows(rows, blocks, block, arrays, simt.Array.of(maxima.reshape(-1)), listed)
        walk.run(simt.constant(index))
    return ids.memory.data.reshape(rows, k), values.memory.data.reshape(rows, k)


def _watch(block, seen):
    """Count the cuts in the middle of a row and the rows streamed twice."""
    cut, stream = block.cut, block.stream

    def counted_cut(*args):
        seen["cuts"] = seen.get("cuts", 0) + 1
        return cut(*args)

    def counted_stream(*args):
        seen["streams"] = seen.get("streams", 0) + 1
        return stream(*args)

    block.cut, block.stream = counted_cut, counted_stream


def check(scores, k, starts, ends, **options):
    """Compare with a stable sort; order included, which the kernel makes ascending."""
    ids, values = run(scores, k, starts, ends, **options)
    for r, (start, end) in enumerate(zip(starts, ends, strict=True)):
        row = scores[r // options.get("slices", 1)]
        want = expected_ids(row, k, start, end)
        np.testing.assert_array_equal(ids[r], want)
        found = want[want >= 0]
        np.testing.assert_array_equal(values[r, : found.size], row[found + start])
        assert np.all(values[r, found.size :] == -np.inf)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_row(kind):
    rng = np.random.default_rng(1)
    scores = np.stack([score_row(rng, kind, 9001) for _ in range(3)])  # rows start at every offset in 16 bytes
    check(scores, 40, [0, 0, 5], [9001, 9001, 8000])


@pytest.mark.parametrize("kind", ["normal", "relu", "mostly_nan", "ascending"])
def test_without_a_sample(kind):
    rng = np.random.default_rng(2)
    scores = np.stack([score_row(rng, kind, 9000) for _ in range(2)])
    check(scores, 300, [0, 1], [9000, 8999], sample_vectors=0)


def test_gate_too_high_streams_again():
    rng = np.random.default_rng(3)
    scores = rng.standard_normal((2, 9000)).astype(np.float32)
    seen = {}
    check(scores, 300, [0, 0], [9000, 9000], target_share=1e-6, seen=seen)
    assert seen["streams"] > 2


def test_gate_too_low_cuts_on_the_way():
    rng = np.random.default_rng(4)
    scores = np.stack([score_row(rng, "ascending", 12000)] * 2)
    seen = {}
    check(scores, 100, [0, 3], [12000, 11999], sample_vectors=0, seen=seen)
    assert seen["cuts"] > 2 * 3


def test_sample_that_misses_the_winners():
    scores = np.zeros((1, 9000), np.float32)
    scores[0, 3000:3200] = np.arange(200)  # a cluster that decides alone
    check(scores, 64, [0], [9000], blocks=1)


def test_lengths_around_k_and_around_a_step():
    rng = np.random.default_rng(5)
    k, step = 50, THREADS * mosaic_select.PER_THREAD
    lengths = [0, 1, k - 1, k, k + 1, step - 1, step, step + 1, 2 * step + 3, -4]
    scores = rng.standard_normal((len(lengths), 3 * step)).astype(np.float32)
    starts = [3 * i for i in range(len(lengths))]
    check(scores, k, starts, [s + n for s, n in zip(starts, lengths, strict=True)], blocks=3)


def test_slices_of_a_row():
    rng = np.random.default_rng(6)
    scores = np.stack([score_row(rng, "ties", 9000) for _ in range(2)])
    check(scores, 20, [0, 4500, 0, 4500], [4500, 9000, 4500, 4600], slices=2)


def test_what_lies_outside_a_range_never_matters():
    rng = np.random.default_rng(7)
    inner = rng.standard_normal((1, 9000)).astype(np.float32)
    for outside in (np.inf, np.nan):
        scores = np.full((3, 9000), outside, np.float32)
        scores[1, 101:8000] = inner[0, 101:8000]
        check(scores, 40, [0, 101, 0], [0, 8000, 0])


@pytest.mark.parametrize("missing", range(2))
def test_a_missing_barrier_is_noticed(monkeypatch, missing):
    """The check for races can fail: without the barriers of one part it does."""
    scores = np.random.default_rng(8).standard_normal((1, 9000)).astype(np.float32)
    name = ("select", "stream")[missing]
    real = getattr(mosaic_stream.StreamingBlock, name)

    def without_barriers(self, *args):
        own = self.barrier
        self.barrier = lambda: None
        try:
            return real(self, *args)
        finally:
            self.barrier = own

    monkeypatch.setattr(mosaic_stream.StreamingBlock, name, without_barriers)
    with pytest.raises(AssertionError, match=r"races|waited|threads write"):
        check(scores, 40, [0], [9000], blocks=1)


@st.composite
def _rows(draw):
    """A row of values drawn from a small pool, a k, and a range."""
    seed = draw(st.integers(0, 2**32 - 1))
    pool = draw(st.lists(st.floats(width=32), min_size=1, max_size=6))
    share = draw(st.sampled_from([0.0, 0.01, 0.5, 1.0]))
    columns = draw(st.integers(1, 7000))
    rng = np.random.default_rng(seed)
    picked = rng.choice(np.asarray(pool, np.float32), columns)
    row = np.where(rng.random(columns) < share, picked, rng.standard_normal(columns)).astype(np.float32)
    start = draw(st.integers(0, columns))
    return row, draw(st.integers(1, 300)), start, draw(st.integers(start, columns))


@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(_rows(), st.sampled_from([0, 1]), st.booleans())
def test_any_row(drawn, sample_vectors, by_blocks):
    row, k, start, end = drawn
    scores = np.pad(row, (0, -len(row) % 4), constant_values=np.nan)[None, :]
    maxima = block_maxima(scores, [start], [end]) if by_blocks else None
    check(scores, k, [start], [end], sample_vectors=sample_vectors, maxima=maxima, blocks=1)


def test_few_rows_are_spread_over_blocks():
    assert mosaic_hopper.slices_of_row(1, 1 << 20, 2048, 132) == 22
    assert mosaic_hopper.slices_of_row(200, 1 << 20, 2048, 132) == 1
    assert mosaic_hopper.slices_of_row(1, 131072, 2048, 132) == 1


def test_layout_leaves_room_for_a_step():
    for k in (1, 100, 2048):
        layout = mosaic_hopper.make_layout(mosaic_hopper.TopkConfig(), 1 << 17, k, 1)
        assert layout.capacity >= k + layout.step
        assert k < layout.sample_target <= layout.few_entries * layout.threads <= layout.capacity
    assert dataclasses.replace(layout, sample_vectors=4).sample_columns == 4 * 4 * layout.threads


def block_maxima(scores, starts, ends):
    """What the indexer returns beside its scores; blocks outside a row's range hold anything."""
    maxima = np.full((len(scores), -(-scores.shape[1] // 16)), np.nan, np.float32)
    for row, out, start, end in zip(scores, maxima, starts, ends, strict=True):
        visible = np.where(np.isnan(row), -np.inf, row)
        visible[:start], visible[end:] = -np.inf, -np.inf
        visible = np.pad(visible, (0, -len(row) % 16), constant_values=-np.inf).reshape(-1, 16).max(axis=1)
        inside = slice(start // 16, -(-end // 16))
        out[inside] = visible[inside]
    return maxima


@pytest.mark.parametrize("kind", KINDS)
def test_from_block_maxima(kind):
    rng = np.random.default_rng(9)
    scores = np.stack([score_row(rng, kind, 9004) for _ in range(4)])
    starts, ends = [0, 3, 21, 0], [9004, 8999, 9004, 500]
    check(scores, 40, starts, ends, maxima=block_maxima(scores, starts, ends))


def test_from_many_block_maxima():
    rng = np.random.default_rng(10)
    scores = np.stack([score_row(rng, kind, 50000) for kind in ("normal", "ties", "nan")])
    starts, ends = [0, 17, 0], [50000, 49999, 50000]
    check(scores, 100, starts, ends, maxima=block_maxima(scores, starts, ends))


def test_from_block_maxima_with_more_winners_than_numbers():
    scores = np.full((1, 9000), np.nan, np.float32)
    scores[0, ::300] = np.arange(30)
    scores[0, 5::300] = -np.inf
    check(scores, 40, [0], [9000], maxima=block_maxima(scores, [0], [9000]), blocks=1)
