"""Body of the top-k kernel: a thread block keeps the best k of a row while it streams through it once.

The block holds a buffer of candidates in ascending column order and a gate, the lowest key that is still of interest.

1. A sample of a long row sets the first gate so that a little more than k columns should pass it.
2. Bulk copies bring the row into a ring of places in shared memory. Each thread looks at 16 neighbouring columns; the
   block adds up how many pass the gate before each thread, and only then anything is appended, so that nothing ever
   has to be undone.
3. When the buffer would overflow, a radix selection cuts it to its best k, ties to the lower column, and the gate rises
   above the k-th key: later columns of the same key have higher ids and lose anyway.
4. When the row ends, the same cut leaves the answer. Fewer than k candidates can only mean that the sampled gate was too
   high: the row is then streamed again without one.

No input can drop a winner, the order of the output is ascending, and no result depends on the order of atomics.
"""

import dataclasses

from pallas_kernels.topk import mosaic_emit as em
from pallas_kernels.topk.mosaic_emit import Array, BulkRing, Float, Int

VECTOR = 4  # float32 in 16 bytes
LANES = 32
PER_THREAD = 16  # neighbouring columns of a thread in one step
DIGIT_BITS = 8
BINS = 1 << DIGIT_BITS
DIGITS = 32 // DIGIT_BITS
NAN_KEY = 0x007FFFFE  # just below the key of -inf, 0x007FFFFF; 0 marks an empty place


@dataclasses.dataclass(frozen=True)
class Layout:
    """Static sizes of the kernel.

    Attributes:
      k: How many columns to keep.
      columns: Columns of the scores, S.
      slices: How many parts each row of the scores is cut into; each is a row to the kernel.
      warps: Warps of a block.
      places: Places of the ring.
      sample_vectors: 16-byte loads of a thread for the sample; 0 starts without a gate.
      sample_target: Expected number of columns that pass the sampled gate.
    """

    k: int
    columns: int
    slices: int
    warps: int
    places: int
    sample_vectors: int
    sample_target: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.warps * LANES

    @property
    def step(self) -> int:
        """Columns of one step of the stream."""
        return self.threads * PER_THREAD

    @property
    def entries(self) -> int:
        """Places of the buffer each thread looks after when it is cut."""
        return (self.step + self.k + self.threads - 1) // self.threads

    @property
    def capacity(self) -> int:
        """Places of the buffer: the k best and a whole step."""
        return self.entries * self.threads

    @property
    def sample_columns(self) -> int:
        """Columns of the sample."""
        return self.threads * self.sample_vectors * VECTOR


@dataclasses.dataclass(frozen=True)
class Shared:
    """Arrays in shared memory.

    Attributes:
      values: Scores of the candidates [capacity] float32.
      ids: Their columns relative to the row's first [capacity] int32.
      histograms: One for each digit of a key [DIGITS * BINS] int32, zero between selections (the last one excepted).
      totals: Counts of the warps [3 * LANES] int32: two sets for alternate steps, one for the cut.
      ring: Where the row passes through.
    """

    values: Array
    ids: Array
    histograms: Array
    totals: Array
    ring: BulkRing


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


def sortable_key(x: Float) -> Int:
    """Unsigned key in the order of the scores: NaN lowest, then -inf .. +inf, with -0.0 equal to 0.0."""
    bits = x.is_zero().choose(0, x.bits())
    return x.is_nan().choose(NAN_KEY, bits ^ (bits.sar(31) | 0x80000000))


def score_of_key(key: Int) -> Float:
    """The score that has this key; a zero is 0.0."""
    return em.float_from_bits((key < 0).choose(key ^ 0x80000000, key ^ -1))


