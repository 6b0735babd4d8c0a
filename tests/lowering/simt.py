"""Runs the body of the top-k kernel on the CPU: every thread of a block in lockstep, with a check for races.

Stands in for `pallas_kernels.topk.mosaic_emit`, whose names it has: the kernel's own code, which on a GPU emits one
thread, here computes all threads at once as NumPy vectors under a mask of those that are active.

Lockstep hides a missing barrier, so shared memory remembers who touched what since the last barrier, and an access
that another thread's access could overtake raises. Bulk copies land at once and count as writes of a thread of theirs.
"""

import contextlib
import dataclasses

import numpy as np

LANES = 32
COPY_ENGINE = -2


class Machine:
    """State of the block that runs: number of threads, mask of the active ones, count of barriers passed."""

    threads = 0
    active = np.zeros(0, bool)
    epoch = 0

    @classmethod
    def start(cls, threads: int) -> None:
        """Begin a block."""
        cls.threads, cls.active, cls.epoch = threads, np.ones(threads, bool), 0


@contextlib.contextmanager
def _only(mask):
    saved = Machine.active
    Machine.active = saved & mask
    try:
        yield bool(Machine.active.any())
    finally:
        Machine.active = saved


def _spread(x, dtype):
    x = x.value if hasattr(x, "value") else x
    if isinstance(x, int):
        x = np.uint32(x & 0xFFFFFFFF)
    return np.broadcast_to(np.asarray(x), (Machine.threads,)).astype(dtype)


def _bits(x):
    return _spread(x, np.uint32)


