"""Online softmax of one block of scores and the epilogue of the sparse MLA kernel."""

import math

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.sparse_mla import device_ops as dev
from pallas_kernels.sparse_mla.tile_shape import (
    BITS,
    BITS_OF_STEP,
    BLOCK,
    FACTORS,
    LATENT,
    LISTS_AHEAD,
    TILE_ROWS,
    TileShape,
)

TILE_BYTES = 1024
Pred = arith.CmpIPredicate
WGMMA = plgpu.Layout.WGMMA


def _position():
    """Warp, lane, and the row of the tile of this thread's first row half; the second is 8 rows below."""
    tid = dev.thread()
    warp, lane = arith.divui(tid, dev.const(32)), arith.remui(tid, dev.const(32))
    row = arith.addi(arith.muli(warp, dev.const(16)), arith.divui(lane, dev.const(4)))
    return warp, lane, row


def _members(control, step, heads: int):
    """For both row halves, the two words of key bits of the row's token, shifted to this thread's columns."""
    warp, lane, _ = _position()
    base = mgpu_utils.memref_ptr(control)
    shift = arith.muli(arith.remui(lane, dev.const(4)), dev.const(2))
    slot = arith.andi(step, dev.const(LISTS_AHEAD - 1))
    start = arith.addi(dev.const(BITS), arith.muli(slot, dev.const(BITS_OF_STEP)))

    def words(half):
        first_row = arith.addi(arith.muli(warp, dev.const(16)), dev.const(8 * half))
        token = arith.divui(first_row, dev.const(heads)) if heads < TILE_ROWS else dev.const(0)
        at = arith.addi(start, arith.muli(token, dev.const(2)))
        load = lambda i: llvm.load(dev.i32(), dev.offset(base, arith.addi(at, dev.const(i)), dev.i32()))  # noqa: E731
        return [arith.shrui(load(i), shift) for i in range(2)]

    first = words(0)
    return first, words(1) if heads < 16 else first


