"""Selection in the top-k kernel: how a block of threads cuts its buffer of candidates to the best k.

See `mosaic_stream` for the whole algorithm.
"""

import dataclasses
from collections.abc import Callable

from pallas_kernels.topk import mosaic_emit as em
from pallas_kernels.topk.mosaic_emit import Array, Bool, BulkRing, Float, Int

VECTOR = 4  # float32 in 16 bytes
LANES = 32
PER_THREAD = 16  # neighbouring columns of a thread in one step of the stream
DIGIT_BITS = 8
BINS = 1 << DIGIT_BITS
HISTOGRAMS = 3
LOWEST_KEY = 0x007FFFFF  # of -inf
NAN_KEY = LOWEST_KEY - 1


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
    """Arrays in shared memory.

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


def sortable_key(x: Float) -> Int:
    """Unsigned key in the order of the scores: NaN lowest, then -inf .. +inf, with -0.0 equal to 0.0."""
    bits = x.is_zero().choose(0, x.bits())
    return x.is_nan().choose(NAN_KEY, bits ^ (bits.sar(31) | 0x80000000))


def score_of_key(key: Int) -> Float:
    """The score that has this key; a zero is 0.0."""
    return em.float_from_bits((key < 0).choose(key ^ 0x80000000, key ^ -1))


class Block:
    """Emits the selection for one thread of a block."""

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
        for turn in range(HISTOGRAMS):
            self.clear_histogram(em.constant(turn * BINS))
        self.barrier()

    def clear_histogram(self, histogram: Int) -> None:
        """Zero one histogram."""
        zero = em.constant(0)
        em.strided(self.thread, BINS, self.layout.threads, lambda i: self.shared.histograms.store(i + histogram, zero))

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
        start, need, _, done, histogram = em.loop_while(state, lambda s: (s[3] > 0) & ~enough(s[2], s[1]), body)
        return start, need, done.equals(0), histogram

    def totals_before(self, slot: Int) -> tuple[Int, Int]:
        """Sum of the counts of the warps before this one, and of all."""
        count = self.shared.totals.load(slot + self.lane)
        count = (self.lane < self.layout.warps).choose(count, 0)
        return em.warp_sum((self.lane < self.warp).choose(count, 0)), em.warp_sum(count)

    def publish(self, slot: int, value: Int) -> None:
        """Show a value of the warp to the block."""
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
          A key that no winner is below and fewer than k others reach, the gate for the columns that follow, and the
          next histogram to use.
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
        return lowest + start, lowest + least, histogram

    def at(self, place: Int) -> Int:
        """Where a place of the buffer lies: threads that write 16 neighbouring places each meet few conflicts."""
        return place ^ ((place >> 4) & 15)
