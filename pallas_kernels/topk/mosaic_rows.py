"""How a block of the top-k kernel walks over its rows, and its arrays in shared memory."""

from typing import Any

import jax.numpy as jnp

from pallas_kernels.topk import mosaic_emit as em
from pallas_kernels.topk import mosaic_select as select
from pallas_kernels.topk.mosaic_stream import Row, RowSource, StreamingBlock


def shared_arrays(layout: select.Layout) -> list[tuple[int, Any]]:
    """Size and dtype of each array in shared memory, in the order of `Shared` and `BulkRing`."""
    return [
        (layout.capacity, jnp.float32),
        (layout.capacity, jnp.int32),
        (select.HISTOGRAMS * select.BINS, jnp.int32),
        (4 * select.LANES, jnp.int32),
        (layout.places * layout.step, jnp.float32),
        (2 * layout.places, jnp.int32),
    ]


def make_block(layout: select.Layout, arrays: list[em.Array]) -> StreamingBlock:
    """The block with its `shared_arrays`."""
    values, ids, histograms, totals, places, barriers = arrays
    ring = em.BulkRing(places, barriers, layout.places, layout.step)
    return StreamingBlock(layout, select.Shared(values, ids, histograms, totals, ring))


class Rows:
    """Emits the walk of one block over its rows: every `stride`-th, the copies of the next one under way early."""

    def __init__(self, rows: int, stride: int, block: StreamingBlock, scores, starts, ends, ids_out, scores_out):
        self.rows, self.stride, self.block, self.layout = rows, stride, block, block.layout
        self.scores, self.starts, self.ends = scores, starts, ends
        self.ids_out, self.scores_out = ids_out, scores_out

    def load_bounds(self, index: em.Int) -> em.Int:
        """Start of a row in the even lanes and its end in the odd ones.

        A value that is the same in all lanes would move to the scalar registers at once, which waits for the load.
        """
        index = index.min(self.rows - 1)
        return em.choose_array((self.block.lane & 1).equals(0), self.starts, self.ends).load(index)

    def bounds(self, loaded: em.Int) -> list[em.Int]:
        """First column and length of a row, and what to add to a column relative to the first to get its id."""
        start, end = em.from_lane(loaded, 0), em.from_lane(loaded, 1)
        first = start.max(0)
        return [first, end.min(self.layout.columns) - first, first - start]

    def row(self, index: em.Int, first: em.Int, length: em.Int) -> Row:
        """The row with these bounds."""
        begin = em.Wide.of(index.udiv(self.layout.slices)) * self.layout.columns + em.Wide.of(first)
        skew = begin.low() & (select.VECTOR - 1)
        return Row(self.scores.shifted(begin - em.Wide.of(skew)), skew, length)

    def streamed(self, index: em.Int, first: em.Int, length: em.Int) -> Row:
        """What is streamed first of the row with these bounds."""
        return self.row(index, first, length)

    def collect(self, index: em.Int, first: em.Int, length: em.Int, gate: em.Int, turn: em.Int, histogram: em.Int):
        """Candidates of the row with these bounds; see `StreamingBlock.collect`."""
        return self.block.collect(RowSource(self.block, self.row(index, first, length)), gate, turn, histogram)

    def outputs(self, index: em.Int):
        """Where the ids and the scores of a row go."""
        at = em.Wide.of(index) * self.layout.k
        return self.ids_out.shifted(at), self.scores_out and self.scores_out.shifted(at)

    def write_short(self, index: em.Int, first: em.Int, length: em.Int, shift: em.Int) -> None:
        """A row of at most k columns: all of them, without looking at the scores."""
        ids_out, scores_out = self.outputs(index)
        row = self.row(index, first, length)

        def write(i):
            inside = i < length
            ids_out.store(i, inside.choose(i + shift, em.constant(-1)))
            if scores_out is not None:
                scores_out.store(i, em.float_from_bits(em.constant(0xFF800000)))
                with em.when(inside):
                    scores_out.store(i, row.data.load(row.skew + i))

        em.strided(self.block.thread, self.layout.k, self.layout.threads, write)

    def next_long(self, index: em.Int, loaded: em.Int) -> list[em.Int]:
        """The next row longer than k from `index` on and its bounds; shorter ones on the way are done at once."""

        def is_short(state):
            return (state[0] < self.rows) & (state[2] <= self.layout.k)

        def write(state):
            self.write_short(*state)
            index = state[0] + self.stride
            return [index, *self.bounds(self.load_bounds(index))]

        return em.loop_while([index, *self.bounds(loaded)], is_short, write)

    def wants_sample(self, length: em.Int) -> em.Bool:
        """Whether a gate is worth its sample: everything fits the buffer otherwise."""
        return length > max(self.layout.capacity, self.layout.sample_columns)

    def begin(self, index: em.Int, loaded: em.Int, turn: em.Int, histogram: em.Int) -> list:
        """Find the next long row, start its copies and load its sample; the state of `run`."""
        layout = self.layout
        index, first, length, shift = self.next_long(index, loaded)
        sample = [em.float_from_bits(em.constant(0))] * (layout.sample_vectors * select.VECTOR)
        row = self.streamed(index.min(self.rows - 1), first, length)
        with em.when(index < self.rows):
            RowSource(self.block, row).prime(turn)
        if sample:
            some = (index < self.rows) & self.wants_sample(row.length)
            sample = em.branch(some, sample, lambda: self.block.sample(row), lambda: sample)
        return [index, first, length, shift, turn, histogram, *sample]

    def run(self, index: em.Int) -> None:
        """All rows of the block, whose first is `index`."""
        block, zero = self.block, em.constant(0)

        def body(state):
            index, first, length, shift, turn, histogram, *sample = state
            following = self.load_bounds(index + self.stride)
            row, gate = self.streamed(index, first, length), zero
            if sample:
                gate, histogram = em.branch(
                    self.wants_sample(row.length),
                    [gate, histogram],
                    lambda: block.sampled_gate(row, sample, histogram),
                    lambda: [gate, histogram],
                )
            count, gate, turn, histogram = self.collect(index, first, length, gate, turn, histogram)
            begun = self.begin(index + self.stride, following, turn, histogram)
            begun[5] = self.finish(index, shift, count, gate, histogram)
            return begun

        first = self.begin(index, self.load_bounds(index), zero, zero)
        em.loop_while(first, lambda state: state[0] < self.rows, body)

    def finish(self, index: em.Int, shift: em.Int, count: em.Int, gate: em.Int, histogram: em.Int) -> em.Int:
        """Cut the candidates of a row to its answer; returns the next histogram to use."""
        layout = self.layout
        ids_out, scores_out = self.outputs(index)

        def write(place, key, column):
            ids_out.store(place, column + shift)
            if scores_out is not None:
                scores_out.store(place, select.score_of_key(key))

        def cut(entries):
            return [self.block.cut(count, gate, histogram, entries, write)[2]]

        few = layout.few_entries
        fits = count <= few * layout.threads
        return em.branch(fits, [histogram], lambda: cut(few), lambda: cut(layout.entries))[0]
