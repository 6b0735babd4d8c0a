"""The schedule of `mosaic_hopper` in plain Pallas, for the Mosaic interpreter, which knows no inline code.

One tile a block of the grid, queries in shared memory, and a copy for each row in place of cp.async; the roles of the
warpgroups, the rings, the order of the tensor core work and every barrier between them are those of the fast kernel, so
that race detection and deadlocks are tested on a CPU. Not for speed.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.sparse_mla import device_ops as dev
from pallas_kernels.sparse_mla.mosaic_hopper import NO_MAXIMUM
from pallas_kernels.sparse_mla.tile_shape import BLOCK, ROPE, TILE_ROWS

SLOTS = 3  # blocks of latent columns in flight


@functools.lru_cache(maxsize=16)
def build(tiles: int, blocks: int, heads: int, latent: int, softmax_scale: float, interpret):
    """The kernel `(kv, ids, members, q) -> (out, lse)` of `tiles` tiles with `blocks` blocks of 64 keys each.

    Args:
      tiles: Tiles of 64 rows of queries.
      blocks: Blocks of 64 entries of every tile's list.
      heads: Heads of a token; a tile holds 64 / heads tokens.
      latent: Value columns, a multiple of 128; rows have 64 more of rope.
      softmax_scale: Factor on the logits.
      interpret: `plgpu.InterpretGPUParams`, or False for a GPU.

    Returns:
      A function of kv [N, latent + 64] bf16 whose last row is zeros, ids [tiles, blocks * 64] int32 of rows of kv
      where the last row stands for none, members [tiles, blocks * 64] int32 with bit i set if token i of the tile has
      selected the key, and q [tiles * 64, latent + 64] bf16. It returns [tiles * 64, latent] bf16 and [tiles * 64]
      float32.
    """
    half = latent // 2

    def body(kv, ids, members, q, out, lse, ring, ropes, q_smem, factors, staged, *barriers):
        left_full, right_full, rope_full, q_full, p_ready, go, right_done, last_ready = barriers
        wg, tile = lax.axis_index("wg"), lax.axis_index("tile")
        rows = pl.ds(tile * TILE_ROWS, TILE_ROWS)

        def copy(block, first, columns, target, barrier):
            """Gather some columns of the rows of a block; every row arrives once."""
            for r in range(BLOCK):
                source = kv.at[ids[tile, block * BLOCK + r], pl.ds(first, columns)]
                plgpu.copy_gmem_to_smem(source, target.at[r], barrier)

        def copy_left(block):
            copy(block, 0, half, ring.at[block % SLOTS, :, pl.ds(0, half)], left_full.at[block % SLOTS])

        def copy_right(block):
            copy(block, half, half, ring.at[block % SLOTS, :, pl.ds(half, half)], right_full.at[block % SLOTS])

        def copy_rope(block):
            copy(block, latent, ROPE, ropes.at[block % 2], rope_full.at[block % 2])

        @pl.when(wg == 0)
        def _scores():
            plgpu.copy_gmem_to_smem(q.at[rows], q_smem, q_full)
            plgpu.barrier_wait(q_full)
            top = jnp.full((TILE_ROWS,), NO_MAXIMUM, jnp.float32)
            total = jnp.zeros((TILE_ROWS,), jnp.float32)
            token = lax.broadcasted_iota(jnp.int32, (TILE_ROWS, BLOCK), 0) // heads
            for i in range(blocks):
                plgpu.barrier_wait(left_full.at[i % SLOTS])
                plgpu.barrier_wait(right_full.at[i % SLOTS])
                plgpu.barrier_wait(rope_full.at[i % 2])

                def product(acc, i=i):
                    plgpu.wgmma(acc, q_smem.at[:, pl.ds(0, latent)], ring.at[i % SLOTS].T)
                    plgpu.wgmma(acc, q_smem.at[:, pl.ds(latent, ROPE)], ropes.at[i % 2].T)
                    return acc[...]

                scores = pl.run_scoped(product, dev.accumulator(TILE_ROWS, BLOCK))
                if i:
                    plgpu.barrier_arrive(go.at[(i - 1) % 2])
                bits = members[tile, pl.ds(i * BLOCK, BLOCK)]
                has = (lax.broadcast_in_dim(bits, (TILE_ROWS, BLOCK), [1]) >> token) & 1
                scores = jnp.where(has == 1, scores * softmax_scale, -jnp.inf)
                after = jnp.maximum(top, scores.max(axis=1))
                p = jnp.exp(scores - lax.broadcast_in_dim(after, (TILE_ROWS, BLOCK), [0]))
                decay = jnp.exp(top - after)
                total = total * decay + p.sum(axis=1)
                top = after
                factors[i % 2] = decay
                ropes[i % 2] = p.astype(jnp.bfloat16)
                plgpu.commit_smem()
                plgpu.barrier_arrive(p_ready.at[i % 2])
            plgpu.barrier_arrive(go.at[(blocks - 1) % 2])
            empty = total == 0
            safe = jnp.where(empty, 1.0, total)
            factors[2] = jnp.where(empty, 0.0, 1.0 / safe)
            lse[rows] = jnp.where(empty, -jnp.inf, top + jnp.log(safe))
            plgpu.commit_smem()
            plgpu.barrier_arrive(last_ready)

        def outputs(left):
            side = 0 if left else half
            for block in range(min(SLOTS, blocks)):
                (copy_left if left else copy_right)(block)
            if left:
                for block in range(min(2, blocks)):
                    copy_rope(block)
            acc = jnp.zeros((TILE_ROWS, half), jnp.float32)
            for i in range(blocks):
                plgpu.barrier_wait(p_ready.at[i % 2])
                acc = acc * lax.broadcast_in_dim(factors[i % 2], (TILE_ROWS, half), [0])
                plgpu.barrier_wait(go.at[i % 2])

                def product(ref, i=i):
                    plgpu.wgmma(ref, ropes.at[i % 2], ring.at[i % SLOTS, :, pl.ds(side, half)])
                    return ref[...]

                acc = acc + pl.run_scoped(product, dev.accumulator(TILE_ROWS, half))
                if left:
                    plgpu.barrier_wait(right_done.at[i % 2])
                    if i + 2 < blocks:
                        copy_rope(i + 2)
                    if i + SLOTS < blocks:
                        copy_left(i + SLOTS)
                else:
                    plgpu.barrier_arrive(right_done.at[i % 2])
                    if i + SLOTS < blocks:
                        copy_right(i + SLOTS)
            plgpu.barrier_wait(last_ready)
            inverse = lax.broadcast_in_dim(factors[2], (TILE_ROWS, half), [0])
            staged[:, pl.ds(side, half)] = (acc * inverse).astype(jnp.bfloat16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(staged.at[:, pl.ds(side, half)], out.at[rows, pl.ds(side, half)])
            plgpu.wait_smem_to_gmem(0)

        pl.when(wg == 1)(lambda: outputs(True))
        pl.when(wg == 2)(lambda: outputs(False))

    ring_barrier = functools.partial(plgpu.Barrier, num_arrivals=BLOCK)
    return plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((tiles * TILE_ROWS, latent), jnp.bfloat16),
            jax.ShapeDtypeStruct((tiles * TILE_ROWS,), jnp.float32),
        ],
        grid=(tiles,),
        grid_names=("tile",),
        num_threads=3,
        thread_name="wg",
        interpret=interpret,
        scratch_types=[
            plgpu.SMEM((SLOTS, BLOCK, latent), jnp.bfloat16, transforms=dev.TILED),
            plgpu.SMEM((2, BLOCK, ROPE), jnp.bfloat16, transforms=dev.TILED),
            plgpu.SMEM((TILE_ROWS, latent + ROPE), jnp.bfloat16, transforms=dev.TILED),
            plgpu.SMEM((3, TILE_ROWS), jnp.float32),
            plgpu.SMEM((TILE_ROWS, latent), jnp.bfloat16),
            ring_barrier(num_barriers=SLOTS),
            ring_barrier(num_barriers=SLOTS),
            ring_barrier(num_barriers=2),
            plgpu.Barrier(),
            plgpu.Barrier(num_barriers=2),
            plgpu.Barrier(num_barriers=2),
            plgpu.Barrier(num_barriers=2),
            plgpu.Barrier(),
        ],
    )
