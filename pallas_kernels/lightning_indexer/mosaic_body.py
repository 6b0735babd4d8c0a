"""The warpgroups of the lightning indexer's Hopper kernel."""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.lightning_indexer import mosaic_inline

ROWS = 64  # query rows of a tile, the M of a wgmma


def _accumulate(scores, dots, weights, plain: bool):
    """Add weights [64] * relu(dots [64, N]) to the scores [64, N]."""
    if plain:
        return scores + lax.broadcast_in_dim(weights, dots.shape, [0]) * jnp.where(dots > 0.0, dots, 0.0)
    wgmma = plgpu.Layout.WGMMA
    inline = plgpu.inline_mgpu(
        arg_types=(wgmma, wgmma, wgmma.reduce(1)),
        return_type=plgpu.ShapeDtypeStruct(dots.shape, jnp.dtype(jnp.float32), layout=wgmma),
    )
    return inline(mosaic_inline.accumulate)(scores, dots, weights)


def _store(scores, start, end, out, block_max, scale, row0, key0, *, rows: int, keys: int, plain: bool):
    """Scale, mask and store the scores [64, N] of rows from row0 and keys from key0."""
    if plain:
        count = scores.shape[1]
        if scale is not None:
            scores = scores * lax.broadcast_in_dim(scale[...], scores.shape, [1])
        ids = key0 + lax.broadcasted_iota(jnp.int32, scores.shape, 1)
        first = lax.broadcast_in_dim(start[pl.ds(row0, ROWS)], scores.shape, [0])
        last = lax.broadcast_in_dim(end[pl.ds(row0, ROWS)], scores.shape, [0])
        scores = jnp.where((ids >= first) & (ids < last), scores, -jnp.inf)
        out[pl.ds(row0, ROWS), pl.ds(key0, count)] = scores
        if block_max is not None:
            numbers = jnp.where(jnp.isnan(scores), -jnp.inf, scores).reshape(ROWS, -1, mosaic_inline.BLOCK_MAX_KEYS)
            blocks = count // mosaic_inline.BLOCK_MAX_KEYS
            block_max[pl.ds(row0, ROWS), pl.ds(key0 // mosaic_inline.BLOCK_MAX_KEYS, blocks)] = numbers.max(axis=2)
        return
    refs = [ref for ref in (scale, block_max) if ref is not None]
    layouts = plgpu.Layout
    inline = plgpu.inline_mgpu(
        arg_types=(
            layouts.WGMMA,
            *(plgpu.RefType(),) * 3,
            layouts.WG_SPLAT(()),
            layouts.WG_SPLAT(()),
            *(plgpu.RefType(),) * len(refs),
        )
    )
    emit = mosaic_inline.store(rows, keys, scale is not None, block_max is not None)
    inline(emit)(scores, start, end, out, row0, key0, *refs)


def _turn(action: str, wg, turns, plain: bool):
    """Wait for the turn of warpgroup `wg` ("sync"), or give it the turn ("arrive")."""
    if plain:
        {"sync": plgpu.barrier_wait, "arrive": plgpu.barrier_arrive}[action](turns.at[wg])
    else:
        plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT(()),))(mosaic_inline.turn(action))(wg)


