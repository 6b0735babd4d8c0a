"""Operands, and the instructions that compute, for `ptx_ops.py`."""

import re

import ml_dtypes
import numpy as np

from tests.lowering.ptx_machine import LANES, Program

SIGNED = {"s16": np.int16, "s32": np.int32, "s64": np.int64}
WIDTHS = {"16": np.uint16, "32": np.uint32, "64": np.uint64}
FILES = {"b16": "h", "b32": "r", "b64": "d", "pred": "p"}
LANE = np.arange(LANES)


class Computing:
    """A program as a list of functions of a warp."""

    def __init__(self, ptx: str, shared_bytes: int = 232_448):
        program = Program(ptx)
        self.program, self.shared_bytes = program, shared_bytes
        self.threads, self.parameters = program.threads, program.parameters
        self.registers: dict[str, tuple[str, int]] = {}
        self.sizes = {"b16": 1, "b32": 1, "b64": 1, "pred": 1}
        self.code = [self._instruction(*parts) for parts in program.code]

    def register(self, name: str) -> tuple[str, int]:
        """File and row of a register."""
        if name not in self.registers:
            kind = self.program.kind_of(name)
            self.registers[name] = FILES[kind], self.sizes[kind]
            self.sizes[kind] += 1
        return self.registers[name]

    # Operands.

    def source(self, text: str, kind: str = "b32"):
        """Function of a warp that gives the operand's value [lanes], unsigned, or bool."""
        if text in ("%tid.x", "%ctaid.x"):
            if text == "%tid.x":
                return lambda w: (w.index * LANES + LANE).astype(np.uint32)
            return lambda w: np.full(LANES, w.block.index, np.uint32)
        if re.match(r"-?\d|0[xf]", text):
            bits = int(text[2:], 16) if text.startswith("0f") else int(text, 0)
            width = WIDTHS[re.sub(r"\D", "", kind) or "32"]
            value = np.full(LANES, bits & (2 ** (width().itemsize * 8) - 1), width)
            return lambda w: value
        if text.startswith("__dynamic"):
            return lambda w: np.zeros(LANES, np.uint64)
        file, row = self.register(text)
        return lambda w: getattr(w, file)[row]

    def target(self, text: str):
        """Function (warp, value, lanes) that sets a register of the active lanes."""
        if text == "_":
            return lambda w, value: None
        file, row = self.register(text)

        def store(w, value):
            registers = getattr(w, file)
            if w.mask is None:
                registers[row] = value
            else:
                registers[row][w.mask] = value[w.mask]

        return store

    def names(self, text: str) -> list[str]:
        """The registers of a vector operand."""
        return [x.strip() for x in text.strip("{}").split(",")] if text.startswith("{") else [text]

    def address(self, text: str):
        """Function of a warp that gives addresses [lanes] uint64."""
        inner = text.strip("[]").strip()
        base, offset = re.fullmatch(r"([%\w]+)(?:\+(-?\d+))?", inner).groups()
        get, shift = self.source(base), int(offset or 0)
        return lambda w: (get(w).astype(np.int64) + shift).astype(np.uint64)

    # Instructions.

    def _instruction(self, predicate, opcode, operands):
        name, *suffixes = opcode.replace("::", ".").split(".")
        if name == "bra":
            return self._branch(predicate, operands[0])
        make = getattr(self, "_" + name, None)
        assert make is not None, f"unknown instruction {opcode} {operands}"
        run = make(suffixes, operands)
        if predicate is None:
            return run
        negated = predicate.startswith("!")
        get = self.source(predicate.lstrip("!"))

        def guarded(w):
            active = (get(w) != negated) & w.lanes()
            if active.any():
                saved, w.mask = w.mask, None if active.all() else active
                run(w)
                w.mask = saved

        return guarded

    def _branch(self, predicate, label):
        labels = self.program.labels
        if predicate is None:

            def jump(w):
                w.part.pc = labels[label]

            return jump
        negated = predicate.startswith("!")
        get = self.source(predicate.lstrip("!"))
        return lambda w: w.branch(labels[label], get(w) != negated)

    def _compute(self, operands, kinds, fn):
        """`target = fn(sources)` with sources of these types."""
        store = self.target(operands[0])
        gets = [self.source(text, kind) for text, kind in zip(operands[1:], kinds, strict=True)]
        views = [SIGNED.get(kind) or (np.float32 if kind == "f32" else None) for kind in kinds]
        loads = [(lambda w, g=g, v=v: g(w).view(v)) if v else g for g, v in zip(gets, views, strict=True)]

        def run(w):
            with np.errstate(all="ignore"):
                value = fn(*(load(w) for load in loads))
            if value.dtype == np.float32:
                value = value.view(np.uint32)
            store(w, value)

        return run

    def _same(self, suffixes, operands, fn):
        """All sources have the instruction's type."""
        return self._compute(operands, [suffixes[-1]] * (len(operands) - 1), lambda *x: _wrap(fn(*x), x[0].dtype))

    def _add(self, s, o):
        return self._same(s, o, lambda a, b: a + b)

    def _sub(self, s, o):
        return self._same(s, o, lambda a, b: a - b)

    def _neg(self, s, o):
        return self._same(s, o, lambda a: -a)

    def _min(self, s, o):
        return self._same(s, o, np.minimum)

    def _max(self, s, o):
        return self._same(s, o, np.fmax if s[-1] == "f32" else np.maximum)

    def _and(self, s, o):
        return self._same(s, o, lambda a, b: a & b)

    def _or(self, s, o):
        return self._same(s, o, lambda a, b: a | b)

    def _xor(self, s, o):
        return self._same(s, o, lambda a, b: a ^ b)

    def _not(self, s, o):
        return self._same(s, o, lambda a: ~a)

    def _mul(self, s, o):
        kind = s[-1]
        if kind == "f32":
            return self._same(s, o, lambda a, b: a * b)
        if "wide" in s:
            wide = {"s16": np.int32, "u16": np.uint32, "s32": np.int64, "u32": np.uint64}[kind]
            return self._compute(o, [kind] * 2, lambda a, b: _unsigned(a.astype(wide) * b.astype(wide)))
        if "hi" in s:
            bits = int(kind[1:])
            high = lambda a, b: _unsigned(((a.astype(np.int64) * b.astype(np.int64)) >> bits).astype(a.dtype))  # noqa: E731
            return self._compute(o, [kind] * 2, high)
        return self._same(s, o, lambda a, b: a * b)

    def _mad(self, s, o):
        return self._same(s, o, lambda a, b, c: a * b + c)

    def _fma(self, s, o):
        wide = np.float64
        return self._same(s, o, lambda a, b, c: (a.astype(wide) * b.astype(wide) + c.astype(wide)).astype(np.float32))

    def _shl(self, s, o):
        return self._compute(o, [s[-1], "b32"], lambda a, n: _wrap(a << n.astype(a.dtype), a.dtype))

    def _shr(self, s, o):
        return self._compute(o, [s[-1], "b32"], lambda a, n: _unsigned(a >> n.astype(a.dtype)))

    def _bfe(self, s, o):
        def run(a, at, size):
            return (a >> at.astype(a.dtype)) & ((a.dtype.type(1) << size.astype(a.dtype)) - a.dtype.type(1))

        return self._compute(o, [s[-1], "b32", "b32"], run)

    def _selp(self, s, o):
        return self._compute(o, ["b" + s[-1][1:]] * 2 + ["pred"], lambda a, b, p: np.where(p, a, b))

    def _setp(self, s, o):
        relation, kind = s[0], s[-1]
        compare = {
            "eq": lambda a, b: a == b,
            "ne": lambda a, b: a != b,
            "lt": lambda a, b: a < b,
            "le": lambda a, b: a <= b,
            "gt": lambda a, b: a > b,
            "ge": lambda a, b: a >= b,
            "nan": lambda a, b: np.isnan(a) | np.isnan(b),
        }[relation]
        if len(s) == 2:
            return self._compute(o, [kind] * 2, compare)
        join = {"and": np.logical_and, "or": np.logical_or}[s[1]]
        return self._compute(o, [kind] * 2 + ["pred"], lambda a, b, p: join(compare(a, b), p))

    def _ex2(self, s, o):
        return self._compute(o, ["f32"], lambda a: np.exp2(a))

    def _lg2(self, s, o):
        return self._compute(o, ["f32"], lambda a: np.log2(a))

    def _rcp(self, s, o):
        return self._compute(o, ["f32"], lambda a: np.float32(1) / a)

    def _cvt(self, s, o):
        to, of = s[-2:]
        if to == "bf16x2":
            half = lambda a: a.astype(ml_dtypes.bfloat16).view(np.uint16).astype(np.uint32)  # noqa: E731
            return self._compute(o, ["f32"] * 2, lambda high, low: half(high) << np.uint32(16) | half(low))
        if to == "f16x2":
            one = lambda a: a.astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float16).view(np.uint16)  # noqa: E731
            pair = lambda a: one(a >> 8).astype(np.uint32) << np.uint32(16) | one(a & 255)  # noqa: E731
            return self._compute(o, ["b16"], pair)
        if (to, of) == ("f32", "f16"):
            return self._compute(o, ["b16"], lambda a: a.view(np.float16).astype(np.float32))
        kind = SIGNED.get(of) or WIDTHS[of[1:]]
        goal = SIGNED.get(to) or WIDTHS[to[1:]]
        return self._compute(o, [of if of in SIGNED else "b" + of[1:]], lambda a: _unsigned(a.view(kind).astype(goal)))

    def _mov(self, s, o):
        if o[0].startswith("{"):
            get, targets = self.source(o[1]), [self.target(x) for x in self.names(o[0])]

            def split(w):
                value = get(w)
                for i, store in enumerate(targets):
                    store(w, (value >> np.uint32(16 * i)).astype(np.uint16))

            return split
        if o[1].startswith("{"):
            gets, store = [self.source(x) for x in self.names(o[1])], self.target(o[0])
            return lambda w: store(w, gets[0](w).astype(np.uint32) | gets[1](w).astype(np.uint32) << np.uint32(16))
        return self._compute(o, ["b64" if s[-1][1:] == "64" else s[-1]], lambda a: a.copy())

    def _cvta(self, s, o):
        return self._compute(o, ["b64"], lambda a: a.copy())


def _unsigned(a):
    return a.view(np.dtype(f"u{a.dtype.itemsize}"))


def _wrap(value, dtype):
    """The result as unsigned bits of the operands' width; floats and bools stay."""
    if dtype.kind in "bf":
        return value
    return _unsigned(value.astype(dtype))