def _clear_nonfinite(ring, step, slots: int):
    """Set the infinities and NaN of the block's values to 0, so that a weight of 0 hides them from other rows."""
    _, lane, _ = _position()
    slot = arith.remui(step, dev.const(slots))
    base = arith.addi(dev.shared_address(ring), arith.muli(slot, dev.const(BLOCK * LATENT * 2)))
    pointer = llvm.inttoptr(llvm.PointerType.get(address_space=3), base)
    with dev.loop(dev.const(0), dev.const(BLOCK), dev.const(1)) as key:
        row = arith.addi(
            arith.muli(arith.divui(key, dev.const(8)), dev.const(LATENT // 64 * TILE_BYTES)),
            arith.muli(arith.remui(key, dev.const(8)), dev.const(128)),
        )
        with dev.loop(dev.const(0), dev.const(LATENT // 2), dev.const(32)) as step:
            word = arith.addi(step, lane)  # 32 words of 2 values a tile
            at = arith.addi(row, arith.muli(arith.divui(word, dev.const(32)), dev.const(TILE_BYTES)))
            at = arith.addi(at, arith.muli(arith.remui(word, dev.const(32)), dev.const(4)))
            where = dev.offset(pointer, at, ir.IntegerType.get_signless(8))
            value = llvm.load(dev.i32(), where)
            for exponent, half in ((0x7F80, 0xFFFF), (0x7F800000, 0xFFFF0000)):
                bad = arith.cmpi(Pred.eq, arith.andi(value, dev.const(exponent)), dev.const(exponent))
                value = arith.select(bad, arith.andi(value, dev.const(0xFFFFFFFF ^ half)), value)
            llvm.store(value, where)


def block_step(shape: TileShape, log2_scale: float):
    """Inline function `(scores, top, total, step, control, ring) -> (p, top, total)`.

    `top` is the running maximum in units of log2; `total` is this thread's share of the running sum. The factor that
    the output must shrink by goes to the control array.
    """
    heads = shape.heads if shape.masked else TILE_ROWS  # without masks all rows share the bits of one token
    result = (
        dev.array_type((TILE_ROWS, BLOCK), jnp.float32, layout=WGMMA),
        dev.array_type((TILE_ROWS,), jnp.float32, layout=dev.ROW),
        dev.array_type((TILE_ROWS,), jnp.float32, layout=dev.ROW),
    )

    @dev.inline(arg_types=(WGMMA, dev.ROW, dev.ROW, dev.SCALAR, dev.REF, dev.TILED_REF), return_type=result)
    def run(ctx, scores, top, total, step, control, ring):
        step = dev.scalar(step)
        _, lane, row = _position()
        values = dev.lanes(scores)  # [tile, half, 2] flat
        at = lambda tile, half, e: (tile * 2 + half) * 2 + e  # noqa: E731
        members = _members(control, step, heads)
        if shape.masked:
            sums = [dev.fconst(0.0)] * 4
            for i, value in enumerate(values):
                sums[i % 4] = dev.fma(value, dev.fconst(0.0), sums[i % 4])
            poison = dev.tree(sums, arith.addf)
            seen = dev.ballot(arith.cmpf(arith.CmpFPredicate.UNO, poison, poison))
            with mgpu_utils.when(arith.cmpi(Pred.ne, seen, dev.const(0))):
                _clear_nonfinite(ring, step, shape.slots)
        for tile in range(BLOCK // 8):
            for e in range(2):
                ok = None
                for half in range(2):
                    if half == 0 or members[1] is not members[0]:
                        bit = dev.const(1 << (8 * (tile % 4) + e))
                        word = members[half][tile // 4]
                        ok = arith.cmpi(Pred.ne, arith.andi(word, bit), dev.const(0))
                    i = at(tile, half, e)
                    values[i] = arith.select(ok, values[i], dev.fconst(-math.inf))
        new_top, new_total = [], []
        for half in range(2):
            mine = [at(tile, half, e) for tile in range(BLOCK // 8) for e in range(2)]
            block_top = dev.quad_reduce(dev.tree([values[i] for i in mine], arith.maxnumf), arith.maxnumf)
            before = dev.lanes(top)[half]
            after = arith.maxnumf(before, arith.mulf(block_top, dev.fconst(log2_scale)))
            decay = dev.exp2(arith.subf(before, after))
            shift = arith.negf(after)
            added = [dev.fconst(0.0), dev.fconst(0.0)]
            for n, i in enumerate(mine):
                values[i] = dev.exp2(dev.fma(values[i], dev.fconst(log2_scale), shift))
                added[n % 2] = arith.addf(added[n % 2], values[i])
            new_top.append(after)
            new_total.append(dev.fma(dev.lanes(total)[half], decay, arith.addf(*added)))
            with mgpu_utils.when(arith.cmpi(Pred.eq, arith.remui(lane, dev.const(4)), dev.const(0))):
                llvm.store(decay, _factor(control, step, row, half))
        return dev.like(scores, values), dev.like(top, new_top), dev.like(total, new_total)

    return run


def _factor(control, step, row, half):
    """Pointer to the factor of a row of a step, 8 rows down in the second half."""
    pair = arith.muli(arith.andi(step, dev.const(1)), dev.const(TILE_ROWS))
    word = arith.addi(arith.addi(pair, row), dev.const(FACTORS + 8 * half))
    return dev.offset(mgpu_utils.memref_ptr(control), word, dev.f32())


def _row_factors(control, step):
    """For both row halves, the factor of this thread's row."""
    _, _, row = _position()
    return [llvm.load(dev.f32(), _factor(control, step, row, half)) for half in range(2)]


def shrink(columns: int):
    """Inline function `(acc, step, control)`: the accumulator's rows times the factors of the step."""
    result = dev.array_type((TILE_ROWS, columns), jnp.float32, layout=dev.ACCUMULATOR)

    @dev.inline(arg_types=(dev.ACCUMULATOR, dev.SCALAR, dev.REF), return_type=result)
    def run(ctx, acc, step, control):
        factors = _row_factors(control, dev.scalar(step))
        values = [arith.mulf(v, factors[i // 2 % 2]) for i, v in enumerate(dev.lanes(acc))]
        return dev.like(acc, values)

    return run


def _row_of_output(shape: TileShape, tile, part, row):
    """Flat row of the output as i64, and whether the tile's `row` is one."""
    at = arith.addi(arith.muli(tile, dev.const(shape.rows)), row)
    ok = arith.andi(
        arith.cmpi(Pred.slt, row, dev.const(shape.rows)), arith.cmpi(Pred.slt, at, dev.const(shape.queries))
    )
    start = arith.muli(dev.widen(part), mgpu.c(shape.queries, dev.i64()))
    return arith.addi(start, dev.widen(at)), ok


def finish(shape: TileShape):
    """Inline function `(top, total, step, control, lse, tile, part)`: reciprocal sums to the factors, lse to memory."""

    @dev.inline(arg_types=(dev.ROW, dev.ROW, dev.SCALAR, dev.REF, dev.REF, dev.SCALAR, dev.SCALAR))
    def run(ctx, top, total, step, control, lse, tile, part):
        step, tile, part = map(dev.scalar, (step, tile, part))
        _, lane, row = _position()
        for half in range(2):
            mass = dev.quad_reduce(dev.lanes(total)[half], arith.addf)
            empty = arith.cmpf(arith.CmpFPredicate.OEQ, mass, dev.fconst(0.0))
            inverse = arith.select(empty, dev.fconst(0.0), arith.divf(dev.fconst(1.0), mass))
            log = dev.asm_pure(dev.f32(), [mass], "lg2.approx.f32 $0, $1;", "=f,f")
            natural = arith.mulf(arith.addf(dev.lanes(top)[half], log), dev.fconst(math.log(2)))
            natural = arith.select(empty, dev.fconst(-math.inf), natural)
            this = arith.addi(row, dev.const(8 * half))
            at, ok = _row_of_output(shape, tile, part, this)
            first = arith.cmpi(Pred.eq, arith.remui(lane, dev.const(4)), dev.const(0))
            with mgpu_utils.when(first):
                llvm.store(inverse, _factor(control, step, row, half))
            with mgpu_utils.when(arith.andi(first, ok)):
                llvm.store(natural, dev.offset(dev.global_pointer(lse), at, dev.f32()))

    return run


def _quad_transpose(words, lane):
    """4 words of each of 4 lanes transposed: lane i of a quad ends with word i of every lane, in lane order."""
    for distance in (1, 2):
        upper = arith.cmpi(Pred.ne, arith.andi(lane, dev.const(distance)), dev.const(0))
        swapped = list(words)
        for i in range(4):
            if i & distance:
                continue
            j = i | distance
            sent = arith.select(upper, words[i], words[j])
            got = mgpu_utils.shfl_bfly(sent, distance)
            swapped[i] = arith.select(upper, got, words[i])
            swapped[j] = arith.select(upper, words[j], got)
        words = swapped
    return words


def row_factors():
    """Inline function `(step, control) -> factors of the rows` that holds them in registers."""

    @dev.inline(
        arg_types=(dev.SCALAR, dev.REF),
        return_type=dev.array_type((TILE_ROWS,), jnp.float32, layout=dev.ROW),
    )
    def run(ctx, step, control):
        layout = mgpu.WGMMA_ROW_LAYOUT
        zeros = mgpu.FragmentedArray.splat(dev.fconst(0.0), (TILE_ROWS,), layout)
        return dev.like(zeros, _row_factors(control, dev.scalar(step)))

    return run


def output_store(shape: TileShape, out_dtype: str):
    """Inline function `(acc, factors, out, tile, part, column)`: 256 columns of the tile's outputs to memory.

    A thread holds 2 neighbouring columns of every 8, and four lanes a row. In float32 that is a whole sector of 32
    bytes at a time; in bf16 the lanes first trade words, so that each stores 16 bytes.
    """
    bf16 = out_dtype == "bfloat16"

    @dev.inline(arg_types=(dev.ACCUMULATOR, dev.ROW, dev.REF) + (dev.SCALAR,) * 3)
    def run(ctx, acc, factors, out, tile, part, column):
        tile, part, column = map(dev.scalar, (tile, part, column))
        _, lane, row = _position()
        kind = ir.BF16Type.get() if bf16 else dev.f32()
        values = dev.lanes(acc)
        factors = dev.lanes(factors)
        in_quad = arith.remui(lane, dev.const(4))
        pair = ir.VectorType.get((2,), kind)
        four = ir.VectorType.get((4,), dev.i32())
        at, _ = _row_of_output(shape, tile, part, row)
        own = arith.addi(column, arith.muli(in_quad, dev.const(8 if bf16 else 2)))
        start = arith.addi(arith.muli(at, mgpu.c(LATENT, dev.i64())), dev.widen(own))
        pointer = dev.offset(dev.global_pointer(out), start, kind)
        for half in range(2):
            _, ok = _row_of_output(shape, tile, part, arith.addi(row, dev.const(8 * half)))

            def pair_of(t, half=half):
                both = [arith.mulf(values[(t * 2 + half) * 2 + e], factors[half]) for e in range(2)]
                return vector.from_elements(pair, [arith.truncf(kind, v) for v in both] if bf16 else both)

            for first in range(0, len(values) // 4, 4):
                pairs = [pair_of(first + t) for t in range(4)]
                if bf16:
                    words = _quad_transpose([llvm.bitcast(dev.i32(), p) for p in pairs], lane)
                    stores = [(vector.from_elements(four, words), 0)]
                else:
                    stores = [(p, 8 * t) for t, p in enumerate(pairs)]
                with mgpu_utils.when(ok):
                    for value, shift in stores:
                        where = dev.offset(pointer, dev.const(8 * half * LATENT + 8 * first + shift), kind)
                        llvm.store(value, where, alignment=16 if bf16 else 8)

    return run