def consume(wg, refs, barriers, *, shape, config, clean: bool, plain: bool):
    """One consumer warpgroup: the scores of its keys in every tile of this CTA's share."""
    rows, keys, heads = shape
    blocks, shares, start, end, out, block_max, q_smem, w_smem, k_smem, scale_smem = refs
    q_full, q_empty, k_full, k_empty, turns = barriers
    cta = lax.axis_index("cta")
    count, tile_keys = config.keys, config.tile_keys
    mine = pl.ds(pl.multiple_of(wg * count, count), count)
    layout = plgpu.Layout.WGMMA
    stages = q_smem.shape[0]
    following = jnp.where(wg == config.warpgroups - 1, 0, wg + 1)
    accumulator = plgpu.ACC((ROWS, count), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
    store = functools.partial(_store, start=start, end=end, out=out, block_max=block_max, rows=rows, keys=keys)

    def zeros():
        return plgpu.layout_cast(jnp.zeros((ROWS, count), jnp.float32), layout)

    def tile_scores(done):
        k_slot = done & (config.k_stages - 1)
        k_tile, w_tile = k_smem.at[k_slot, mine], w_smem.at[k_slot]

        def step(head, scores):
            slot = (done * heads + head) & (stages - 1)
            # Waits come before the accumulator is made: its zeros cost no instructions only next to the wgmma.
            plgpu.barrier_wait(q_full.at[slot])
            if config.turns:
                _turn("sync", wg, turns, plain)

            def dot(acc):
                half = q_smem.shape[2] // 2
                if config.turns:
                    plgpu.wgmma(acc, q_smem.at[slot, :, pl.ds(0, half)], k_tile.at[:, pl.ds(0, half)].T)
                    _turn("arrive", following, turns, plain)
                    plgpu.wgmma(acc, q_smem.at[slot, :, pl.ds(half, half)], k_tile.at[:, pl.ds(half, half)].T)
                else:
                    plgpu.wgmma(acc, q_smem.at[slot], k_tile.T)
                weights = plgpu.load(w_tile.at[head], layout=layout.reduce(1), optimized=False)
                dots = plgpu.wgmma_accumulator_load(acc, wait_n=0)
                plgpu.barrier_arrive(q_empty.at[slot])
                return _accumulate(scores, dots, weights, plain)

            return pl.run_scoped(dot, accumulator)

        return lax.fori_loop(0, heads, step, zeros())

    if config.turns:

        @pl.when(wg == config.warpgroups - 1)
        def _first_turn():
            _turn("arrive", jnp.int32(0), turns, plain)

    def block(index, done):
        first, last, before = blocks[index, 0], blocks[index, 1], blocks[index, 2]

        def tile(t, done):
            slot = done & (config.k_stages - 1)
            plgpu.barrier_wait(k_full.at[slot])
            scores = tile_scores(done)
            scale = None if scale_smem is None else scale_smem.at[slot, mine]
            store(scores, scale=scale, row0=index * ROWS, key0=t * tile_keys + wg * count, plain=plain)
            plgpu.barrier_arrive(k_empty.at[slot])
            return done + 1

        return lax.fori_loop(*_tiles(first, last, before, shares[cta, 0], shares[cta, 1]), tile, done)

    lax.fori_loop(shares[cta, 2], shares[cta, 3], block, jnp.int32(0))
    if config.turns:

        @pl.when(wg == 0)
        def _last_turn():
            _turn("sync", jnp.int32(0), turns, plain)  # no barrier may be left with a phase that nobody has seen

    if not clean:
        return
    tiles = pl.cdiv(keys, tile_keys)

    def fill_block(index, _):
        first, last, before = blocks[index, 0], blocks[index, 1], blocks[index, 2]

        def fill(t, _):
            t = jnp.where(t < first, t, t + (last - first))
            store(zeros(), scale=None, row0=index * ROWS, key0=t * tile_keys + wg * count, plain=plain)
            return ()

        unneeded = (0, tiles - (last - first), index * tiles - before)
        return lax.fori_loop(*_tiles(*unneeded, shares[cta, 4], shares[cta, 5]), fill, ())

    lax.fori_loop(shares[cta, 6], shares[cta, 7], fill_block, ())


def _tiles(first, last, before, share_first, share_last):
    """The tiles of a block that lie in a share; the block's tile `first` is number `before` of the list."""
    return (
        first + jnp.maximum(0, share_first - before),
        jnp.minimum(last, first + (share_last - before)),
    )


def produce(refs, barriers, *, heads: int, config):
    """The producer warpgroup: loads the keys of each tile, then its queries head by head."""
    blocks, shares, q, w, k, scale, q_smem, w_smem, k_smem, scale_smem = refs
    q_full, q_empty, k_full, k_empty, _ = barriers
    cta = lax.axis_index("cta")
    count, stages, dim = config.keys, q_smem.shape[0], q_smem.shape[2]

    def block(index, done):
        first, last, before = blocks[index, 0], blocks[index, 1], blocks[index, 2]

        def load_keys(t, done):
            slot = done & (config.k_stages - 1)

            @pl.when(done >= config.k_stages)
            def _reuse():
                plgpu.barrier_wait(k_empty.at[slot])
                plgpu.commit_smem()  # weights and scales were read by ordinary loads

            rows = pl.ds(index * ROWS, ROWS)
            plgpu.copy_gmem_to_smem(w.at[:, rows], w_smem.at[slot], k_full.at[slot])
            for wg in range(config.warpgroups):
                source, target = pl.ds(t * config.tile_keys + wg * count, count), pl.ds(wg * count, count)
                plgpu.copy_gmem_to_smem(k.at[source], k_smem.at[slot, target], k_full.at[slot])
                if scale is not None:
                    plgpu.copy_gmem_to_smem(scale.at[source], scale_smem.at[slot, target], k_full.at[slot])

        def tile(t, done):
            load_keys(t, done)

            def load_head(head, _):
                step = done * heads + head
                slot = step & (stages - 1)

                @pl.when(step >= stages)
                def _reuse():
                    plgpu.barrier_wait(q_empty.at[slot])

                rows = pl.ds(index * ROWS, ROWS)
                plgpu.copy_gmem_to_smem(q.at[rows, pl.ds(head * dim, dim)], q_smem.at[slot], q_full.at[slot])
                return ()

            lax.fori_loop(0, heads, load_head, ())
            return done + 1

        return lax.fori_loop(*_tiles(first, last, before, shares[cta, 0], shares[cta, 1]), tile, done)

    done = lax.fori_loop(shares[cta, 2], shares[cta, 3], block, jnp.int32(0))
    # No barrier may be left with a phase that nobody has seen.
    for barrier, uses in ((k_empty, done), (q_empty, done * heads)):
        for slot in range(barrier.shape[0]):

            @pl.when(uses > slot)
            def _drain(barrier=barrier, slot=slot):
                plgpu.barrier_wait(barrier.at[slot])