class Block:
    """Emits the parts of the kernel for one thread; see the module's docstring."""

    def __init__(self, layout: Layout, shared: Shared):
        self.layout, self.shared = layout, shared
        self.thread = em.thread_index()
        self.lane = self.thread & (LANES - 1)
        self.warp = self.thread >> 5

    def barrier(self) -> None:
        """Wait for the whole block."""
        em.block_barrier(self.layout.threads)

    def initialise(self) -> None:
        """Make the barriers of the ring and clear the histograms."""
        with em.when(self.thread.equals(0)):
            self.shared.ring.initialise()
        for digit in range(DIGITS):
            self.clear_histogram(digit)
        self.barrier()

    def clear_histogram(self, digit: int) -> None:
        """Zero the histogram of one digit."""
        with em.strided(self.thread, BINS, self.layout.threads) as i:
            self.shared.histograms.store(i + digit * BINS, em.constant(0))

    # ---------------------------------------------------------------------------------------------------- selection
    def find_bin(self, digit: int, need: Int) -> tuple[Int, Int]:
        """The bin that holds the `need`-th largest, and how many are in the bins above. Every warp finds it itself."""
        per_lane = BINS // LANES
        lowest = em.constant(BINS - per_lane) - self.lane * per_lane
        base = lowest + digit * BINS
        counts = [c for i in range(0, per_lane, 4) for c in self.shared.histograms.load4(base + i)]
        mine = counts[0]
        for c in counts[1:]:
            mine = mine + c
        inclusive = em.inclusive_sum(mine, self.lane)
        above = inclusive - mine
        found = em.constant(0)
        for i in reversed(range(per_lane)):
            upto = above + counts[i]
            hit = (above < need) & (upto >= need)
            found = hit.choose((above << DIGIT_BITS) | (lowest + i), found)
            above = upto
        found = em.warp_sum(found)
        return found & (BINS - 1), found >> DIGIT_BITS

    def select(self, keys: list[Int], need: Int) -> tuple[Int, Int]:
        """The `need`-th largest of all threads' keys, and how many equal to it are among the `need` best."""
        prefix = em.constant(0)
        self.clear_histogram(DIGITS - 1)
        for digit in range(DIGITS):
            shift = 32 - DIGIT_BITS * (digit + 1)
            for key in keys:
                index = ((key >> shift) & (BINS - 1)) + digit * BINS
                if digit == 0:
                    self.shared.histograms.increment(index)
                else:
                    with em.when((key >> (shift + DIGIT_BITS)).equals(prefix)):
                        self.shared.histograms.increment(index)
            self.barrier()
            if digit > 0:  # every warp is past the previous digit
                self.clear_histogram(digit - 1)
            found, above = self.find_bin(digit, need)
            prefix = (prefix << DIGIT_BITS) | found
            need = need - above
        return prefix, need

    def totals_before(self, slot: Int) -> tuple[Int, Int]:
        """Sum of the counts of the warps before this one, and of all."""
        count = self.shared.totals.load(slot + self.lane)
        count = (self.lane < self.layout.warps).choose(count, 0)
        return em.warp_sum((self.lane < self.warp).choose(count, 0)), em.warp_sum(count)

    def cut(self, count: Int) -> Int:
        """Cut the buffer of `count` > k candidates to the best k, in place and in order; returns the k-th key."""
        layout, shared = self.layout, self.shared
        first = self.warp * (LANES * layout.entries) + self.lane
        places = [first + j * LANES for j in range(layout.entries)]
        keys = [(p < count).choose(sortable_key(shared.values.load(p)), 0) for p in places]
        threshold, ties = self.select(keys, em.constant(layout.k))
        # Two 16-bit counts in one word: keys above the threshold, and equal to it.
        above = [key.ugt(threshold) for key in keys]
        equal = [key.equals(threshold) for key in keys]
        packed = em.constant(0)
        for a, e in zip(above, equal, strict=True):
            packed = packed + a.choose(1, e.choose(1 << 16, 0))
        packed = em.warp_sum(packed)
        with em.when(self.lane.equals(0)):
            shared.totals.store(self.warp + 2 * LANES, packed)
        ids = [shared.ids.load(p) for p in places]
        self.barrier()
        before, _ = self.totals_before(em.constant(2 * LANES))
        above_before, equal_before = before & 0xFFFF, before >> 16
        lower_lanes = (em.constant(1) << self.lane) - 1
        for a, e, key, column in zip(above, equal, keys, ids, strict=True):
            above_mask, equal_mask = em.ballot(a), em.ballot(e)
            rank = equal_before + (equal_mask & lower_lanes).popcount()
            place = above_before + (above_mask & lower_lanes).popcount() + rank.min(ties)
            with em.when(a | (e & (rank < ties))):
                shared.values.store(place, score_of_key(key))
                shared.ids.store(place, column)
            above_before = above_before + above_mask.popcount()
            equal_before = equal_before + equal_mask.popcount()
        return threshold

    # ------------------------------------------------------------------------------------------------------- stream
    def steps(self, row: Row) -> Int:
        """Steps of the stream over a row."""
        return (row.length + row.skew + (self.layout.step - 1)).udiv(self.layout.step)

    def copy_step(self, row: Row, step: Int, turn: Int) -> None:
        """One thread starts the copy of a step, if the row has it. Whole 16 bytes never cross the end of a page."""
        layout = self.layout
        first = step * layout.step
        columns = ((row.length + row.skew + (VECTOR - 1)) & -VECTOR) - first
        with em.when(self.thread.equals(0) & (columns > 0)):
            self.shared.ring.copy(turn, row.data, first, columns.min(layout.step))

    def prime(self, row: Row, turn: Int) -> None:
        """Start the copies of the first steps of a row."""
        for i in range(self.layout.places):
            self.copy_step(row, em.constant(i), turn + i)

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

    def sampled_gate(self, row: Row, sample: list[Float]) -> Int:
        """A gate that about `sample_target` columns of the row pass."""
        layout = self.layout
        rank = em.constant(layout.sample_target * layout.sample_columns).udiv(row.length)
        return self.select([sortable_key(x) for x in sample], rank.max(1))[0]

    def passing(self, row: Row, step: Int, data: Array, gate: Int) -> Int:
        """Bit i says whether this thread's i-th column of the step is in the row and passes the gate."""
        bound = score_of_key(gate)
        pieces = PER_THREAD // VECTOR
        # Each lane starts at another piece, or the 64-byte stride would put the lanes on the same banks.
        order = [((self.lane >> 1) + u) & (pieces - 1) for u in range(pieces)]
        loaded = [data.load4_floats(self.thread * PER_THREAD + piece * VECTOR) for piece in order]
        mask = em.constant(0)
        for piece, scores in zip(order, loaded, strict=True):
            bits = em.constant(0)
            for e, x in enumerate(scores):
                bits = bits | (x >= bound).choose(1 << e, 0)
            mask = mask | (bits << (piece * VECTOR))
        mask = gate.ule(NAN_KEY).choose((1 << PER_THREAD) - 1, mask)
        first = self.first_column(row, step)
        begin = em.constant(0).max(em.constant(0) - first).min(PER_THREAD)
        end = (row.length - first).max(0).min(PER_THREAD)
        inside = ((em.constant(1) << end) - 1) & (em.constant(-1) << begin)
        return mask & inside

    def first_column(self, row: Row, step: Int) -> Int:
        """Id of this thread's first column of a step; below 0 before the row."""
        return step * self.layout.step + self.thread * PER_THREAD - row.skew

    def append(self, place: Int, mask: Int, data: Array, first: Int) -> None:
        """Append the columns of the mask, which are in order."""
        data = data.shifted(self.thread * PER_THREAD)

        def body(state):
            place, mask = state
            i = mask.trailing_zeros()
            self.shared.values.store(place, data.load(i))
            self.shared.ids.store(place, first + i)
            return [place + 1, mask & (mask - 1)]

        em.loop_while([place, mask], lambda s: s[1].ugt(0), body)

    def stream(self, row: Row, gate: Int, turn: Int) -> list[Int]:
        """Collect what passes the gate, which rises as needed; returns the number of candidates and the next turn.

        The first steps are on their way into the ring from `turn` on.
        """
        layout = self.layout
        steps = self.steps(row)
        zero = em.constant(0)

        def body(state):
            step, count, gate, turn, slot = state
            data = self.shared.ring.wait(turn)
            mask = self.passing(row, step, data, gate)
            mine = mask.popcount()
            inclusive = em.inclusive_sum(mine, self.lane)
            with em.when(self.lane.equals(LANES - 1)):
                self.shared.totals.store(slot + self.warp, inclusive)
            self.barrier()
            before, everyone = self.totals_before(slot)

            def advance():
                # The place of the step before is free now: all threads have appended what they found there.
                with em.when(step > 0):
                    self.copy_step(row, step + (layout.places - 1), turn + (layout.places - 1))
                self.append(count + before + inclusive - mine, mask, data, self.first_column(row, step))
                return [step + 1, count + everyone, gate, turn + 1]

            def make_room():
                # One above the k-th key: an equal key further on has a higher id.
                return [step, em.constant(layout.k), self.cut(count) + 1, turn]

            after = em.branch(count + everyone <= layout.capacity, state[:4], advance, make_room)
            return [*after, slot ^ LANES]

        after = em.loop_while([zero, zero, gate, turn, zero], lambda s: s[0] < steps, body)
        self.barrier()
        return [after[1], after[3]]

    def collect(self, row: Row, gate: Int, turn: Int) -> list[Int]:
        """Stream the row, and a second time without a gate when the sampled one let too few pass."""

        def body(state):
            gate, _, turn, _ = state
            count, turn = self.stream(row, gate, turn)
            short = count < self.layout.k
            with em.when(short):
                self.prime(row, turn)
            return [em.constant(0), count, turn, short.choose(1, 0)]

        zero = em.constant(0)
        _, count, turn, _ = em.loop_while([gate, zero, turn, em.constant(1)], lambda s: s[3] > 0, body)
        return [count, turn]
