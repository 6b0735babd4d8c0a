"""Integers, floats and conditions of one CUDA thread, with Python's operators, as MLIR values."""

import dataclasses
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, math

_Cmp = arith.CmpIPredicate


def i32_type() -> ir.Type:
    """The 32-bit integer type of the current context."""
    return ir.IntegerType.get_signless(32)


def f32_type() -> ir.Type:
    """The float32 type of the current context."""
    return ir.F32Type.get()


@dataclasses.dataclass(frozen=True, eq=False)
class Int:
    """A 32-bit integer value. Comparisons are signed unless their name starts with u."""

    value: ir.Value

    def __add__(self, other):
        return Int(arith.addi(self.value, raw(other)))

    def __sub__(self, other):
        return Int(arith.subi(self.value, raw(other)))

    def __mul__(self, other):
        return Int(arith.muli(self.value, raw(other)))

    def __and__(self, other):
        return Int(arith.andi(self.value, raw(other)))

    def __or__(self, other):
        return Int(arith.ori(self.value, raw(other)))

    def __xor__(self, other):
        return Int(arith.xori(self.value, raw(other)))

    def __lshift__(self, other):
        return Int(arith.shli(self.value, raw(other)))

    def __rshift__(self, other):
        return Int(arith.shrui(self.value, raw(other)))

    def sar(self, bits: int):
        """Shift right, copying the sign."""
        return Int(arith.shrsi(self.value, raw(bits)))

    def udiv(self, other):
        """Unsigned division."""
        return Int(arith.divui(self.value, raw(other)))

    def min(self, other):
        """Signed minimum."""
        return Int(arith.minsi(self.value, raw(other)))

    def max(self, other):
        """Signed maximum."""
        return Int(arith.maxsi(self.value, raw(other)))

    def umin(self, other):
        """Unsigned minimum."""
        return Int(arith.minui(self.value, raw(other)))

    def mul_high(self, other):
        """Upper 32 bits of the unsigned product."""
        return Int(arith.mului_extended(self.value, raw(other))[1])

    def popcount(self):
        """Number of set bits."""
        return Int(math.ctpop(self.value))

    def bit_length(self):
        """Position after the highest set bit; 0 for 0."""
        return constant(32) - Int(math.ctlz(self.value))

    def trailing_zeros(self):
        """Index of the lowest set bit."""
        return Int(math.cttz(self.value))

    def __lt__(self, other):
        return self._compare(_Cmp.slt, other)

    def __le__(self, other):
        return self._compare(_Cmp.sle, other)

    def __gt__(self, other):
        return self._compare(_Cmp.sgt, other)

    def __ge__(self, other):
        return self._compare(_Cmp.sge, other)

    def equals(self, other):
        """Equality as a condition."""
        return self._compare(_Cmp.eq, other)

    def ult(self, other):
        """Unsigned less."""
        return self._compare(_Cmp.ult, other)

    def ule(self, other):
        """Unsigned less or equal."""
        return self._compare(_Cmp.ule, other)

    def uge(self, other):
        """Unsigned greater or equal."""
        return self._compare(_Cmp.uge, other)

    def ugt(self, other):
        """Unsigned greater."""
        return self._compare(_Cmp.ugt, other)

    def _compare(self, predicate, other):
        return Bool(arith.cmpi(predicate, self.value, raw(other)))


@dataclasses.dataclass(frozen=True, eq=False)
class Float:
    """A float32 value; comparisons are ordered, so NaN fails them."""

    value: ir.Value

    def __ge__(self, other):
        return Bool(arith.cmpf(arith.CmpFPredicate.OGE, self.value, other.value))

    def is_zero(self):
        """Equality with 0.0, which -0.0 has."""
        return Bool(arith.cmpf(arith.CmpFPredicate.OEQ, self.value, arith.constant(f32_type(), 0.0)))

    def is_nan(self):
        """Whether the value is NaN."""
        return Bool(arith.cmpf(arith.CmpFPredicate.UNO, self.value, self.value))

    def bits(self):
        """The 32 bits as an integer."""
        return Int(arith.bitcast(i32_type(), self.value))


@dataclasses.dataclass(frozen=True, eq=False)
class Bool:
    """A condition."""

    value: ir.Value

    def __and__(self, other):
        return Bool(arith.andi(self.value, other.value))

    def __or__(self, other):
        return Bool(arith.ori(self.value, other.value))

    def __invert__(self):
        return Bool(arith.xori(self.value, arith.constant(self.value.type, 1)))

    def choose(self, yes, no) -> Any:
        """`yes` where the condition holds, else `no`; both Int, both Float or plain ints."""
        kind = Float if isinstance(yes, Float) else Int
        return kind(arith.select(self.value, raw(yes), raw(no)))


@dataclasses.dataclass(frozen=True, eq=False)
class Wide:
    """A 64-bit integer value, for offsets into arrays of more than 2**31 elements."""

    value: ir.Value

    @classmethod
    def of(cls, x: Int) -> "Wide":
        """Extend a non-negative Int."""
        return cls(arith.extui(ir.IntegerType.get_signless(64), x.value))

    def __add__(self, other: "Wide"):
        return Wide(arith.addi(self.value, other.value))

    def __sub__(self, other: "Wide"):
        return Wide(arith.subi(self.value, other.value))

    def __mul__(self, other: int):
        return Wide(arith.muli(self.value, arith.constant(self.value.type, other)))

    def low(self) -> Int:
        """The lower 32 bits."""
        return Int(arith.trunci(i32_type(), self.value))


def raw(x) -> ir.Value:
    """The MLIR value of a wrapper or of a Python int, which is taken modulo 2**32."""
    if isinstance(x, int):
        x &= 0xFFFFFFFF
        return arith.constant(i32_type(), ir.IntegerAttr.get(i32_type(), x - (1 << 32) if x >> 31 else x))
    return x.value


def constant(x: int) -> Int:
    """An integer constant."""
    return Int(raw(x))


def float_from_bits(bits: Int) -> Float:
    """The float32 with these bits."""
    return Float(arith.bitcast(f32_type(), bits.value))
