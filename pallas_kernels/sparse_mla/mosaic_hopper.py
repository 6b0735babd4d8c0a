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
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.sparse_mla import device_ops as dev
from pallas_kernels.sparse_mla import feeds, gather, record_reader, softmax
from pallas_kernels.sparse_mla.tile_shape import (
    BLOCK,
    CHUNK,
    CONTROL_WORDS,
    HALF,
    LATENT,
    LISTS_AHEAD,
    ROPE,
    TILE_ROWS,
    Barrier,
    TileShape,
)
from pallas_kernels.sparse_mla.walk import Walk, blocks_of, pair

NO_MAXIMUM = -1e30  # finite, so that a block without valid keys needs no special case


@dataclasses.dataclass(frozen=True)
class Config:
    """Tuning of the kernel.

    Attributes:
      score_registers: Registers a thread of the warpgroup that holds Q.
      output_registers: Registers a thread of the two that hold the output.
      record_registers: Registers a thread of the one that reads records; 0 without it.
      query_columns: Columns of Q held in registers; the rest is read from shared memory.
      scores_first: Whether the tensor cores make the scores of a block before the products of the block before it,
        which then run under the softmax.
      one_rope: Whether rope columns have one slot, free when the scores are made, in place of two that they share
        with the weights. Not for records.
      blocks: Blocks of the persistent grid; one fits a multiprocessor, and the H200 has 132.
    """

    score_registers: int = 184
    output_registers: int = 160
    record_registers: int = 0
    query_columns: int = LATENT - CHUNK
    scores_first: bool = True
    one_rope: bool = False
    blocks: int = 132

    def __post_init__(self):
        total = self.score_registers + 2 * self.output_registers + self.record_registers
        limit = 512 if self.record_registers else 504
        if total > limit:
            raise ValueError(f"the warpgroups take {total} registers a lane, the launch gives {limit}: {self}")
        if self.query_columns % CHUNK or not 0 < self.query_columns < LATENT:
            raise ValueError(f"query_columns must be a multiple of {CHUNK} below {LATENT}: {self}")
        if self.one_rope and (self.record_registers or not self.scores_first):
            raise ValueError(f"one_rope needs scores_first, and rows that are not records: {self}")


RECORDS_CONFIG = Config(score_registers=152, output_registers=160, record_registers=40, query_columns=320)


@dataclasses.dataclass(frozen=True)
class Parts:
    """Inline code of a kernel and its tuning."""

    shape: TileShape
    config: Config
    lists_ahead: Callable
    publish: Callable
    softmax: Callable
    shrink: Callable
    row_factors: Callable
    finish: Callable
    store: Callable

    @property
    def rest(self) -> int:
        """Column chunks of Q in shared memory."""
        return (LATENT - self.config.query_columns) // CHUNK + self.shape.rope

    @property
    def product_columns(self) -> int:
        """Width of a product: a thread of four warpgroups cannot launch with the registers that 256 columns want."""
        return HALF // 2 if self.shape.packed else HALF


