"""Body of the top-k kernel: a block of threads keeps the best k of a row while it streams through it once.

The block holds a buffer of candidates in ascending column order and a gate, the lowest key still of interest.

1. A sample of a long row sets the first gate so that a little more than k columns should pass it.
2. Bulk copies bring the row into a ring of places in shared memory. Each thread looks at a few neighbouring columns;
   the block adds up how many pass the gate before each thread, and only then anything is appended, so that nothing ever
   has to be undone.
3. When the buffer would overflow, a radix selection cuts it to its best k, ties to the lower column, and the gate rises
   above the k-th key: later columns of the same key have higher ids and lose anyway.
4. When the row ends, the same cut leaves the answer. Fewer than k candidates can only mean that the sampled gate was
   too high: the row is then streamed again without one.

No input can drop a winner, the order of the output is ascending, and no result depends on the order of atomics.
"""

import dataclasses

from pallas_kernels.topk import mosaic_emit as em
from pallas_kernels.topk.mosaic_emit import Array, Float, Int
from pallas_kernels.topk.mosaic_select import LANES, NAN_KEY, PER_THREAD, VECTOR, Block, score_of_key, sortable_key


@dataclasses.dataclass(frozen=True)
class Row:
    """What a block works on.

    Attributes:
      data: Scores from the last 16-byte boundary at or before the row's first column.
      skew: Columns between that boundary and the first column.
      length: Columns of the row.
    """

    data: Array
    skew: Int
    length: Int


class RowSource:
    """The columns of a row in turn, brought by bulk copies that run ahead."""

    turns = 1  # of the ring for a step

    def __init__(self, block: "StreamingBlock", row: Row):
        self.block, self.row = block, row
        self.steps = (row.length + row.skew + (block.layout.step - 1)).udiv(block.layout.step)

    def first_column(self, step: Int) -> Int:
        """Id of this thread's first column of a step; below 0 before the row."""
        return step * self.block.layout.step + self.block.thread * PER_THREAD - self.row.skew

    def wait(self, step: Int, turn: Int) -> Array:
        """Where the step lies in shared memory, once it is there."""
        del step
        return self.block.shared.ring.wait(turn)

    def release(self, step: Int, turn: Int) -> None:
        """The place of the step before is free: bring the next."""
        ahead = self.block.layout.places - 1
        with em.when(step > 0):
            self.copy_step(step + ahead, turn + ahead)

    def copy_step(self, step: Int, turn: Int, thread: int = 0) -> None:
        """One thread starts the copy of a step, if the row has it. Whole 16 bytes never cross the end of a page."""
        row, size = self.row, self.block.layout.step
        first = step * size
        columns = ((row.length + row.skew + (VECTOR - 1)) & -VECTOR) - first
        with em.when(self.block.thread.equals(thread) & (columns > 0)):
            self.block.shared.ring.copy(turn, row.data, first, columns.min(size))

    def prime(self, turn: Int) -> None:
        """Start the copies of the first steps, each by another warp: all would wait for one that starts them all."""
        for i in range(self.block.layout.places):
            self.copy_step(em.constant(i), turn + i, i % self.block.layout.warps * LANES)


class StreamingBlock(Block):
    """Emits the stream of rows past the buffer for one thread."""

    def sample(self, row: Row) -> list[Float]:
        """16-byte pieces spread over the row, all but the first and the last, which may lie partly outside."""
        layout = self.layout
        stride = ((row.length >> 2) - 2).udiv(layout.threads * layout.sample_vectors)
        found = []
        for i in range(layout.sample_vectors):
            stratum = self.thread + i * layout.threads
            jitter = (stratum * 0x9E3779B1).mul_high(stride)
            found += row.data.load4_floats((stratum * stride + jitter + 1) * VECTOR)
        return found

    def sampled_gate(self, row: Row, sample: list[Float], histogram: Int) -> list[Int]:
        """A gate that about `sample_target` columns of the row pass, and the next histogram to use."""
        layout = self.layout
        rank = em.constant(layout.sample_target * layout.sample_columns).udiv(row.length).max(1)
        keys = [sortable_key(x) for x in sample]
        gate, _, _, histogram = self.select(keys, em.constant(32), rank, histogram, lambda size, _: size <= (rank >> 3))
        return [gate, histogram]

    def passing(self, first: Int, length: Int, data: Array, gate: Int) -> Int:
        """Bit i says whether column `first + i`, this thread's i-th, is in the row and passes the gate."""
        bound = score_of_key(gate)
        pieces = PER_THREAD // VECTOR
        # Lanes that would meet in a bank, 32 columns apart, start at different pieces.
        order = [((self.lane >> 1) + u) & (pieces - 1) for u in range(pieces)]
        loaded = [data.load4_floats(self.thread * PER_THREAD + piece * VECTOR) for piece in order]
        mask = em.constant(0)
        for piece, scores in zip(order, loaded, strict=True):
            bits = em.constant(0)
            for e, x in enumerate(scores):
                bits = bits | (x >= bound).choose(1 << e, 0)
            mask = mask | (bits << (piece * VECTOR))
        mask = gate.ule(NAN_KEY).choose((1 << PER_THREAD) - 1, mask)
        begin = em.constant(0).max(em.constant(0) - first).min(PER_THREAD)
        end = (length - first).max(0).min(PER_THREAD)
        inside = ((em.constant(1) << end) - 1) & (em.constant(-1) << begin)
        return mask & inside

    def append(self, place: Int, mask: Int, data: Array, first: Int) -> None:
        """Append the columns of the mask, which are in order."""
        data = data.shifted(self.thread * PER_THREAD)

        def body(state):
            place, mask = state
            i = mask.trailing_zeros()
            self.shared.values.store(self.at(place), data.load(i))
            self.shared.ids.store(self.at(place), first + i)
            return [place + 1, mask & (mask - 1)]

        em.loop_while([place, mask], lambda s: s[1].ugt(0), body)

    def stream(self, source, gate: Int, turn: Int, histogram: Int) -> list[Int]:
        """Collect what passes the gate, which rises as needed.

        The first steps of the source are on their way into the ring from `turn` on. Returns the number of candidates,
        the gate, the next turn and the next histogram.
        """
        layout = self.layout
        zero = em.constant(0)

        def body(state):
            step, count, gate, turn, histogram, slot = state
            data, first = source.wait(step, turn), source.first_column(step)
            mask = self.passing(first, source.row.length, data, gate)
            mine = mask.popcount()
            inclusive = em.inclusive_sum(mine, self.lane)
            with em.when(self.lane.equals(LANES - 1)):
                self.shared.totals.store(slot + self.warp, inclusive)
            self.barrier()
            before, everyone = self.totals_before(slot)

            def advance():
                source.release(step, turn)  # all threads have appended what they found in the step before
                self.append(count + before + inclusive - mine, mask, data, first)
                return [step + 1, count + everyone, gate, turn + source.turns, histogram]

            def make_room():
                _, risen, following = self.cut(count, gate, histogram, layout.entries)
                return [step, em.constant(layout.k), risen, turn, following]

            after = em.branch(count + everyone <= layout.capacity, state[:5], advance, make_room)
            return [*after, slot ^ LANES]

        state = [zero, zero, gate, turn, histogram, zero]
        after = em.loop_while(state, lambda s: s[0] < source.steps, body)
        self.barrier()
        return after[1:5]

    def collect(self, source: RowSource, gate: Int, turn: Int, histogram: Int) -> list[Int]:
        """Stream the row, and a second time without a gate when the sampled one let too few pass."""

        def body(state):
            _, gate, _, turn, histogram = state
            count, gate, turn, histogram = self.stream(source, gate, turn, histogram)
            short = count < self.layout.k
            with em.when(short):
                source.prime(turn)
            return [short.choose(1, 0), short.choose(0, gate), count, turn, histogram]

        state = [em.constant(1), gate, em.constant(0), turn, histogram]
        _, gate, count, turn, histogram = em.loop_while(state, lambda s: s[0] > 0, body)
        return [count, gate, turn, histogram]