class Int:
    """32 bits of each thread."""

    def __init__(self, value):
        self.value = np.asarray(value).astype(np.uint32)

    def _do(self, other, fn):
        return Int(fn(_bits(self), _bits(other)))

    def _signed(self, other):
        return _bits(self).view(np.int32), _bits(other).view(np.int32)

    def __add__(self, other):
        return self._do(other, np.add)

    def __sub__(self, other):
        return self._do(other, np.subtract)

    def __mul__(self, other):
        return self._do(other, np.multiply)

    def __and__(self, other):
        return self._do(other, np.bitwise_and)

    def __or__(self, other):
        return self._do(other, np.bitwise_or)

    def __xor__(self, other):
        return self._do(other, np.bitwise_xor)

    def _shift(self, other, fn):
        amount = _bits(other)
        assert np.all(amount[Machine.active] < 32), "a shift by 32 or more is undefined"
        return Int(fn(_bits(self), amount & 31))

    def __lshift__(self, other):
        return self._shift(other, np.left_shift)

    def __rshift__(self, other):
        return self._shift(other, np.right_shift)

    def sar(self, bits):
        """See `mosaic_emit`."""
        return Int((_bits(self).view(np.int32) >> bits).view(np.uint32))

    def udiv(self, other):
        """See `mosaic_emit`."""
        divisor = _bits(other)
        assert np.all(divisor[Machine.active] > 0)
        return Int(_bits(self) // np.maximum(divisor, 1))

    def min(self, other):
        """See `mosaic_emit`."""
        return Int(np.minimum(*self._signed(other)).view(np.uint32))

    def max(self, other):
        """See `mosaic_emit`."""
        return Int(np.maximum(*self._signed(other)).view(np.uint32))

    def umin(self, other):
        """See `mosaic_emit`."""
        return self._do(other, np.minimum)

    def mul_high(self, other):
        """See `mosaic_emit`."""
        return Int((_bits(self).astype(np.uint64) * _bits(other).astype(np.uint64)) >> np.uint64(32))

    def popcount(self):
        """See `mosaic_emit`."""
        return Int(np.bitwise_count(_bits(self)))

    def bit_length(self):
        """See `mosaic_emit`."""
        return Int([int(x).bit_length() for x in _bits(self)])

    def trailing_zeros(self):
        """See `mosaic_emit`."""
        x = _bits(self)
        return Int(np.bitwise_count((x & (~x + np.uint32(1))) - np.uint32(1)))

    def __lt__(self, other):
        return Bool(np.less(*self._signed(other)))

    def __le__(self, other):
        return Bool(np.less_equal(*self._signed(other)))

    def __gt__(self, other):
        return Bool(np.greater(*self._signed(other)))

    def __ge__(self, other):
        return Bool(np.greater_equal(*self._signed(other)))

    def equals(self, other):
        """See `mosaic_emit`."""
        return Bool(_bits(self) == _bits(other))

    def ult(self, other):
        """See `mosaic_emit`."""
        return Bool(_bits(self) < _bits(other))

    def ule(self, other):
        """See `mosaic_emit`."""
        return Bool(_bits(self) <= _bits(other))

    def uge(self, other):
        """See `mosaic_emit`."""
        return Bool(_bits(self) >= _bits(other))

    def ugt(self, other):
        """See `mosaic_emit`."""
        return Bool(_bits(self) > _bits(other))


class Float:
    """A float32 of each thread."""

    def __init__(self, value):
        self.value = np.asarray(value, np.float32)

    def __ge__(self, other):
        return Bool(_spread(self, np.float32) >= _spread(other, np.float32))

    def is_zero(self):
        """See `mosaic_emit`."""
        return Bool(_spread(self, np.float32) == 0)

    def is_nan(self):
        """See `mosaic_emit`."""
        return Bool(np.isnan(_spread(self, np.float32)))

    def bits(self):
        """See `mosaic_emit`."""
        return Int(_spread(self, np.float32).view(np.uint32))


class Bool:
    """A condition of each thread."""

    def __init__(self, value):
        self.value = np.asarray(value, bool)

    def __and__(self, other):
        return Bool(self.value & other.value)

    def __or__(self, other):
        return Bool(self.value | other.value)

    def __invert__(self):
        return Bool(~self.value)

    def choose(self, yes, no):
        """See `mosaic_emit`."""
        if isinstance(yes, Float):
            return Float(np.where(self.value, _spread(yes, np.float32), _spread(no, np.float32)))
        return Int(np.where(self.value, _bits(yes), _bits(no)))


class Wide:
    """64 bits of each thread."""

    def __init__(self, value):
        self.value = np.asarray(value, np.int64)

    @classmethod
    def of(cls, x):
        """See `mosaic_emit`."""
        return cls(_bits(x).astype(np.int64))

    def __add__(self, other):
        return Wide(self.value + other.value)

    def __sub__(self, other):
        return Wide(self.value - other.value)

    def __mul__(self, other):
        return Wide(self.value * other)

    def low(self):
        """See `mosaic_emit`."""
        return Int(self.value & 0xFFFFFFFF)


def constant(x):
    """See `mosaic_emit`."""
    return Int(np.full(Machine.threads, x & 0xFFFFFFFF, np.uint32))


def float_from_bits(bits):
    """See `mosaic_emit`."""
    return Float(_bits(bits).view(np.float32))


class Memory:
    """An array, and for shared memory who touched each element since the last barrier."""

    def __init__(self, data, shared):
        self.data, self.shared = data, shared
        self.writer, self.written = np.full(data.size, -1), np.full(data.size, -1)
        self.reader, self.read = np.full(data.size, -1), np.full(data.size, -1)
        self.counted = np.full(data.size, -1)

    def _conflict(self, who, at):
        fresh = self.written[at] == Machine.epoch
        return fresh & (self.writer[at] != who)

    def note_read(self, who, at):
        """Reads must not race with another thread's write or atomic."""
        if self.shared:
            assert not np.any(self._conflict(who, at)), "read races with a write"
            assert not np.any(self.counted[at] == Machine.epoch), "read races with an atomic"
            several = (self.read[at] == Machine.epoch) & (self.reader[at] != who)
            self.reader[at] = np.where(several, -3, who)
            self.reader[at[self.reader[at] != who]] = -3
            self.read[at] = Machine.epoch

    def note_write(self, who, at):
        """Writes must not race with any access of another thread, nor two lanes write one place at once."""
        if self.shared:
            assert np.unique(at).size == np.size(at), "two threads write one place"
            assert not np.any(self._conflict(who, at)), "write races with a write"
            seen = (self.read[at] == Machine.epoch) & (self.reader[at] != who)
            assert not np.any(seen), "write races with a read"
            assert not np.any(self.counted[at] == Machine.epoch), "write races with an atomic"
            self.writer[at], self.written[at] = who, Machine.epoch

    def note_count(self, at):
        """Atomics race with plain accesses only."""
        assert not np.any(self.written[at] == Machine.epoch), "atomic races with a write"
        assert not np.any(self.read[at] == Machine.epoch), "atomic races with a read"
        self.counted[at] = Machine.epoch


@dataclasses.dataclass
class Array:
    """See `mosaic_emit`; `offset` is that of each thread."""

    memory: Memory
    offset: object = 0

    @classmethod
    def of(cls, data, shared=False):
        """Wrap a flat NumPy array."""
        return cls(Memory(data, shared))

    def _at(self, index, lanes=None):
        value = index.value if hasattr(index, "value") else index
        if isinstance(index, Int):
            value = _bits(index).view(np.int32).astype(np.int64)
        at = np.broadcast_to(np.asarray(value, np.int64) + self.offset, (Machine.threads,))
        return at[Machine.active] if lanes is None else at

    def shifted(self, index):
        """See `mosaic_emit`."""
        return Array(self.memory, self._at(index, lanes="all"))

    def _load(self, index, plus=0):
        at = self._at(index) + plus
        inside = (at >= 0) & (at < self.memory.data.size)
        assert np.all(inside) or not self.memory.shared, "shared memory read out of bounds"
        self.memory.note_read(np.flatnonzero(Machine.active)[inside], at[inside])
        out = np.zeros(Machine.threads, self.memory.data.dtype)
        # Beyond an array in global memory lies the rest of its last 16 bytes.
        assert np.all(at[~inside] - self.memory.data.size < 4), "global memory read out of bounds"
        values = np.full(at.size, 12345, self.memory.data.dtype)
        values[inside] = self.memory.data[at[inside]]
        out[Machine.active] = values
        return Float(out) if out.dtype == np.float32 else Int(out)

    def load(self, index):
        """See `mosaic_emit`."""
        return self._load(index)

    def load4(self, index):
        """See `mosaic_emit`."""
        assert np.all(self._at(index) % 4 == 0)
        return [self._load(index, i) for i in range(4)]

    load4_floats = load4

    def store(self, index, x):
        """See `mosaic_emit`."""
        at = self._at(index)
        assert np.all((at >= 0) & (at < self.memory.data.size)), "write out of bounds"
        self.memory.note_write(np.flatnonzero(Machine.active), at)
        value = _spread(x, np.float32) if isinstance(x, Float) else _bits(x).view(np.int32)
        self.memory.data[at] = value[Machine.active]

    def increment(self, index):
        """See `mosaic_emit`."""
        at = self._at(index)
        assert np.all((at >= 0) & (at < self.memory.data.size)), "atomic out of bounds"
        self.memory.note_count(at)
        np.add.at(self.memory.data, at, 1)


class _Either:
    """One of two arrays for each thread."""

    def __init__(self, condition, yes, no):
        self.condition, self.yes, self.no = condition, yes, no

    def load(self, index):
        """See `mosaic_emit`."""
        return branch(self.condition, [constant(0)], lambda: [self.yes.load(index)], lambda: [self.no.load(index)])[0]


def choose_array(condition, yes, no):
    """See `mosaic_emit`."""
    chosen = np.unique(condition.value[Machine.active])
    if chosen.size > 1:
        return _Either(condition, yes, no)
    return yes if chosen.size and chosen[0] else no


def copy16(target, at, source, index):
    """See `mosaic_emit`."""
    goal, origin = target._at(at), source._at(index)
    assert np.all(goal % 4 == 0), "a copy goes to 16 bytes"
    assert np.all(origin % 4 == 0), "a copy starts at 16 bytes"
    assert np.all((origin >= 0) & (origin + 4 <= source.memory.data.size)), "global memory read out of bounds"
    for i in range(4):
        target.memory.note_write(np.flatnonzero(Machine.active), goal + i)
        target.memory.data[goal + i] = source.memory.data[origin + i]


def wait_copies():
    """See `mosaic_emit`."""


def before_bulk_copies():
    """See `mosaic_emit`."""


class BulkRing:
    """See `mosaic_emit`; `barriers` is the list of turns that each place was filled for."""

    def __init__(self, data, barriers, places, columns):
        del barriers
        self.data, self.places, self.columns = data, places, columns
        self.filled = [-1] * places
        self.waited = [True] * places

    def initialise(self):
        """See `mosaic_emit`."""

    def copy(self, turn, source, first, columns):
        """See `mosaic_emit`."""
        if not Machine.active.any():
            return
        assert Machine.active.sum() == 1, "one thread starts a copy"
        thread = int(np.flatnonzero(Machine.active)[0])
        turn, size = int(_bits(turn)[thread]), int(_bits(columns)[thread])
        start = int(source._at(first)[0])
        assert start % 4 == 0, "a bulk copy starts at 16 bytes"
        assert size % 4 == 0, "a bulk copy takes 16 bytes at a time"
        assert 0 < size <= self.columns
        place = turn % self.places
        assert self.waited[place], "a copy into a place whose last copy was not waited for"
        assert self.filled[place] in (-1, turn - self.places), "places fill in turn"
        at = place * self.columns + np.arange(size)
        self.data.memory.note_write(np.full(size, COPY_ENGINE), at)
        assert start + size - source.memory.data.size < 4, "global memory read out of bounds"
        chunk = source.memory.data[start : start + size]
        self.data.memory.data[at[: chunk.size]] = chunk
        # The copy is asynchronous: its writes belong to no epoch, the barrier of the place orders them.
        self.data.memory.written[at] = -1
        self.filled[place], self.waited[place] = turn, False

    def wait(self, turn):
        """See `mosaic_emit`."""
        turns = np.unique(_bits(turn))
        assert turns.size == 1
        assert Machine.active.all()
        place = int(turns[0]) % self.places
        assert self.filled[place] == turns[0], "waits for a copy that was not started"
        self.waited[place] = True
        return self.data.shifted(constant(place * self.columns))


def thread_index():
    """See `mosaic_emit`."""
    return Int(np.arange(Machine.threads))


def block_barrier(threads):
    """See `mosaic_emit`."""
    assert threads == Machine.threads
    assert Machine.active.all(), "a barrier that not all threads reach"
    Machine.epoch += 1


def _by_warp(x):
    warps = Machine.active.reshape(-1, LANES)
    assert np.all(warps.all(axis=1) | ~warps.any(axis=1)), "a warp-wide operation in a divergent warp"
    return x.reshape(-1, LANES)


def ballot(condition):
    """See `mosaic_emit`."""
    bits = _by_warp(condition.value).astype(np.uint64) << np.arange(LANES, dtype=np.uint64)
    return Int(np.repeat(bits.sum(axis=1), LANES))


def warp_sum(x):
    """See `mosaic_emit`."""
    return Int(np.repeat(_by_warp(_bits(x)).sum(axis=1, dtype=np.uint32), LANES))


def warp_or(x):
    """See `mosaic_emit`."""
    return Int(np.repeat(np.bitwise_or.reduce(_by_warp(_bits(x)), axis=1), LANES))


def from_lane(x, lane):
    """See `mosaic_emit`."""
    return Int(np.repeat(_by_warp(_bits(x))[:, lane], LANES))


def inclusive_sum(x, lane):
    """See `mosaic_emit`."""
    del lane
    return Int(np.cumsum(_by_warp(_bits(x)), axis=1, dtype=np.uint32).reshape(-1))


@contextlib.contextmanager
def when(condition):
    """See `mosaic_emit`."""
    with _only(condition.value):
        yield


def strided(start, stop, step, body):
    """See `mosaic_emit`."""
    first = _bits(start).view(np.int32)
    for i in range(0, stop, step):
        with _only(first + i < stop) as some:
            if some:
                body(Int((first + i).view(np.uint32)))


def _merge(mask, new, old):
    if isinstance(old, Float):
        return Float(np.where(mask, _spread(new, np.float32), _spread(old, np.float32)))
    return Int(np.where(mask, _bits(new), _bits(old)))


def branch(condition, like, yes, no):
    """See `mosaic_emit`."""
    result = list(like)
    for mask, emit in ((condition.value, yes), (~condition.value, no)):
        with _only(mask) as some:
            if some:
                result = [_merge(Machine.active, n, o) for n, o in zip(emit(), result, strict=True)]
    return result


def loop_while(state, condition, body):
    """See `mosaic_emit`."""
    state = list(state)
    saved = Machine.active
    try:
        while True:
            Machine.active = Machine.active & condition(state).value
            if not Machine.active.any():
                return state
            state = [_merge(Machine.active, n, o) for n, o in zip(body(state), state, strict=True)]
    finally:
        Machine.active = saved