def _parts(shape: TileShape, softmax_scale: float, out_dtype: str, config: Config) -> Parts:
    if shape.packed != bool(config.record_registers):
        raise ValueError(f"{shape.packed=} does not fit {config}")
    return Parts(
        shape,
        config,
        lists_ahead=gather.list_reader(shape),
        publish=gather.publisher(shape),
        softmax=softmax.block_step(shape, softmax_scale * math.log2(math.e)),
        shrink=softmax.shrink(HALF // 2 if shape.packed else HALF),
        row_factors=softmax.row_factors(),
        finish=softmax.finish(shape),
        store=softmax.output_store(shape, out_dtype),
    )


def _zeros(shape, layout, value=0.0):
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def _load_queries(parts: Parts, feed: feeds.RopeRing, q_rest, step):
    """The queries of a tile, a step like a block of keys: most columns to registers, the rest to their place."""
    columns = parts.config.query_columns
    slot, _ = feed.walk.ring(step)
    feed.wait_latent(step)
    feed.wait_rope(step)
    load = lambda ref: plgpu.load(ref, layout=plgpu.Layout.WGMMA, optimized=False)  # noqa: E731
    queries = load(feed.ring.at[slot, :, pl.ds(0, columns)])
    for i, column in enumerate(range(columns, LATENT, CHUNK)):
        q_rest[i] = load(feed.ring.at[slot, :, pl.ds(column, CHUNK)])
    if parts.shape.rope:
        q_rest[parts.rest - 1] = load(feed.rope(step))
    dev.fence_shared_writes()
    dev.warpgroup_sync()
    dev.arrive(feed.control, Barrier.P_READY + (step & 1))
    return queries


def _score_product(acc, parts: Parts, feed: feeds.RopeRing, q_rest, queries, step):
    columns = parts.config.query_columns
    slot, _ = feed.walk.ring(step)
    feed.wait_latent(step)
    dev.fence_shared_writes()
    plgpu.wgmma(acc, queries, feed.ring.at[slot, :, 0:columns].T)
    for i, column in enumerate(range(columns, LATENT, CHUNK)):
        plgpu.wgmma(acc, q_rest.at[dev.opaque(i)], feed.ring.at[slot, :, column : column + CHUNK].T)
    feed.wait_rope(step)
    if parts.shape.rope:
        dev.fence_shared_writes()
        plgpu.wgmma(acc, q_rest.at[dev.opaque(parts.rest - 1)], feed.rope(step).T)
    return acc[...]


def _scores(parts: Parts, feed: feeds.RopeRing, q_rest, lse):
    """The warpgroup that holds Q: scores and softmax."""
    plgpu.set_max_registers(parts.config.score_registers, action="increase")
    walk, control = feed.walk, feed.control

    def tile_step(n, step):
        row_tile, part, _ = walk.tile_of(n)
        queries = _load_queries(parts, feed, q_rest, step)

        def block_step(_, carry):
            step, top, total = carry
            scores = pl.run_scoped(
                lambda acc: _score_product(acc, parts, feed, q_rest, queries, step), dev.accumulator(TILE_ROWS, BLOCK)
            )
            dev.warpgroup_sync()  # all warps have read the rope columns
            dev.arrive(control, Barrier.GO + ((step - 1) & 1))
            feed.wait_factors(step)
            p, top, total = parts.softmax(scores, top, total, step, control, feed.ring)
            feed.wait_weights(step)
            feed.ropes[feed.weights(step)] = p.astype(jnp.bfloat16)
            dev.fence_shared_writes()
            dev.arrive(control, Barrier.P_READY + (step & 1))
            return step + 1, top, total

        start = (_zeros((TILE_ROWS,), dev.ROW, NO_MAXIMUM), _zeros((TILE_ROWS,), dev.ROW))
        step, top, total = lax.fori_loop(0, blocks_of(walk.keys_of(n)[1]), block_step, (step + 1, *start))
        dev.arrive(control, Barrier.GO + ((step - 1) & 1))
        feed.wait_last_factors(step)
        parts.finish(top, total, step, control, lse, row_tile, part)
        dev.arrive(control, Barrier.LAST_READY + (n & 1))
        return step

    step = lax.fori_loop(0, walk.trips, tile_step, jnp.int32(0))
    dev.arrive(control, Barrier.P_READY + (step & 1))  # stands for the queries of a tile after the last


@dataclasses.dataclass(frozen=True)
class Lists:
    """The lists, which one warpgroup reads ahead; a cursor is a tile, a block, and where the keys of two tiles are."""

    parts: Parts
    walk: Walk
    lists: Any
    masks: Any
    control: Any

    def read(self, cursor):
        """The key of this thread at the cursor, and the cursor one step on."""
        n, block, start, count, next_start, next_count = cursor
        row_tile, _, listed = self.walk.tile_of(jnp.minimum(n, self.walk.trips - 1))
        active = (n < self.walk.trips).astype(jnp.int32)
        entry = self.parts.lists_ahead(self.lists, self.masks, row_tile, start, listed, count, block, active)
        done = block >= blocks_of(count)
        n = jnp.where(done, n + 1, n)
        start, count = jnp.where(done, next_start, start), jnp.where(done, next_count, count)
        return entry, (n, jnp.where(done, 0, block + 1), start, count, *self.walk.keys_of(n + 1))

    def publish(self, entry, step):
        """An entry to the place of the step that it belongs to."""
        self.parts.publish(entry, step, self.control)

    def start(self):
        """Publish the first steps; the entry and the cursor of the step after them."""
        state = (jnp.int32(0), jnp.int32(0), *self.walk.keys_of(0), *self.walk.keys_of(1))
        entry, state = self.read(state)
        for step in range(LISTS_AHEAD):
            self.publish(entry, jnp.int32(step))
            entry, state = self.read(state)
        dev.arrive(self.control, jnp.int32(Barrier.LISTS_STARTED))
        return entry, *state


def _outputs(parts: Parts, feed: feeds.RopeRing, lists: Lists, out, left: bool):
    """A warpgroup that holds half of the output columns; the right one also moves the lists on."""
    action = "increase" if parts.shape.packed else "decrease"
    plgpu.set_max_registers(parts.config.output_registers, action=action)
    walk, control = feed.walk, feed.control
    width = parts.product_columns
    columns = [pl.ds(column, width) for column in range(0 if left else HALF, HALF if left else LATENT, width)]

    def refill(step, ahead):
        feed.refill(step, left)
        if left:
            return ahead
        entry, state = lists.read(ahead[1:])
        return entry, *state

    def queries_step(step, ahead):
        slot, parity = pair(step)
        dev.wait(control, Barrier.P_READY + slot, parity)  # the queries are in registers
        feed.weights_ready(step, left, None)
        if not left:
            lists.publish(ahead[0], step + LISTS_AHEAD)
        return refill(step, ahead)

    def block_step(i, carry, blocks):
        step, accs, ahead = carry
        slot, _ = walk.ring(step)
        in_pair, parity = pair(step)
        dev.wait(control, Barrier.P_READY + in_pair, parity)
        feed.weights_ready(step, left, i == 0)
        accs = [parts.shrink(acc, step, control) for acc in accs]
        # No proxy fence here: the scores have fenced P and the block, and a fence would wait for the copies
        # that this thread has in flight.
        if parts.config.scores_first:
            dev.wait(control, Barrier.GO + in_pair, parity)
            feed.scores_ready(step, left, i == blocks - 1)

        def product(refs):
            for ref, some in zip(refs, columns, strict=True):
                plgpu.wgmma(ref, feed.ropes.at[feed.weights(step)], feed.ring.at[slot, :, some])
            if not left:
                lists.publish(ahead[0], step + LISTS_AHEAD)

        accs = pl.run_state(product)(tuple(dev.accumulate_on(acc) for acc in accs))
        return step + 1, accs, refill(step, ahead)

    def tile_step(n, carry):
        step, ahead = carry
        row_tile, part, _ = walk.tile_of(n)
        zeros = tuple(_zeros((TILE_ROWS, width), dev.ACCUMULATOR) for _ in columns)
        blocks = blocks_of(walk.keys_of(n)[1])
        body = functools.partial(block_step, blocks=blocks)
        last, accs, ahead = lax.fori_loop(0, blocks, body, (step + 1, zeros, ahead))
        in_pair, parity = pair(n)
        dev.wait(control, Barrier.LAST_READY + in_pair, parity)
        factors = parts.row_factors(last, control)
        ahead = queries_step(last, ahead)  # keeps the gather of the next tile going during the store
        for acc, some in zip(accs, columns, strict=True):
            parts.store(acc, factors, out, row_tile, part, jnp.int32(some.start))
        return last, ahead

    ahead = () if left else lists.start()
    dev.wait(control, jnp.int32(Barrier.LISTS_STARTED), jnp.int32(0))
    feed.start(left)
    lax.fori_loop(0, walk.trips, tile_step, (jnp.int32(0), queries_step(jnp.int32(0), ahead)))
    feed.finish()


@functools.lru_cache(maxsize=64)
def build(shape: TileShape, softmax_scale: float, out_dtype: str, config: Config):
    """The kernel `(kv, lists, masks, counts, q) -> (out, lse)` for these sizes.

    Args:
      shape: Static sizes.
      softmax_scale: Factor on the logits, positive.
      out_dtype: "bfloat16" or "float32".
      config: Tuning.

    Returns:
      A function of kv [N, width] bf16 or [N, record bytes] uint8, lists [lists * length] int32, masks [lists * length]
      int8 (one bit for each token of the group; any array if not masked), counts [lists] int32 and q [T * H, width]
      bf16. It returns the outputs [splits * T * H, 512] and their natural log-sum-exp [splits * T * H].
    """
    parts = _parts(shape, softmax_scale, out_dtype, config)
    grid = min(config.blocks, shape.tiles)
    init = dev.init_barriers(Barrier.arrivals())
    make_feed = feeds.Records if shape.packed else feeds.OneRope if config.one_rope else feeds.RopeRing

    def body(kv, lists, masks, counts, q, out, lse, ring, ropes, q_rest, control, *raw):
        wg = lax.axis_index("wg")
        walk = Walk.of(shape, grid, lax.axis_index("block"), counts)
        feed = make_feed(walk, kv, q, ring, ropes, control)
        all_lists = Lists(parts, walk, lists, masks, control)
        pl.when(wg == 0)(lambda: init(control))
        dev.block_sync()
        pl.when(wg == 0)(lambda: _scores(parts, feed, q_rest, lse))
        pl.when(wg == 1)(lambda: _outputs(parts, feed, all_lists, out, True))
        pl.when(wg == 2)(lambda: _outputs(parts, feed, all_lists, out, False))
        if shape.packed:
            registers = config.record_registers
            pl.when(wg == 3)(lambda: record_reader.run(walk, registers, kv, q, ring, ropes, raw[0], control))

    rows = shape.splits * shape.queries
    return plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((rows, LATENT), jnp.dtype(out_dtype)),
            jax.ShapeDtypeStruct((rows,), jnp.float32),
        ],
        grid=(grid,),
        grid_names=("block",),
        num_threads=4 if shape.packed else 3,
        thread_name="wg",
        scratch_types=[
            plgpu.SMEM((shape.slots, BLOCK, LATENT), jnp.bfloat16, transforms=dev.TILED),
            plgpu.SMEM((2, BLOCK, ROPE), jnp.bfloat16, transforms=dev.TILED),
            plgpu.SMEM((parts.rest, TILE_ROWS, CHUNK), jnp.bfloat16, transforms=dev.TILED),
            plgpu.SMEM((CONTROL_WORDS,), jnp.int32),
            *([plgpu.SMEM((record_reader.RAW_WORDS,), jnp.int32)] if shape.packed else []),
        ],
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=0,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )
