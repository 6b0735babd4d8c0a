"""Body of the top-k kernel: a team of threads keeps the best k of a row while it streams through it once.

A block has one team or two, each with its own rows and its own shared memory, so that one can stream while the other
selects. A team holds a buffer of candidates in ascending column order and a gate, the lowest key that is still of interest.

1. A sample of a long row sets the first gate so that a little more than k columns should pass it.
2. Bulk copies bring the row into a ring of places in shared memory. Each thread looks at 16 neighbouring columns; the
   team adds up how many pass the gate before each thread, and only then anything is appended, so that nothing ever
   has to be undone.
3. When the buffer would overflow, a radix selection cuts it to its best k, ties to the lower column, and the gate rises
   above the k-th key: later columns of the same key have higher ids and lose anyway.
4. When the row ends, the same cut leaves the answer. Fewer than k candidates can only mean that the sampled gate was too
   high: the row is then streamed again without one.

No input can drop a winner, the order of the output is ascending, and no result depends on the order of atomics.
"""

import dataclasses
from collections.abc import Callable

from pallas_kernels.topk import mosaic_emit as em
from pallas_kernels.topk.mosaic_emit import Array, Bool, BulkRing, Float, Int

VECTOR = 4  # float32 in 16 bytes
LANES = 32
PER_THREAD = 16  # neighbouring columns of a thread in one step
DIGIT_BITS = 8
BINS = 1 << DIGIT_BITS
HISTOGRAMS = 3
NAN_KEY = 0x007FFFFE  # just below the key of -inf, 0x007FFFFF; 0 marks an empty place


@dataclasses.dataclass(frozen=True)
class Layout:
    """Static sizes of the kernel.

    Attributes:
      k: How many columns to keep.
      columns: Columns of the scores, S.
      slices: How many parts each row of the scores is cut into; each is a row to the kernel.
      teams: Teams of a block.
      warps: Warps of a team.
      places: Places of the ring.
      sample_vectors: 16-byte loads of a thread for the sample; 0 starts without a gate.
      sample_target: Expected number of columns that pass the sampled gate.
    """

    k: int
    columns: int
    slices: int
    teams: int
    warps: int
    places: int
    sample_vectors: int
    sample_target: int

    @property
    def threads(self) -> int:
        """Threads of a team."""
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
    def few_entries(self) -> int:
        """The same for a buffer that holds about `sample_target` candidates, as most do when a row ends."""
        return min(self.entries, -(-self.sample_target * 13 // (10 * self.threads)))

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
    """Arrays of a team in shared memory.

    Attributes:
      values: Scores of the candidates [capacity] float32.
      ids: Their columns relative to the row's first [capacity] int32.
      histograms: Of one digit each, used in turn [HISTOGRAMS * BINS] int32; all but the last used are zero.
      totals: A value of each warp [4 * LANES] int32: two sets for alternate steps, two for the cut.
      ring: Where the row passes through.
    """

    values: Array
    ids: Array
    histograms: Array
    totals: Array
    ring: BulkRing


@dataclasses.dataclass(frozen=True)
class Row:
    """What a team works on.

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


class Team:
    """Emits the parts of the kernel for one thread of team `index`; see the module's docstring."""

    def __init__(self, layout: Layout, shared: Shared, index: Int):
        self.layout, self.shared, self.index = layout, shared, index
        self.thread = em.thread_index() - index * layout.threads
        self.lane = self.thread & (LANES - 1)
        self.warp = self.thread >> 5

    def barrier(self) -> None:
        """Wait for the whole team."""
        em.team_barrier(self.index, self.layout.threads)

    def initialise(self) -> None:
        """Make the barriers of the ring and clear the histograms."""
        with em.when(self.thread.equals(0)):
            self.shared.ring.initialise()
        for turn in range(HISTOGRAMS):
            self.clear_histogram(em.constant(turn * BINS))
        self.barrier()

    def clear_histogram(self, histogram: Int) -> None:
        """Zero one histogram."""
        zero = em.constant(0)
        em.strided(
            self.thread, BINS, self.layout.threads, lambda i: self.shared.histograms.store(i + histogram, zero)
        )

    # ---------------------------------------------------------------------------------------------------- selection
    def find_bin(self, histogram: Int, need: Int) -> tuple[Int, Int]:
        """The bin that holds the `need`-th largest, and how many are in the bins above. Every warp finds it itself."""
        per_lane = BINS // LANES
        lowest = em.constant(BINS - per_lane) - self.lane * per_lane
        base = lowest + histogram
        counts = [c for i in range(0, per_lane, 4) for c in self.shared.histograms.load4(base + i)]
        mine = counts[0]
        for c in counts[1:]:
            mine = mine + c
        inclusive = em.inclusive_sum(mine, self.lane)
        upto = above = inclusive - mine
        has_it = (above < need) & (inclusive >= need)
        found = lowest + (per_lane - 1)
        for i in reversed(range(per_lane)):
            upto = upto + counts[i]
            found = found - (upto < need).choose(1, 0)
            above = (upto < need).choose(upto, above)
        found = em.warp_sum(has_it.choose((above << DIGIT_BITS) | found, 0))
        return found & (BINS - 1), found >> DIGIT_BITS

    def select(self, keys: list[Int], bits: Int, need: Int, histogram: Int, enough: Callable[[Int, Int], Bool]):
        """Find the `need`-th largest of all threads' keys, digit by digit.

        Args:
          keys: Keys of this thread, unsigned, of at most `bits` bits.
          bits: See `keys`.
          need: Rank to find, at least 1.
          histogram: The one to use first.
          enough: Says whether to stop at a range of keys, from how many it holds and how many of them are needed.

        Returns:
          Start of the range that holds the key sought, how many of the range are among the `need` best, whether the
          range is a single key, and the next histogram to use.
        """

        def body(state):
            start, need, _, done, histogram = state
            shift = (done - DIGIT_BITS).max(0)
            width = em.constant(1) << (done - shift)
            for key in keys:
                digit = (key - start) >> shift
                with em.when(digit.ult(width)):
                    self.shared.histograms.increment(digit + histogram)
            self.barrier()
            # Every warp is past the histogram before; two barriers from now it is used again.
            before = histogram - BINS
            self.clear_histogram((before < 0).choose(BINS * (HISTOGRAMS - 1), before))
            found, above = self.find_bin(histogram, need)
            size = self.shared.histograms.load(histogram + found)
            after = histogram + BINS
            after = (after >= BINS * HISTOGRAMS).choose(0, after)
            return [start + (found << shift), need - above, size, shift, after]

        state = [em.constant(0), need, em.constant(1 << 30), bits, histogram]
        start, need, _, done, histogram = em.loop_while(
            state, lambda s: (s[3] > 0) & ~enough(s[2], s[1]), body
        )
        return start, need, done.equals(0), histogram

    def totals_before(self, slot: Int) -> tuple[Int, Int]:
        """Sum of the counts of the warps before this one, and of all."""
        count = self.shared.totals.load(slot + self.lane)
        count = (self.lane < self.layout.warps).choose(count, 0)
        return em.warp_sum((self.lane < self.warp).choose(count, 0)), em.warp_sum(count)

    def publish(self, slot: int, value: Int) -> None:
        """Show a value of the warp to the team."""
        with em.when(self.lane.equals(0)):
            self.shared.totals.store(self.warp + slot, value)

    def cut(self, count: Int, gate: Int, histogram: Int, entries: int, write: Callable | None = None):
        """Pick the best k of the `count` >= k candidates and write them in order.

        Args:
          count: Candidates in the buffer, at most `entries` a thread.
          gate: Gate of the stream; no candidate is more than one below it.
          histogram: The histogram to use first.
          entries: See `count`.
          write: Called with the place among the winners, the key and the id of each winner; None keeps them in the
            buffer.

        Returns:
          The gate for the columns that follow, and the next histogram to use.
        """
        layout, shared = self.layout, self.shared
        lowest = gate - gate.umin(1)
        first = self.warp * (LANES * entries) + self.lane
        places = [first + j * LANES for j in range(entries)]
        # Places without a candidate come last and look like the lowest key, so that they lose every tie.
        keys = [(p < count).choose(sortable_key(shared.values.load(self.at(p))) - lowest, 0) for p in places]
        union = keys[0]
        for key in keys[1:]:
            union = union | key
        self.publish(3 * LANES, em.warp_or(union))
        self.barrier()
        union = shared.totals.load(self.lane + 3 * LANES)
        bits = em.warp_or((self.lane < layout.warps).choose(union, 0)).bit_length()
        start, need, single, histogram = self.select(
            keys, bits, em.constant(layout.k), histogram, lambda size, need: size.equals(need)
        )
        # A range that is needed as a whole counts as above.
        least, ties = start + single.choose(1, 0), single.choose(need, 0)
        above = [key.uge(least) for key in keys]
        equal = [key.equals(start) for key in keys]
        packed = em.constant(0)  # two 16-bit counts
        for a, e in zip(above, equal, strict=True):
            packed = packed + a.choose(1, e.choose(1 << 16, 0))
        self.publish(2 * LANES, em.warp_sum(packed))
        in_place = write is None
        ids = [shared.ids.load(self.at(p)) for p in places] if in_place else []
        self.barrier()
        before, _ = self.totals_before(em.constant(2 * LANES))
        above_before, equal_before = before & 0xFFFF, before >> 16
        lower_lanes = (em.constant(1) << self.lane) - 1
        for j, (a, e, key) in enumerate(zip(above, equal, keys, strict=True)):
            above_mask, equal_mask = em.ballot(a), em.ballot(e)
            rank = equal_before + (equal_mask & lower_lanes).popcount()
            place = above_before + (above_mask & lower_lanes).popcount() + rank.min(ties)
            with em.when(a | (e & (rank < ties))):
                if in_place:
                    shared.values.store(self.at(place), score_of_key(key + lowest))
                    shared.ids.store(self.at(place), ids[j])
                else:
                    write(place, key + lowest, shared.ids.load(self.at(places[j])))
            above_before = above_before + above_mask.popcount()
            equal_before = equal_before + equal_mask.popcount()
        # One above the k-th key if that is known: an equal key further on has a higher id.
        return lowest + least, histogram

    def at(self, place: Int) -> Int:
        """Where a place of the buffer lies: threads that write 16 neighbouring places each meet few conflicts."""
        return place ^ ((place >> 4) & 15)

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

    def sampled_gate(self, row: Row, sample: list[Float], histogram: Int) -> list[Int]:
        """A gate that about `sample_target` columns of the row pass, and the next histogram to use."""
        layout = self.layout
        rank = em.constant(layout.sample_target * layout.sample_columns).udiv(row.length).max(1)
        keys = [sortable_key(x) for x in sample]
        gate, _, _, histogram = self.select(
            keys, em.constant(32), rank, histogram, lambda size, _: size <= (rank >> 3)
        )
        return [gate, histogram]

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
            self.shared.values.store(self.at(place), data.load(i))
            self.shared.ids.store(self.at(place), first + i)
            return [place + 1, mask & (mask - 1)]

        em.loop_while([place, mask], lambda s: s[1].ugt(0), body)

    def stream(self, row: Row, gate: Int, turn: Int, histogram: Int) -> list[Int]:
        """Collect what passes the gate, which rises as needed.

        The first steps are on their way into the ring from `turn` on. Returns the number of candidates, the gate, the
        next turn and the next histogram.
        """
        layout = self.layout
        steps = self.steps(row)
        zero = em.constant(0)

        def body(state):
            step, count, gate, turn, histogram, slot = state
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
                return [step + 1, count + everyone, gate, turn + 1, histogram]

            def make_room():
                risen, following = self.cut(count, gate, histogram, layout.entries)
                return [step, em.constant(layout.k), risen, turn, following]

            after = em.branch(count + everyone <= layout.capacity, state[:5], advance, make_room)
            return [*after, slot ^ LANES]

        state = [zero, zero, gate, turn, histogram, zero]
        after = em.loop_while(state, lambda s: s[0] < steps, body)
        self.barrier()
        return after[1:5]

    def collect(self, row: Row, gate: Int, turn: Int, histogram: Int) -> list[Int]:
        """Stream the row, and a second time without a gate when the sampled one let too few pass."""

        def body(state):
            _, gate, _, turn, histogram = state
            count, gate, turn, histogram = self.stream(row, gate, turn, histogram)
            short = count < self.layout.k
            with em.when(short):
                self.prime(row, turn)
            return [short.choose(1, 0), short.choose(0, gate), count, turn, histogram]

        state = [em.constant(1), gate, em.constant(0), turn, histogram]
        _, gate, count, turn, histogram = em.loop_while(state, lambda s: s[0] > 0, body)
        return [count, gate, turn, histogram]
