"""Sparse MLA on Hopper: one persistent Mosaic kernel for every number of heads.

A tile is 64 rows of queries (the heads of one row, or of several neighbouring rows that share a list) against one
list of keys. FlashMLA's sm90 schedule keeps Q and two blocks of 64 keys in shared memory, so that the gather waits for
the tensor cores and the tensor cores for the gather. Here most of Q lives in the registers of one warpgroup, which
leaves room for a third block of keys:

    warpgroup 0  S = Q K^T (A from registers), softmax, P over the rope columns of the block it came from
    warpgroup 1  O[:, :256] += P V; gathers the left latent columns and the rope of later blocks
    warpgroup 2  O[:, 256:] += P V; gathers the right latent columns, and reads the lists ahead

Everything a block of the grid does is one sequence of steps: for each tile its queries, which are gathered like a block
of keys, then its blocks of keys. The gather of latent columns runs 3 steps ahead, that of the rope columns 2, the lists
5, across tiles, so no tile starts or ends cold. The grid is one block a multiprocessor.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.sparse_mla import device_ops as dev
from pallas_kernels.sparse_mla import gather, softmax
from pallas_kernels.sparse_mla.tile_shape import (
    BLOCK,
    CONTROL_WORDS,
    HALF,
    IN_REGISTERS,
    LATENT,
    LISTS_AHEAD,
    ROPE,
    SLOTS,
    TILE_ROWS,
    WIDTH,
    Barrier,
    TileShape,
)

NO_MAXIMUM = -1e30  # finite, so that a block without valid keys needs no special case


@dataclasses.dataclass(frozen=True)
class Config:
    """Tuning of the kernel.

    Attributes:
      score_registers: Registers a thread of the warpgroup that holds Q.
      output_registers: Registers a thread of the two that hold the output.
      scores_first: Whether the tensor cores make the scores of a block before the products of the block before it,
        which then run under the softmax.
      blocks: Blocks of the persistent grid; one fits a multiprocessor, and the H200 has 132.
    """

    score_registers: int = 184
    output_registers: int = 160
    scores_first: bool = True
    blocks: int = 132

    def __post_init__(self):
        total = self.score_registers + 2 * self.output_registers
        if total > 504:
            raise ValueError(f"the warpgroups take {total} registers a lane, the launch gives 3 * 168: {self}")


def _zeros(shape, layout, value=0.0):
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def _ring(step):
    """Slot of a step in the ring of 3 and the parity of its use."""
    turn = lax.div(step, SLOTS)
    return step - SLOTS * turn, turn & 1


def _pair(step):
    """Slot of a step in the rings of 2 and the parity of its use."""
    return step & 1, (step >> 1) & 1


@functools.lru_cache(maxsize=64)
def build(shape: TileShape, softmax_scale: float, out_dtype: str, config: Config):
    """The kernel `(kv, lists, masks, counts, q) -> (out, lse)` for these sizes.

    Args:
      shape: Static sizes.
      softmax_scale: Factor on the logits, positive.
      out_dtype: "bfloat16" or "float32".
      config: Tuning.

    Returns:
      A function of kv [N, width] bf16, lists [lists * length] int32, masks [lists * length] int8 (one bit for each
      token of the group; any array if not masked), counts [lists] int32 and q [T * H, width] bf16. It returns the
      outputs [splits * T * H, 512] and their natural log-sum-exp [splits * T * H].
    """
    rope = shape.width == WIDTH
    grid = min(config.blocks, shape.tiles)
    copies = gather.row_copies(shape)
    lists_ahead = gather.list_reader(shape)
    publish = gather.publisher(shape)
    step_softmax = softmax.block_step(shape, softmax_scale * math.log2(math.e))
    shrink = softmax.shrink(HALF)
    read_factors = softmax.row_factors()
    finish_softmax = softmax.finish(shape)
    store_output = softmax.output_store(shape, out_dtype)
    init = dev.init_barriers(Barrier.arrivals())

    def body(kv, lists, masks, counts, q, out, lse, ring, ropes, q_rest, control):
        wg = lax.axis_index("wg")
        first = lax.axis_index("block")
        trips = (shape.tiles - 1 - first) // grid + 1

        pl.when(wg == 0)(lambda: init(control))
        dev.block_sync()

        def tile_of(n):
            tile = first + n * grid
            row_tile = lax.div(tile, shape.splits)
            return row_tile, lax.rem(tile, shape.splits), lax.div(row_tile, shape.tiles_per_list)

        def blocks_of(count):
            return lax.div(count + BLOCK - 1, BLOCK)

        def keys_of(n):
            """Where the n-th tile's part of its list starts, and how many keys it has."""
            _, part, listed = tile_of(jnp.minimum(n, trips - 1))
            whole = counts[listed]
            size = lax.div(blocks_of(whole) + shape.splits - 1, shape.splits) * BLOCK
            return part * size, jnp.clip(whole - part * size, 0, size)

        @pl.when(wg == 0)
        def _scores():
            plgpu.set_max_registers(config.score_registers, action="increase")

            def load_queries(step):
                slot, parity = _ring(step)
                pair, pair_parity = _pair(step)
                dev.wait(control, Barrier.LEFT + slot, parity)
                dev.wait(control, Barrier.RIGHT + slot, parity)
                dev.wait(control, Barrier.ROPE + pair, pair_parity)
                load = lambda ref: plgpu.load(ref, layout=plgpu.Layout.WGMMA, optimized=False)  # noqa: E731
                queries = load(ring.at[slot, :, pl.ds(0, IN_REGISTERS)])
                q_rest[0] = load(ring.at[slot, :, pl.ds(IN_REGISTERS, LATENT - IN_REGISTERS)])
                if rope:
                    q_rest[1] = load(ropes.at[pair])
                dev.fence_shared_writes()
                dev.warpgroup_sync()
                dev.arrive(control, Barrier.P_READY + pair)
                return queries

            def product(acc, step, queries):
                slot, parity = _ring(step)
                pair, pair_parity = _pair(step)
                dev.wait(control, Barrier.LEFT + slot, parity)
                dev.wait(control, Barrier.RIGHT + slot, parity)
                dev.fence_shared_writes()
                plgpu.wgmma(acc, queries, ring.at[slot, :, 0:IN_REGISTERS].T)
                plgpu.wgmma(acc, q_rest.at[dev.opaque(0)], ring.at[slot, :, IN_REGISTERS:LATENT].T)
                dev.wait(control, Barrier.ROPE + pair, pair_parity)
                if rope:
                    dev.fence_shared_writes()
                    plgpu.wgmma(acc, q_rest.at[dev.opaque(1)], ropes.at[pair].T)
                return acc[...]

            def tile_step(n, step):
                row_tile, part, _ = tile_of(n)
                queries = load_queries(step)

                def block_step(_, carry):
                    step, top, total = carry
                    scores = pl.run_scoped(lambda acc: product(acc, step, queries), dev.accumulator(TILE_ROWS, BLOCK))
                    dev.warpgroup_sync()  # P goes over the rope columns that the other warps have just read
                    dev.arrive(control, Barrier.GO + ((step - 1) & 1))
                    p, top, total = step_softmax(scores, top, total, step, control, ring)
                    pair, _ = _pair(step)
                    ropes[pair] = p.astype(jnp.bfloat16)
                    dev.fence_shared_writes()
                    dev.arrive(control, Barrier.P_READY + pair)
                    return step + 1, top, total

                start = (_zeros((TILE_ROWS,), dev.ROW, NO_MAXIMUM), _zeros((TILE_ROWS,), dev.ROW))
                step, top, total = lax.fori_loop(0, blocks_of(keys_of(n)[1]), block_step, (step + 1, *start))
                dev.arrive(control, Barrier.GO + ((step - 1) & 1))
                pair, parity = _pair(step)
                dev.wait(control, Barrier.ROPE + pair, parity)  # the factors of two steps before have been read
                finish_softmax(top, total, step, control, lse, row_tile, part)
                dev.arrive(control, jnp.int32(Barrier.LAST_READY))
                return step

            step = lax.fori_loop(0, trips, tile_step, jnp.int32(0))
            dev.arrive(control, Barrier.P_READY + (step & 1))  # stands for the queries of a tile after the last

        def outputs(left):
            """A warpgroup that holds half of the output columns and gathers for later steps."""
            plgpu.set_max_registers(config.output_registers, action="decrease")
            columns = pl.ds(0 if left else HALF, HALF)

            def read_list(cursor):
                """The key of this thread at the cursor, and the cursor one step on."""
                n, block, start, count, next_start, next_count = cursor
                row_tile, _, listed = tile_of(jnp.minimum(n, trips - 1))
                active = (n < trips).astype(jnp.int32)
                entry = lists_ahead(lists, masks, row_tile, start, listed, count, block, active)
                done = block >= blocks_of(count)
                n = jnp.where(done, n + 1, n)
                start, count = jnp.where(done, next_start, start), jnp.where(done, next_count, count)
                return entry, (n, jnp.where(done, 0, block + 1), start, count, *keys_of(n + 1))

            def prologue():
                state = (jnp.int32(0), jnp.int32(0), *keys_of(0), *keys_of(1))
                entry = None
                if not left:
                    entry, state = read_list(state)
                    for step in range(LISTS_AHEAD):
                        publish(entry, jnp.int32(step), control)
                        entry, state = read_list(state)
                    dev.arrive(control, jnp.int32(Barrier.LISTS_STARTED))
                dev.wait(control, jnp.int32(Barrier.LISTS_STARTED), jnp.int32(0))

                def fill(step, _):
                    (copies.left if left else copies.right)(kv, q, step, ring, control)
                    return ()

                lax.fori_loop(0, SLOTS, fill, ())
                if left:
                    copies.rope(kv, q, jnp.int32(0), ropes, control)
                    copies.rope(kv, q, jnp.int32(1), ropes, control)
                return () if left else (entry, *state)

            def refill(step, ahead):
                """After step: gather into what it freed. The right side also moves the lists on."""
                dev.warpgroup_sync()  # all warps have read the slot
                if left:
                    pair, parity = _pair(step)
                    dev.wait(control, Barrier.RIGHT_DONE + pair, parity)
                    copies.rope(kv, q, step + 2, ropes, control)
                    copies.left(kv, q, step + SLOTS, ring, control)
                    return ahead
                dev.arrive(control, Barrier.RIGHT_DONE + (step & 1))
                copies.right(kv, q, step + SLOTS, ring, control)
                entry, state = read_list(ahead[1:])
                return entry, *state

            def queries_step(step, ahead):
                pair, parity = _pair(step)
                dev.wait(control, Barrier.P_READY + pair, parity)  # the queries are in registers
                if not left:
                    publish(ahead[0], step + LISTS_AHEAD, control)
                return refill(step, ahead)

            def block_step(_, carry):
                step, acc, ahead = carry
                slot, _ = _ring(step)
                pair, parity = _pair(step)
                dev.wait(control, Barrier.P_READY + pair, parity)
                acc = shrink(acc, step, control)
                # No proxy fence here: the scores have fenced P and the block, and a fence would wait for the copies
                # that this thread has in flight.
                if config.scores_first:
                    dev.wait(control, Barrier.GO + pair, parity)

                def product(ref):
                    plgpu.wgmma(ref, ropes.at[pair], ring.at[slot, :, columns])
                    if not left:
                        publish(ahead[0], step + LISTS_AHEAD, control)

                acc = pl.run_state(product)(dev.accumulate_on(acc))
                return step + 1, acc, refill(step, ahead)

            def tile_step(n, carry):
                step, ahead = carry
                row_tile, part, _ = tile_of(n)
                zeros = _zeros((TILE_ROWS, HALF), dev.ACCUMULATOR)
                blocks = blocks_of(keys_of(n)[1])
                last, acc, ahead = lax.fori_loop(0, blocks, block_step, (step + 1, zeros, ahead))
                dev.wait(control, jnp.int32(Barrier.LAST_READY), n & 1)
                factors = read_factors(last, control)
                ahead = queries_step(last, ahead)  # keeps the gather of the next tile going during the store
                store_output(acc, factors, out, row_tile, part, jnp.int32(0 if left else HALF))
                return last, ahead

            lax.fori_loop(0, trips, tile_step, (jnp.int32(0), queries_step(jnp.int32(0), prologue())))
            gather.drain()

        pl.when(wg == 1)(lambda: outputs(True))
        pl.when(wg == 2)(lambda: outputs(False))

    rows = shape.splits * shape.queries
    return plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((rows, LATENT), jnp.dtype(out_dtype)),
            jax.ShapeDtypeStruct((rows,), jnp.float32),
        ],
        grid=(grid,),
        grid_names=("block",),
        num_threads=3,
        thread_name="wg",
        scratch_types=[
            plgpu.SMEM((SLOTS, BLOCK, LATENT), jnp.bfloat16, transforms=dev.TILED),
            plgpu.SMEM((2, BLOCK, ROPE), jnp.bfloat16, transforms=dev.TILED),
            plgpu.SMEM((2, TILE_ROWS, ROPE), jnp.bfloat16, transforms=dev.TILED),
            plgpu.SMEM((CONTROL_WORDS,), jnp.int32),
        ],
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=0,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )
