"""Exact top-k for Hopper from scores whose producer also kept the highest of every 16: a third of the bytes.

Let tau be the k-th highest of the block maxima of a row, ties to the lower block. Each of the k best blocks holds a
score of at least tau, and a score that is outside them loses to one of each: to the maximum of a block that is higher,
or to an equal one further left. So the winners lie in those k blocks, exactly and whatever the ties. A row therefore
takes two streams: its maxima, a sixteenth of its bytes, and then the k best blocks in ascending order.
"""

import dataclasses
import functools

import jax

from pallas_kernels.topk import mosaic_emit as em
from pallas_kernels.topk import mosaic_hopper, mosaic_select
from pallas_kernels.topk.mosaic_emit import Array, Int
from pallas_kernels.topk.mosaic_rows import Rows, make_block
from pallas_kernels.topk.mosaic_select import PER_THREAD, VECTOR
from pallas_kernels.topk.mosaic_stream import Row, RowSource, StreamingBlock

BLOCK = PER_THREAD  # columns under one maximum
_NO_BLOCK = 1 << 25  # its columns lie behind every row


def why_not(columns: int, k: int) -> str | None:
    """Why the kernel cannot run the call, or None."""
    if columns % VECTOR:
        return f"{columns} columns are not a multiple of {VECTOR}"
    return mosaic_hopper.why_not(columns, k)


