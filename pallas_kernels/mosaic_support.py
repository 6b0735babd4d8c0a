"""The corner that touches private or unstable parts of jax's Mosaic GPU: MLIR dialects and inline code.

Written against jax 0.11.2 and 0.12.0. Kernels import these names from here, so that a change in jax is met in one file.
"""

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, nvvm, vector

__all__ = ["arith", "ir", "llvm", "memref", "mgpu", "mgpu_utils", "nvvm", "vector"]

WARPGROUP = 128  # threads


def i32(value: int) -> ir.Value:
    """An int32 constant."""
    return mgpu.c(value, ir.IntegerType.get_signless(32))


def i64(value: int) -> ir.Value:
    """An int64 constant."""
    return mgpu.c(value, ir.IntegerType.get_signless(64))


def f32(value: float) -> ir.Value:
    """A float32 constant."""
    return mgpu.c(value, ir.F32Type.get())


def scalar(x) -> ir.Value:
    """The value of a scalar passed to inline code as `Layout.WG_SPLAT(())`."""
    return x.registers.flat[0]


def less(a: ir.Value, b: ir.Value) -> ir.Value:
    """Signed a < b."""
    return arith.cmpi(arith.CmpIPredicate.slt, a, b)


def is_zero(a: ir.Value) -> ir.Value:
    """Whether an int32 is 0."""
    return arith.cmpi(arith.CmpIPredicate.eq, a, i32(0))


def global_pointer(ref: ir.Value) -> ir.Value:
    """Pointer to the first element of an array in global memory, in the global address space."""
    pointer = mgpu_utils.memref_ptr(ref)
    if llvm.PointerType(pointer.type).address_space == 1:
        return pointer
    return llvm.addrspacecast(llvm.PointerType.get(address_space=1), pointer)


def _predicate(condition: ir.Value) -> ir.Value:
    """An i1 as assembly can take it."""
    return arith.extui(ir.IntegerType.get_signless(16), condition)


def store_f32_if(condition: ir.Value, pointer: ir.Value, *values: ir.Value) -> None:
    """One predicated store of one or two float32 (then 8-byte aligned) to global memory, without a branch."""
    operands = ", ".join(f"${2 + i}" for i in range(len(values)))
    access = f"st.global.f32 [$1], {operands}" if len(values) == 1 else f"st.global.v2.f32 [$1], {{{operands}}}"
    llvm.inline_asm(
        ir.Type.parse("!llvm.void"),
        [_predicate(condition), pointer, *values],
        "{ .reg .pred %wanted; setp.ne.b16 %wanted, $0, 0; @%wanted " + access + "; }",
        "h,l" + ",f" * len(values),
        has_side_effects=True,
    )


def load_i32_if(condition: ir.Value, pointer: ir.Value, otherwise: int) -> ir.Value:
    """A predicated load of an int32 from global memory."""
    return llvm.inline_asm(
        ir.IntegerType.get_signless(32),
        [_predicate(condition), pointer],
        "{ .reg .pred %wanted; setp.ne.b16 %wanted, $1, 0; mov.b32 $0, "
        + str(otherwise)
        + "; @%wanted ld.global.b32 $0, [$2]; }",
        "=r,h,l",
        has_side_effects=True,
    )


def named_barrier(action: str, index: ir.Value, threads: int) -> None:
    """`sync` on or `arrive` at one of the 16 hardware barriers of a block, which are faster than those in memory."""
    llvm.inline_asm(ir.Type.parse("!llvm.void"), [index], f"bar.{action} $0, {threads};", "r", has_side_effects=True)
