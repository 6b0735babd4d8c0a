"""Device code of the sparse MLA kernels that Pallas has no words for, as MLIR and PTX inside a Mosaic kernel.

Everything here runs under Lane semantics in one warpgroup. Memory barriers are raw `mbarrier` words in shared memory,
because Pallas barriers cannot be handed to inline code and because `cp.async` must arrive on them.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf, vector

SCALAR = plgpu.Layout.WG_SPLAT(())
REF = plgpu.RefType()
ROW = plgpu.Layout.WGMMA.reduce(1)
# Accumulators carried around a loop stay in 32-bit registers: the pairs of the public layout cost ptxas its overlap of
# wgmma with anything.
ACCUMULATOR = plgpu.Layout._WGMMA_ACC_32BIT
TILED = (
    plgpu.TilingTransform((8, 64)),  # pyright: ignore[reportAbstractUsage]
    plgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
)
TILED_REF = plgpu.RefType(TILED)
WARPGROUP = 128
Pred = arith.CmpIPredicate


def inline(*, arg_types=(), return_type=None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`plgpu.inline_mgpu`, typed as what it returns: the function without its context."""
    return plgpu.inline_mgpu(arg_types=arg_types, return_type=return_type)


def array_type(shape: tuple[int, ...], dtype: Any, layout: Any):
    """Type of an array that inline code returns."""
    return plgpu.ShapeDtypeStruct(shape, jnp.dtype(dtype), layout=layout)


def accumulator(rows: int, columns: int):
    """A float32 wgmma accumulator."""
    return plgpu.ACC((rows, columns), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]


def accumulate_on(value: jax.Array):
    """A wgmma accumulator that starts from `value`."""
    return plgpu.ACC.init(value)  # pyright: ignore[reportPrivateImportUsage]


def i32():
    """The 32-bit integer type."""
    return ir.IntegerType.get_signless(32)


def i64():
    """The 64-bit integer type."""
    return ir.IntegerType.get_signless(64)


def f32():
    """The float32 type."""
    return ir.F32Type.get()


def const(value: int):
    """An i32 constant; values of 2**31 and more wrap to their bit pattern."""
    return arith.constant(i32(), ir.IntegerAttr.get(i32(), value - 2**32 if value >= 2**31 else value))


def fconst(value: float):
    """A float32 constant."""
    return arith.constant(f32(), ir.FloatAttr.get(f32(), value))


def scalar(array):
    """The value of a scalar argument of inline code."""
    return array.registers.flat[0]


def asm(result, operands, code: str, constraints: str):
    """Inline PTX with side effects; `result` None means it returns nothing."""
    kind = ir.Type.parse("!llvm.void") if result is None else result
    return llvm.inline_asm(kind, operands, code, constraints, has_side_effects=True)


def thread():
    """Index of the thread in its warpgroup."""
    return arith.remui(mgpu_utils.thread_idx(), const(WARPGROUP))


def global_pointer(ref):
    """Pointer to the first element of a ref in global memory, in address space 1."""
    pointer = mgpu_utils.memref_ptr(ref)
    if llvm.PointerType(pointer.type).address_space == 1:
        return pointer
    return llvm.addrspacecast(llvm.PointerType.get(address_space=1), pointer)


def shared_address(ref):
    """Shared-memory address of a ref as i32."""
    return llvm.ptrtoint(i32(), mgpu_utils.memref_ptr(ref))


def offset(pointer, index, kind):
    """`pointer + index` in elements of `kind`."""
    return mgpu_utils.getelementptr(pointer, [index], kind)


def widen(value):
    """i32 to i64, unsigned."""
    return arith.extui(i64(), value)


@contextlib.contextmanager
def loop(start, stop, step):
    """`for i in range(start, stop, step)` over i32 values."""
    index = ir.IndexType.get()
    cast = lambda v: arith.index_cast(index, v)  # noqa: E731
    op = scf.ForOp(cast(start), cast(stop), cast(step), [])
    with ir.InsertionPoint(op.body):
        yield arith.index_cast(i32(), op.induction_variable)
        scf.yield_([])


def opaque(value: int) -> jax.Array:
    """A scalar whose value the compiler cannot see.

    A shared-memory descriptor indexed by it is rebuilt where it is used; otherwise LLVM hoists dozens of loop-invariant
    descriptors out of the key loop and ptxas spills them.
    """

    @inline(arg_types=(), return_type=array_type((), jnp.int32, layout=SCALAR))
    def emit(ctx):
        result = asm(i32(), [], f"mov.b32 $0, {value};", "=r")
        return mgpu.FragmentedArray.splat(result, (), layout=mgpu.WGSplatFragLayout(()), is_signed=True)

    return emit()


