"""`wgmma.mma_async` of bf16 for `ptx_machine.py`: four warps meet, and multiply when somebody waits for the result."""

import re

import ml_dtypes
import numpy as np

LANES = 32
_ROW = np.arange(LANES) // 4
_COLUMN = 2 * (np.arange(LANES) % 4)


def multiply(compiled, suffixes, operands):
    """Function of a warp for one instruction."""
    _, columns, _ = map(int, re.match(r"m(\d+)n(\d+)k(\d+)", suffixes[3]).groups())
    accumulator = [compiled.register(name) for name in compiled.names(operands[0])]
    in_registers = operands[1].startswith("{")
    a = [compiled.source(name) for name in compiled.names(operands[1])]
    b = compiled.source(operands[2])
    keep = compiled.source(operands[3])
    flags = [int(x) for x in operands[4:]]
    assert flags[:2] == [1, 1] and (in_registers or flags[2] == 0)
    transposed = bool(flags[-1])

    def run(w):
        assert w.mask is None
        own = [x(w).copy() for x in a] if in_registers else int(a[0](w)[0])
        _gather(w, (own, int(b(w)[0]), bool(keep(w)[0])), start)

    def start(warps, operands):
        group = warps[0].warpgroup
        (first, of_b, kept) = operands[0]
        assert all(x[1:] == (of_b, kept) for x in operands)

        def product():
            shared = warps[0].block.shared
            left = _fragments([x[0] for x in operands]) if in_registers else _tile(shared, first, 64, 16)
            right = _columns(shared, of_b, columns) if transposed else _tile(shared, of_b, columns, 16)
            out = left.astype(np.float64) @ right.astype(np.float64).T
            for i, warp in enumerate(warps):
                _accumulate(warp, accumulator, out[16 * i : 16 * i + 16], kept)

        group.issued.append(product)
        if not warps[0].block.lazy:
            product()
            group.issued[-1] = lambda: None

    return run


def commit(w):
    """`wgmma.commit_group`, by all four warps."""

    def close(warps, _):
        group = warps[0].warpgroup
        group.groups.append(group.issued)
        group.issued = []

    _gather(w, None, close)


def wait(w, keep: int):
    """`wgmma.wait_group`, by all four warps."""

    def finish(warps, _):
        group = warps[0].warpgroup
        done = group.groups[: len(group.groups) - keep]
        group.groups = group.groups[len(done) :]
        for product in (p for part in done for p in part):
            product()

    _gather(w, None, finish)


def _gather(w, operands, action):
    """Block the warp until all four of its warpgroup are there, then act once for all."""
    group = w.warpgroup
    group.waiting.append((w, operands, w.pc))
    w.blocked = True
    if len(group.waiting) < 4:
        return
    assert len({pc for _, _, pc in group.waiting}) == 1, "warps of a warpgroup at different instructions"
    there = sorted(group.waiting, key=lambda x: x[0].index)
    group.waiting = []
    action([x[0] for x in there], [x[1] for x in there])
    for warp, _, _ in there:
        warp.blocked = False


def _fields(descriptor: int):
    assert descriptor >> 62 == 1, "only the 128-byte swizzle"
    part = lambda at: (descriptor >> at & 0x3FFF) << 4  # noqa: E731
    return part(0), part(16), part(32)


def _load(shared, addresses):
    """bf16 at addresses before the swizzle, as float32."""
    addresses = addresses ^ (addresses >> 7 & 7) << 4
    raw = shared.view(ml_dtypes.bfloat16)[addresses // 2]
    return raw.astype(np.float32)


def _tile(shared, descriptor: int, rows: int, columns: int):
    """Rows of a matrix whose columns are contiguous [rows, columns]."""
    start, _, stride = _fields(descriptor)
    row, column = np.arange(rows)[:, None], np.arange(columns)[None, :]
    return _load(shared, start + row // 8 * stride + row % 8 * 128 + 2 * column)


def _columns(shared, descriptor: int, columns: int):
    """The transpose [columns, 16] of 16 rows of a matrix whose rows are contiguous."""
    start, across, down = _fields(descriptor)
    row, column = np.arange(16)[None, :], np.arange(columns)[:, None]
    return _load(shared, start + row // 8 * down + row % 8 * 128 + column // 64 * across + column % 64 * 2)


def _fragments(registers):
    """A [64, 16] from the registers of four warps."""
    out = np.zeros((64, 16), np.float32)
    for warp, words in enumerate(registers):
        for i, word in enumerate(words):
            pair = np.ascontiguousarray(word).view(ml_dtypes.bfloat16).reshape(LANES, 2).astype(np.float32)
            rows, columns = 16 * warp + _ROW + 8 * (i % 2), _COLUMN + 8 * (i // 2)
            out[rows, columns], out[rows, columns + 1] = pair[:, 0], pair[:, 1]
    return out


def _accumulate(warp, accumulator, out, kept: bool):
    for i, (file, row) in enumerate(accumulator):
        register = getattr(warp, file)[row]
        value = out[_ROW + 8 * (i // 2 % 2), 8 * (i // 4) + _COLUMN + i % 2]
        before = register.view(np.float32).astype(np.float64) if kept else 0.0
        with np.errstate(all="ignore"):
            register[...] = (before + value).astype(np.float32).view(np.uint32)
