"""Scalars of one CUDA thread: the few operations the top-k kernel needs, written into the MLIR of a Mosaic GPU kernel.

Pallas has no warp votes, no order of bits and no atomics in shared memory, so the kernel's body is emitted here as MLIR
inside `plgpu.inline_mgpu`. These helpers only make that readable.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, scf

from pallas_kernels.topk.mosaic_values import Bool, Float, Int, Wide, constant, f32_type, float_from_bits, i32_type, raw

__all__ = [
    "Array",
    "Bool",
    "BulkRing",
    "Float",
    "Int",
    "Wide",
    "ballot",
    "before_bulk_copies",
    "block_barrier",
    "branch",
    "choose_array",
    "constant",
    "copy16",
    "float_from_bits",
    "from_lane",
    "inclusive_sum",
    "loop_while",
    "strided",
    "thread_index",
    "wait_copies",
    "warp_or",
    "warp_sum",
    "when",
]

FULL_WARP = 0xFFFFFFFF
_GLOBAL = 1


# ---------------------------------------------------------------------------------------------------------- memory
@dataclasses.dataclass(frozen=True, eq=False)
class Array:
    """A pointer to 32-bit elements in shared or global memory."""

    pointer: ir.Value
    is_float: bool

    @classmethod
    def of(cls, ref: ir.Value) -> "Array":
        """The array behind a memref of float32 or int32."""
        pointer = mgpu_utils.memref_ptr(ref)
        if ir.MemRefType(ref.type).memory_space is None:
            pointer = llvm.addrspacecast(llvm.PointerType.get(address_space=_GLOBAL), pointer)
        return cls(pointer, ir.MemRefType(ref.type).element_type == f32_type())

    def at(self, index) -> ir.Value:
        """Pointer to element `index`, an int, an Int or a Wide."""
        index = index if isinstance(index, int) else index.value
        return mgpu_utils.getelementptr(self.pointer, [index], i32_type())

    def shifted(self, index) -> "Array":
        """The array that starts at element `index`."""
        return Array(self.at(index), self.is_float)

    def load(self, index) -> Any:
        """Read one element."""
        if self.is_float:
            return Float(llvm.load(f32_type(), self.at(index)))
        return Int(llvm.load(i32_type(), self.at(index)))

    def load4(self, index) -> list[Int]:
        """Read four int32 at an index divisible by four."""
        vector = llvm.load(ir.VectorType.get((4,), i32_type()), self.at(index), alignment=16)
        return [Int(llvm.extractelement(vector, raw(i))) for i in range(4)]

    def load4_floats(self, index) -> list[Float]:
        """Read four float32 at an address divisible by 16 bytes."""
        vector = llvm.load(ir.VectorType.get((4,), f32_type()), self.at(index), alignment=16)
        return [Float(llvm.extractelement(vector, raw(i))) for i in range(4)]

    def store(self, index, x) -> None:
        """Write one element."""
        llvm.store(raw(x), self.at(index))

    def increment(self, index) -> None:
        """Add 1 to an int32 element, atomically."""
        llvm.atomicrmw(llvm.AtomicBinOp.add, self.at(index), raw(1), llvm.AtomicOrdering.monotonic)


def choose_array(condition: Bool, yes: Array, no: Array) -> Array:
    """One of two arrays of a kind."""
    return Array(arith.select(condition.value, yes.pointer, no.pointer), yes.is_float)


def _asm(text: str, constraints: str, operands: Sequence[ir.Value]) -> None:
    """PTX that touches memory and may make threads wait for each other."""
    constraints = ",".join(filter(None, (constraints, "~{memory}")))
    void = ir.Type.parse("!llvm.void")
    llvm.inline_asm(void, operands, text, constraints, has_side_effects=True, convergent=True)


def copy16(target: Array, at: Int, source: Array, index: Int) -> None:
    """Start to copy 16 bytes from global to shared memory, both at addresses divisible by 16."""
    _asm("cp.async.cg.shared.global [$0], [$1], 16;", "r,l", [target.at(at), source.at(index)])


def wait_copies() -> None:
    """Wait for the copies of this thread."""
    _asm("cp.async.wait_all;", "", [])


def before_bulk_copies() -> None:
    """What this thread wrote to shared memory is over before bulk copies that follow a barrier write there."""
    _asm("fence.proxy.async.shared::cta;", "", [])


# ------------------------------------------------------------------------------------------ bulk copies and barriers
@dataclasses.dataclass(frozen=True, eq=False)
class BulkRing:
    """Places in shared memory that bulk copies fill in turn; the barrier of a place says when it is full.

    Attributes:
      data: The places, one after another.
      barriers: One 64-bit mbarrier a place, in an int32 array.
      places: How many there are.
      columns: Float32 elements of one place.
    """

    data: Array
    barriers: Array
    places: int
    columns: int

    def initialise(self) -> None:
        """One thread makes the barriers; a barrier of the block must follow."""
        for place in range(self.places):
            _asm("mbarrier.init.shared::cta.b64 [$0], 1;", "r", [self.barriers.at(2 * place)])
        _asm("fence.mbarrier_init.release.cluster;", "", [])

    def copy(self, turn: Int, source: Array, first: Int, columns: Int) -> None:
        """One thread starts the copy of `columns` (a multiple of 4) from `first` on into the place of this turn."""
        place = turn - turn.udiv(self.places) * self.places
        barrier = self.barriers.at(place * 2)
        size = (columns * 4).value
        _asm("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", "r,r", [barrier, size])
        _asm(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];",
            "r,l,r,r",
            [self.data.at(place * self.columns), source.at(first), size, barrier],
        )

    def wait(self, turn: Int) -> Array:
        """Wait until the place of this turn is full; returns it."""
        rounds = turn.udiv(self.places)
        place, phase = turn - rounds * self.places, rounds & 1
        _asm(
            "{ .reg .pred full; WAIT_${:uid}: mbarrier.try_wait.parity.shared::cta.b64 full, [$0], $1; "
            "@full bra FULL_${:uid}; bra WAIT_${:uid}; FULL_${:uid}: }",
            "r,r",
            [self.barriers.at(place * 2), phase.value],
        )
        return self.data.shifted(place * self.columns)


# ------------------------------------------------------------------------------------------------- threads and warps
def thread_index() -> Int:
    """Index of the thread in its block."""
    return Int(mgpu_utils.thread_idx())


def block_barrier(threads: int) -> None:
    """Wait for all threads of the block. Barrier 15: Mosaic keeps the lower ones for itself."""
    _asm(f"bar.sync 15, {threads};", "", [])


def ballot(condition: Bool) -> Int:
    """Bit mask of the lanes for which the condition holds."""
    return Int(nvvm.vote_sync(raw(FULL_WARP), condition.value, nvvm.VoteSyncKind.ballot))


def warp_sum(x: Int) -> Int:
    """Sum over the lanes of a warp."""
    return Int(nvvm.redux_sync(x.value, nvvm.ReductionKind.ADD, raw(FULL_WARP)))


def warp_or(x: Int) -> Int:
    """Bitwise or over the lanes of a warp."""
    return Int(nvvm.redux_sync(x.value, nvvm.ReductionKind.OR, raw(FULL_WARP)))


def from_lane(x: Int, lane: int) -> Int:
    """The value that one lane holds."""
    return Int(nvvm.shfl_sync(raw(FULL_WARP), x.value, raw(lane), raw(31), nvvm.ShflKind.idx))


def inclusive_sum(x: Int, lane: Int) -> Int:
    """Sum over this lane and those before it."""
    for distance in (1, 2, 4, 8, 16):
        other = Int(nvvm.shfl_sync(raw(FULL_WARP), x.value, raw(distance), raw(0), nvvm.ShflKind.up))
        x = x + (lane >= distance).choose(other, 0)
    return x


# ---------------------------------------------------------------------------------------------------- control flow
@contextlib.contextmanager
def when(condition: Bool) -> Iterator[None]:
    """Emit what follows under a condition."""
    with mgpu_utils.when(condition.value):
        yield


def strided(start: Int, stop: int, step: int, body: Callable[[Int], None]) -> None:
    """Run `body` for `start`, `start + step`, .. below `stop`."""
    index = ir.IndexType.get()
    first, last, by = (arith.index_cast(index, raw(b)) for b in (start, stop, step))
    loop = scf.ForOp(first, last, by, [])
    with ir.InsertionPoint(loop.body):
        body(Int(arith.index_cast(i32_type(), loop.induction_variable)))
        scf.yield_([])


def _rewrap(values: Sequence[ir.Value], like: Sequence[Int | Float]) -> list:
    return [type(x)(v) for x, v in zip(like, values, strict=True)]


def branch(condition: Bool, like: Sequence, yes: Callable[[], Sequence], no: Callable[[], Sequence]) -> list:
    """Run one of two functions; both return values of the kinds of `like`."""
    op = scf.IfOp(condition.value, [raw(x).type for x in like], has_else=True)
    for block, emit in ((op.then_block, yes), (op.else_block, no)):
        assert block is not None
        with ir.InsertionPoint(block):
            scf.yield_([raw(x) for x in emit()])
    return _rewrap(list(op.results), like)


def loop_while(state: Sequence, condition: Callable[[list], Bool], body: Callable[[list], Sequence]) -> list:
    """Run `body` on the state for as long as the condition holds."""
    types = [raw(x).type for x in state]
    op = scf.WhileOp(types, [raw(x) for x in state])
    before, after = op.before.blocks.append(*types), op.after.blocks.append(*types)
    with ir.InsertionPoint(before):
        args = list(before.arguments)
        scf.condition(condition(_rewrap(args, state)).value, args)
    with ir.InsertionPoint(after):
        scf.yield_([raw(x) for x in body(_rewrap(list(after.arguments), state))])
    return _rewrap(list(op.results), state)
