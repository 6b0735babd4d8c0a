"""Inline code of the block-scaled FP8 product on Hopper: what Pallas cannot say, or says with more instructions."""

import jax.numpy as jnp

from pallas_kernels import mosaic_support as ms


def _scalars(fragment) -> list:
    """The elements of a fragmented array in register order."""
    f32, out = ms.ir.F32Type.get(), []
    for register in fragment.registers.flat:
        if register.type == f32:
            out.append(register)
        else:
            size = ms.ir.VectorType(register.type).shape[0]
            out += [ms.vector.extract(register, [], [i]) for i in range(size)]
    return out


def promote(ctx, total, part, rows, scale):
    """`total + part * (rows * scale)`, one FMA an element: total and part [64, N], rows [64], scale a scalar."""
    del ctx
    factors = [ms.arith.mulf(row, ms.scalar(scale)) for row in _scalars(rows)]  # rows r and r + 8 of the thread
    kind = total.registers.flat[0].type
    width = ms.ir.VectorType(kind).shape[0]
    out = total.registers.copy()
    flat = out.reshape(-1, 2)  # [8 columns, rows r and r + 8]
    parts = part.registers.reshape(-1, 2)
    for column in range(flat.shape[0]):
        for half in range(2):
            values = [
                ms.llvm.intr_fma(
                    ms.vector.extract(parts[column, half], [], [e]),
                    factors[half],
                    ms.vector.extract(flat[column, half], [], [e]),
                )
                for e in range(width)
            ]
            flat[column, half] = ms.vector.from_elements(kind, values)
    return ms.mgpu.FragmentedArray(_registers=flat.reshape(out.shape), _layout=total.layout, _is_signed=None)


def transpose_in_quad(words: list, lane, ops) -> list:
    """4 words of each of 4 neighbouring lanes transposed: lane i of them ends with word i of all, in lane order.

    Args:
      words: 4 words of this lane.
      lane: Its number.
      ops: Object with `bit(lane, distance)` (is that bit of the lane set), `select(condition, yes, no)` and
        `exchange(word, distance)` (the word of lane ^ distance).
    """
    for distance in (1, 2):
        upper = ops.bit(lane, distance)
        swapped = list(words)
        for i in range(4):
            if i & distance:
                continue
            j = i | distance
            got = ops.exchange(ops.select(upper, words[i], words[j]), distance)
            swapped[i] = ops.select(upper, got, words[i])
            swapped[j] = ops.select(upper, words[j], got)
        words = swapped
    return words


class _Device:
    """Operations of `transpose_in_quad` on the GPU."""

    select = staticmethod(ms.arith.select)
    exchange = staticmethod(ms.mgpu_utils.shfl_bfly)

    @staticmethod
    def bit(lane, distance):
        """Whether a bit of the lane's number is set."""
        return ms.arith.cmpi(ms.arith.CmpIPredicate.ne, ms.arith.andi(lane, ms.i32(distance)), ms.i32(0))


def store(columns: int, out_dtype):
    """Inline code that stores a warpgroup's [64, N] of rows `first` to `last`, in pieces of 16 or 8 bytes.

    A thread holds 2 neighbouring columns of every 8, and four lanes a row. In bfloat16 the lanes first trade words, so
    that each stores 8 neighbouring columns.
    """
    bf16 = jnp.dtype(out_dtype) == jnp.bfloat16
    add, mul, c = ms.arith.addi, ms.arith.muli, ms.i32

    def emit(ctx, values, out, row0, first, last, column0):
        del ctx
        i32, i64 = ms.ir.IntegerType.get_signless(32), ms.ir.IntegerType.get_signless(64)
        kind = ms.ir.BF16Type.get() if bf16 else ms.ir.F32Type.get()
        pair, four = ms.ir.VectorType.get((2,), kind), ms.ir.VectorType.get((4,), i32)
        lane = ms.arith.remui(ms.mgpu_utils.thread_idx(), c(32))
        warp = ms.arith.divui(ms.arith.remui(ms.mgpu_utils.thread_idx(), c(ms.WARPGROUP)), c(32))
        quad = ms.arith.remui(lane, c(4))
        row = add(ms.scalar(row0), add(mul(warp, c(16)), ms.arith.divui(lane, c(4))))
        own = add(ms.scalar(column0), mul(quad, c(8 if bf16 else 2)))
        registers = values.registers.reshape(-1, 2)  # [8 columns, rows r and r + 8]
        tiles = registers.shape[0]

        def words_of(tile, half):
            both = [ms.vector.extract(registers[tile, half], [], [e]) for e in range(2)]
            return ms.vector.from_elements(pair, [ms.arith.truncf(kind, x) for x in both] if bf16 else both)

        for half in range(2):
            at = add(row, c(8 * half))
            inside = ms.arith.andi(
                ms.arith.cmpi(ms.arith.CmpIPredicate.sge, at, ms.scalar(first)), ms.less(at, ms.scalar(last))
            )
            start = add(mul(ms.arith.extsi(i64, at), ms.i64(columns)), ms.arith.extsi(i64, own))
            pointer = ms.mgpu_utils.getelementptr(ms.global_pointer(out), [start], kind)
            for tile in range(0, tiles, 4 if bf16 else 1):
                column = add(own, c(8 * tile))
                value = words_of(tile, half)
                if bf16:
                    words = [ms.llvm.bitcast(i32, words_of(tile + t, half)) for t in range(4)]
                    value = ms.vector.from_elements(four, transpose_in_quad(words, lane, _Device))
                with ms.mgpu_utils.when(ms.arith.andi(inside, ms.less(column, c(columns)))):
                    where = ms.mgpu_utils.getelementptr(pointer, [c(8 * tile)], kind)
                    ms.llvm.store(value, where, alignment=16 if bf16 else 8)

    return emit