class BlockSource:
    """The columns of listed blocks in turn, all brought at once."""

    turns = 0

    def __init__(self, block: StreamingBlock, row: Row, blocks: Array, offset: Int):
        """`offset` is the id of the first column of block 0 of the list's count."""
        self.block, self.row, self.blocks, self.offset = block, row, blocks, offset
        self.steps = em.constant(-(-block.layout.k // block.layout.threads))

    def first_column(self, step: Int) -> Int:
        """Id of this thread's first column of a step."""
        return self.blocks.load(step * self.block.layout.threads + self.block.thread) * BLOCK + self.offset

    def wait(self, step: Int, turn: Int) -> Array:
        """Where the step lies in shared memory."""
        del turn
        return self.block.shared.ring.data.shifted(step * self.block.layout.step)

    def release(self, step: Int, turn: Int) -> None:
        """Nothing more to bring."""

    def bring(self, scores: Array, begin: Int) -> None:
        """Copy every block; `begin` is the column of `scores`, a whole row, that id 0 stands for."""
        layout, ring = self.block.layout, self.block.shared.ring
        for i in range(-(-layout.k // layout.threads)):
            column = begin + self.first_column(em.constant(i))
            for u in range(0, BLOCK, VECTOR):
                at = self.block.thread * BLOCK + (i * layout.step + u)
                # What lies behind the row is in no range, but must not be read behind the array.
                em.copy16(ring.data, at, scores, (column + u).min(layout.columns - VECTOR))
        em.wait_copies()


class BlockRows(Rows):
    """Emits the walk of a block over rows that have block maxima."""

    def __init__(self, rows, stride, block, arrays, maxima: Array, blocks: Array):
        super().__init__(rows, stride, block, *arrays)
        self.maxima, self.blocks = maxima, blocks

    def block_range(self, first: Int, length: Int) -> list[Int]:
        """First block of a row's range and number of blocks."""
        begin = first >> 4
        return [begin, ((first + length + (BLOCK - 1)) >> 4) - begin]

    def streamed(self, index: Int, first: Int, length: Int) -> Row:
        """What to stream first: the maxima of the row, or its scores where it has at most k blocks."""
        begin, count = self.block_range(first, length)
        width = -(-self.layout.columns // BLOCK)
        at = em.Wide.of(index) * width + em.Wide.of(begin)
        skew = at.low() & (VECTOR - 1)
        maxima = self.maxima.shifted(at - em.Wide.of(skew))
        row = self.row(index, first, length)
        by_block = count > self.layout.k
        return Row(
            em.choose_array(by_block, maxima, row.data),
            by_block.choose(skew, row.skew),
            by_block.choose(count, length),
        )

    def collect(self, index: Int, first: Int, length: Int, gate: Int, turn: Int, histogram: Int) -> list[Int]:
        """Candidates of a row from its maxima; see `StreamingBlock.collect`."""
        block, layout = self.block, self.layout
        row = self.row(index, first, length)
        begin, blocks = self.block_range(first, length)
        state = block.collect(RowSource(block, self.streamed(index, first, length)), gate, turn, histogram)

        def whole_row(turn, histogram):
            """Where fewer than k blocks hold a number, NaN may win, of which maxima say nothing."""
            source = RowSource(block, row)
            source.prime(turn)
            return block.collect(source, em.constant(0), turn, histogram)

        def best_blocks(low, turn, histogram):
            source = BlockSource(block, row, self.blocks, (begin << 4) - first)
            source.bring(self.scores.shifted(em.Wide.of(index) * layout.columns), first)
            count, gate, _, histogram = block.stream(source, low, turn, histogram)
            em.before_bulk_copies()
            block.barrier()
            return [count, gate, turn, histogram]

        def by_block():
            count, gate, turn, histogram = state
            low, _, histogram = block.cut(count, gate, histogram, layout.entries)
            block.barrier()
            self.list_blocks()
            block.barrier()
            return em.branch(
                low.ugt(mosaic_select.LOWEST_KEY),
                state,
                lambda: best_blocks(low, turn, histogram),
                lambda: whole_row(turn, histogram),
            )

        return em.branch(blocks > layout.k, state, by_block, lambda: state)

    def list_blocks(self) -> None:
        """Take the k best blocks out of the buffer, which the candidates need."""
        layout, block = self.layout, self.block
        for i in range(-(-layout.k // layout.threads)):
            place = block.thread + i * layout.threads
            found = block.shared.ids.load(block.at(place))
            self.blocks.store(place, (place < layout.k).choose(found, _NO_BLOCK))


def _body(rows: int, blocks: int, layout: mosaic_select.Layout, with_scores: bool):
    """The function that emits the kernel."""

    def emit(ctx, *refs):
        del ctx
        *arrays, index = refs
        scores, maxima, starts, ends, ids_out, *rest = map(em.Array.of, arrays)
        scores_out = rest.pop(0) if with_scores else None
        block = make_block(layout, rest[:-1])
        block.initialise()
        walk = BlockRows(rows, blocks, block, (scores, starts, ends, ids_out, scores_out), maxima, rest[-1])
        walk.run(em.Int(index.registers.flat[0]))

    return emit


@functools.lru_cache
def _build(rows: int, blocks: int, layout: mosaic_select.Layout, with_scores: bool):
    listed = -(-layout.k // layout.threads) * layout.threads
    return mosaic_hopper.build_kernel(
        rows, blocks, layout, with_scores, _body(rows, blocks, layout, with_scores), inputs=4, more_shared=(listed,)
    )


def topk(
    scores: jax.Array,
    block_max: jax.Array,
    k: int,
    key_start: jax.Array,
    key_end: jax.Array,
    *,
    return_scores: bool = False,
    config: mosaic_hopper.TopkConfig | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Like `topk`, from scores and their block maxima.

    Args:
      scores: [T, S] float32, S a multiple of 4.
      block_max: Highest score of each 16 columns from column 0 on, of those in the row's range and not NaN, -inf where
        there is none [T, ceil(S / 16)] float32. Blocks that no column of the range is in never matter.
      k: How many columns to keep.
      key_start: First column of each row's range [T] int32.
      key_end: One past the last [T] int32.
      return_scores: Whether to return the scores of the selected columns too.
      config: Tuning.

    Returns:
      See `pallas_kernels.topk.api.topk`; valid ids are ascending.
    """
    rows, columns = scores.shape
    config = config or mosaic_hopper.default_config(columns)
    threads = 128 * config.warpgroups
    places = max(config.places, -(-k // threads))  # all blocks are under way at once
    layout = mosaic_hopper.make_layout(dataclasses.replace(config, places=places), columns, k, 1)
    out = _build(rows, min(rows, config.blocks), layout, return_scores)(scores, block_max, key_start, key_end)
    out = [x.reshape(rows, k) for x in out]
    return (out[0], out[1]) if return_scores else out[0]
