"""Inline code of the lightning indexer's Hopper kernel: what Pallas cannot say, or says with more instructions."""

from pallas_kernels import mosaic_support as ms

BLOCK_MAX_KEYS = 16
_FIRST_NAMED_BARRIER = 8  # Mosaic uses the low ones itself


def turn(action: str):
    """Inline code that waits for a warpgroup's turn (`sync`) or gives it to that warpgroup (`arrive`)."""

    def emit(ctx, warpgroup):
        del ctx
        index = ms.arith.addi(ms.scalar(warpgroup), ms.i32(_FIRST_NAMED_BARRIER))
        ms.named_barrier(action, index, 2 * ms.WARPGROUP)

    return emit


def accumulate(ctx, scores, dots, weights):
    """Add weights * relu(dots) to the scores: a comparison and a predicated FMA for each element.

    A maximum and an FMA are as many instructions, but write one register more and compute in every lane.
    """
    del ctx
    f32 = ms.ir.F32Type.get()
    pair = dots.registers.flat[0].type
    row_weights = [w if w.type == f32 else ms.vector.extract(w, [], [0]) for w in weights.registers.flat]
    dots_registers = dots.registers.reshape(-1, 2)
    out = scores.registers.copy()
    flat = out.reshape(-1, 2)
    for column in range(dots_registers.shape[0]):
        for half in range(2):
            values = []
            for e in range(2):
                values.append(
                    ms.llvm.inline_asm(
                        f32,
                        [
                            ms.vector.extract(dots_registers[column, half], [], [e]),
                            row_weights[half],
                            ms.vector.extract(flat[column, half], [], [e]),
                        ],
                        "{ .reg .pred %positive; setp.gt.f32 %positive, $1, 0f00000000; "
                        "@%positive fma.rn.f32 $0, $1, $2, $0; }",
                        "=f,f,f,0",
                        has_side_effects=False,
                    )
                )
            flat[column, half] = ms.vector.from_elements(pair, values)
    return ms.mgpu.FragmentedArray(_registers=flat.reshape(out.shape), _layout=scores.layout, _is_signed=None)


def store(rows: int, keys: int, scaled: bool, with_max: bool):
    """Inline code that scales, masks and stores a warpgroup's scores of [64, N], and the maxima of 16 keys."""
    add, mul, both, c = ms.arith.addi, ms.arith.muli, ms.arith.andi, ms.i32
    maxima = -(-keys // BLOCK_MAX_KEYS)

    def emit(ctx, scores, key_start, key_end, out, row0, key0, *rest):
        del ctx
        scale = rest[0] if scaled else None
        block_max = rest[-1] if with_max else None
        f32, i32, i64 = ms.ir.F32Type.get(), ms.ir.IntegerType.get_signless(32), ms.ir.IntegerType.get_signless(64)
        lane = ms.arith.remui(ms.mgpu_utils.thread_idx(), c(32))
        warp = ms.arith.divui(ms.arith.remui(ms.mgpu_utils.thread_idx(), c(ms.WARPGROUP)), c(32))
        quad = ms.arith.remui(lane, c(4))
        first_row = add(ms.scalar(row0), add(mul(warp, c(16)), ms.arith.divui(lane, c(4))))
        first_key = add(ms.scalar(key0), mul(quad, c(2)))  # of this thread's pair in each 8 columns
        first_block = ms.arith.divui(ms.scalar(key0), c(BLOCK_MAX_KEYS))
        registers = scores.registers.reshape(-1, 2)  # [8 columns, rows r and r + 8]
        scale_base = ms.mgpu_utils.memref_ptr(scale) if scaled else None

        def at(base, index, type_):
            return ms.mgpu_utils.getelementptr(base, [index], type_)

        def line(ref, row, width, column):
            index = add(mul(ms.arith.extsi(i64, row), ms.i64(width)), ms.arith.extsi(i64, column))
            return at(ms.global_pointer(ref), index, f32)

        bounds = []
        for half in range(2):
            row = add(first_row, c(8 * half))
            exists = ms.less(row, c(rows))
            start, end = (
                ms.load_i32_if(exists, at(ms.global_pointer(ref), ms.arith.extsi(i64, row), i32), 0)
                for ref in (key_start, key_end)
            )
            maxima_line = line(block_max, row, maxima, first_block) if with_max else None
            bounds.append((exists, start, end, line(out, row, keys, first_key), maxima_line))

        def masked(value, key, start, end):
            outside = ms.arith.ori(ms.less(key, start), ms.arith.cmpi(ms.arith.CmpIPredicate.sge, key, end))
            return ms.arith.select(outside, ms.f32(float("-inf")), value)

        def columns(tile, half, scales):
            """Store the thread's pair of 8 columns; returns the higher score, NaN only if both are."""
            exists, start, end, scores_line, _ = bounds[half]
            key = add(first_key, c(tile * 8))
            values = []
            for e in range(2):
                value = ms.vector.extract(registers[tile, half], [], [e])
                value = ms.arith.mulf(value, scales[e]) if scaled else value
                values.append(masked(value, add(key, c(e)), start, end))
            fits = both(exists, ms.less(key, c(keys)))
            if keys % 2 == 0:
                ms.store_f32_if(fits, at(scores_line, c(tile * 8), f32), *values)
            else:  # pairs are not aligned in every row
                ms.store_f32_if(fits, at(scores_line, c(tile * 8), f32), values[0])
                second_fits = both(exists, ms.less(key, c(keys - 1)))
                ms.store_f32_if(second_fits, at(scores_line, c(tile * 8 + 1), f32), values[1])
            return ms.arith.maxnumf(*values)

        def store_max(block, half, best):
            exists, _, _, _, maxima_line = bounds[half]
            best = ms.arith.maxnumf(best, ms.f32(float("-inf")))  # of NaN and a number it is the number
            for distance in (1, 2):
                best = ms.arith.maxnumf(best, ms.mgpu_utils.shfl_bfly(best, distance))
            mine = both(ms.is_zero(ms.arith.subi(quad, c(block % 4))), ms.less(add(first_block, c(block)), c(maxima)))
            ms.store_f32_if(both(exists, mine), at(maxima_line, c(block), f32), best)

        for block in range(registers.shape[0] // 2):
            tiles = (2 * block, 2 * block + 1)
            scales = {}
            for tile in tiles if scaled else ():
                pair = ms.llvm.load(
                    ms.ir.VectorType.get((2,), f32), at(scale_base, add(mul(quad, c(2)), c(tile * 8)), f32)
                )
                scales[tile] = [ms.vector.extract(pair, [], [e]) for e in range(2)]
            for half in range(2):
                highest = [columns(tile, half, scales.get(tile)) for tile in tiles]
                if with_max:
                    store_max(block, half, ms.arith.maxnumf(*highest))

    return emit
