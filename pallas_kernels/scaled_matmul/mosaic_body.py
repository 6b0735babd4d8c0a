"""The warpgroups of the block-scaled FP8 product's Hopper kernel."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.scaled_matmul import mosaic_inline

BLOCK = 128  # columns of K that share a scale, and the N of a wgmma
ROWS = 64  # rows of a warpgroup, the M of a wgmma
_WGMMA = plgpu.Layout.WGMMA
_SCALAR = plgpu.Layout.WG_SPLAT(())


def _promote(total, part, rows, scale, plain: bool):
    """Add part [64, N] times rows [64] times a scalar to the total."""
    if plain:
        return total + part * lax.broadcast_in_dim(rows * scale, part.shape, [0])
    inline = plgpu.inline_mgpu(
        arg_types=(_WGMMA, _WGMMA, _WGMMA.reduce(1), _SCALAR),
        return_type=plgpu.ShapeDtypeStruct(total.shape, jnp.dtype(jnp.float32), layout=_WGMMA),
    )
    return inline(mosaic_inline.promote)(total, part, rows, scale)


def _store(total, out, out_smem, row0, first, last, column0, *, columns: int):
    """Store the rows from `first` to `last` (exclusive) of [64, N], whose first row is `row0`."""
    if out_smem is None:
        inline = plgpu.inline_mgpu(arg_types=(_WGMMA, plgpu.RefType(), *(_SCALAR,) * 4))
        inline(mosaic_inline.store(columns, out.dtype))(total, out, row0, first, last, column0)
        return
    out_smem[...] = total.astype(out.dtype)
    plgpu.commit_smem()

    def row(r, _):
        plgpu.copy_smem_to_gmem(out_smem.at[r], out.at[row0 + r, pl.ds(column0, BLOCK)])
        return ()

    lax.fori_loop(jnp.maximum(first - row0, 0), jnp.minimum(last - row0, ROWS), row, ())
    plgpu.wait_smem_to_gmem(0)


def _items(count, tiles_n: int, ctas: int):
    """Number of items of this block of the grid, and the function from their number to tile and column tile."""
    cta = lax.axis_index("cta")
    trips = lax.div(count[0] * tiles_n + (ctas - 1 - cta), ctas)

    def place(i):
        item = cta + i * ctas
        return lax.div(item, tiles_n), lax.rem(item, tiles_n)

    return trips, place


def consume(wg, refs, barriers, *, columns: int, config, halves: int):
    """One consumer warpgroup: 64 rows of every tile of this block of the grid."""
    tiles, count, weight_scale, out, x_smem, xs_smem, w_smem, out_smem = refs
    full, empty, full_right = barriers
    stages = x_smem.shape[0]
    blocks_n, blocks_k = weight_scale.shape[1:]
    mine = pl.ds(pl.multiple_of(wg * ROWS, ROWS), ROWS)
    accumulator = plgpu.ACC((ROWS, BLOCK), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
    plain = out_smem is not None
    trips, place = _items(count, pl.cdiv(columns, halves * BLOCK), config.ctas)

    def item(i, step):
        tile, n = place(i)
        group, row0, first, last = (tiles[tile, j] for j in range(4))

        def scales(block):
            """Scales of the weight's blocks, one for each half; a half behind the last column is not stored."""
            block = jnp.minimum(block, blocks_k - 1)
            return [weight_scale[group, jnp.minimum(n * halves + h, blocks_n - 1), block] for h in range(halves)]

        def block_step(block, carry):
            totals, factors = carry
            slot = lax.rem(step + block, stages)
            following = scales(block + 1)  # from global memory, under the products
            plgpu.barrier_wait(full.at[slot])
            rows = plgpu.load(xs_smem.at[slot, mine], layout=_WGMMA.reduce(1), optimized=False)
            done = []
            for h in range(halves):
                if h:
                    # Its own barrier, since the branch of a wait keeps the compiler from starting this product before
                    # the last one is added, for which there are not enough registers.
                    plgpu.barrier_wait(full_right.at[slot])

                def product(acc, h=h):
                    plgpu.wgmma(acc, x_smem.at[slot, mine], w_smem.at[slot, h].T)
                    return plgpu.wgmma_accumulator_load(acc, wait_n=0)

                part = pl.run_scoped(product, accumulator)
                if h == halves - 1:
                    plgpu.barrier_arrive(empty.at[slot])
                done.append(_promote(totals[h], part, rows, factors[h], plain))
            return done, following

        zeros = [plgpu.layout_cast(jnp.zeros((ROWS, BLOCK), jnp.float32), _WGMMA) for _ in range(halves)]
        totals, _ = lax.fori_loop(0, blocks_k, block_step, (zeros, scales(jnp.int32(0))))
        for h in range(halves):
            target = None if out_smem is None else out_smem.at[wg]
            column0 = (n * halves + h) * BLOCK
            _store(totals[h], out, target, row0 + wg * ROWS, first, last, column0, columns=columns)
        return step + blocks_k

    lax.fori_loop(0, trips, item, jnp.int32(0))


def produce(refs, barriers, *, columns: int, config, halves: int):
    """The producer warpgroup: loads rows, their scales and weights a block of K at a time."""
    tiles, count, x, x_scale, w, x_smem, xs_smem, w_smem = refs
    full, empty, full_right = barriers
    stages, rows, _ = x_smem.shape
    blocks_k = x_scale.shape[0]
    trips, place = _items(count, pl.cdiv(columns, halves * BLOCK), config.ctas)

    def item(i, step):
        tile, n = place(i)
        group, row0 = tiles[tile, 0], pl.multiple_of(tiles[tile, 1], 8)

        def load(block, _):
            slot = lax.rem(step + block, stages)

            @pl.when(step + block >= stages)
            def _reuse():
                plgpu.barrier_wait(empty.at[slot])
                plgpu.commit_smem()  # the scales of the rows were read by ordinary loads

            at = pl.ds(pl.multiple_of(block * BLOCK, BLOCK), BLOCK)
            plgpu.copy_gmem_to_smem(x.at[pl.ds(row0, rows), at], x_smem.at[slot], full.at[slot])
            plgpu.copy_gmem_to_smem(x_scale.at[block, pl.ds(row0, rows)], xs_smem.at[slot], full.at[slot])
            for h in range(halves):
                columns_of = pl.ds(pl.multiple_of((n * halves + h) * BLOCK, BLOCK), BLOCK)
                plgpu.copy_gmem_to_smem(
                    w.at[group, columns_of, at], w_smem.at[slot, h], (full_right if h else full).at[slot]
                )
            return ()

        lax.fori_loop(0, blocks_k, load, ())
        return step + blocks_k

    steps = lax.fori_loop(0, trips, item, jnp.int32(0))
    for slot in range(stages):  # No barrier may be left with a phase that nobody has seen.

        @pl.when(steps > slot)
        def _drain(slot=slot):
            plgpu.barrier_wait(empty.at[slot])