def init_barriers(counts: tuple[int, ...]):
    """Inline function `(ref)`: the first thread of the block makes one mbarrier of each arrival count."""

    @inline(arg_types=(REF,))
    def init(ctx, ref):
        first = arith.cmpi(Pred.eq, mgpu_utils.thread_idx(), const(0))
        base = shared_address(ref)
        for i, count in enumerate(counts):
            address = arith.addi(base, const(8 * i))
            asm(None, [address, first], f"@$1 mbarrier.init.shared::cta.b64 [$0], {count};", "r,b")
        asm(None, [], "fence.mbarrier_init.release.cluster;", "")

    return init


@inline(arg_types=(REF, SCALAR, SCALAR))
def wait(ctx, barriers, index, parity):
    """Wait until the phase of that parity of mbarrier `index` is complete."""
    address = arith.addi(shared_address(barriers), arith.muli(scalar(index), const(8)))
    asm(
        None,
        [address, scalar(parity)],
        "{ .reg .pred P1; L1_${:uid}: mbarrier.try_wait.parity.shared::cta.b64 P1, [$0], $1;"
        " @P1 bra.uni L2_${:uid}; bra.uni L1_${:uid}; L2_${:uid}: }",
        "r,r,~{memory}",
    )


def warp_arrive(address, count: int = 1):
    """`count` arrivals for each warp, after everything its lanes did before."""
    asm(None, [], "bar.warp.sync 0xffffffff;", "~{memory}")
    leader = arith.cmpi(Pred.eq, arith.remui(mgpu_utils.thread_idx(), const(32)), const(0))
    code = f"@$1 mbarrier.arrive.release.cta.shared::cta.b64 _, [$0]{f', {count}' if count > 1 else ''};"
    asm(None, [address, leader], code, "r,b,~{memory}")


@inline(arg_types=(REF, SCALAR))
def arrive(ctx, barriers, index):
    """Each warp of the warpgroup arrives once on mbarrier `index`."""
    warp_arrive(arith.addi(shared_address(barriers), arith.muli(scalar(index), const(8))))


@inline(arg_types=())
def fence_shared_writes(ctx):
    """Make this thread's view of shared memory visible to the tensor cores."""
    asm(None, [], "fence.proxy.async.shared::cta;", "~{memory}")


@inline(arg_types=())
def warpgroup_sync(ctx):
    """Meet all threads of the warpgroup."""
    mgpu_utils.warpgroup_barrier()


@inline(arg_types=())
def block_sync(ctx):
    """Meet all threads of the block."""
    asm(None, [], "bar.sync 0;", "~{memory}")


def exp2(x):
    """`2**x` by the special function unit; exact 0 at -inf, NaN at NaN."""
    return asm_pure(f32(), [x], "ex2.approx.ftz.f32 $0, $1;", "=f,f")


def asm_pure(result, operands, code: str, constraints: str):
    """Inline PTX without side effects, free to move."""
    return llvm.inline_asm(result, operands, code, constraints, has_side_effects=False)


def fma(a, b, c):
    """Fused a * b + c in float32."""
    return llvm.intr_fma(a, b, c)


def lanes(fragment):
    """The elements of a fragmented array as a flat list of scalars, in register order."""
    out = []
    for register in fragment.registers.flat:
        size = ir.VectorType(register.type).shape[0]
        out += [vector.extract(register, [], [i]) for i in range(size)]
    return out


def like(fragment, values, registers_shape=None):
    """A fragmented array of float32 like `fragment` that holds the scalars `values` in register order."""
    shape = fragment.registers.shape
    size = ir.VectorType(fragment.registers.flat[0].type).shape[0]
    kind = ir.VectorType.get((size,), values[0].type)
    registers = fragment.registers.copy()
    packed = [vector.from_elements(kind, values[i : i + size]) for i in range(0, len(values), size)]
    registers.reshape(-1)[:] = packed
    return mgpu.FragmentedArray(_registers=registers.reshape(shape), _layout=fragment.layout, _is_signed=None)


def tree(values, combine):
    """Combine values pairwise, so that the chain of dependent operations is short."""
    while len(values) > 1:
        pairs = [combine(a, b) for a, b in zip(values[::2], values[1::2], strict=False)]
        values = pairs + values[len(values) // 2 * 2 :]
    return values[0]


def quad_reduce(value, combine):
    """Combine `value` over the four lanes that hold one row of a wgmma accumulator."""
    for distance in (1, 2):
        value = combine(value, mgpu_utils.shfl_bfly(value, distance))
    return value


def ballot(predicate):
    """The predicate of the 32 lanes of a warp as an i32."""
    return asm(i32(), [predicate], "vote.sync.ballot.b32 $0, $1, 0xffffffff;", "=r,b")
