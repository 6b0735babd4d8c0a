"""Exact top-k for Hopper: one pass over each row by a team of warps; few long rows are cut into slices."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.topk import mosaic_emit as em
from pallas_kernels.topk import mosaic_select as select
from pallas_kernels.topk.mosaic_stream import Row, RowSource, StreamingTeam

MAX_K = 2048


@dataclasses.dataclass(frozen=True)
class TopkConfig:
    """Tuning of the kernel.

    Attributes:
      teams: Teams of a block, 1 or 2; each works on its own rows.
      warpgroups: Warpgroups of a team, 128 threads each.
      places: Steps of the row that are on their way into shared memory at once.
      sample_vectors: 16-byte pieces a thread samples for the first gate; 0 starts without one.
      target_share: Where between k and the buffer's size the expected number of passing columns lies.
      blocks: Blocks of the grid, one for each SM of the GPU.
    """

    teams: int = 1
    warpgroups: int = 4
    places: int = 4
    sample_vectors: int = 1
    target_share: float = 0.23
    blocks: int = 132

    def __post_init__(self):
        if self.warpgroups not in (1, 2, 4, 8):
            raise ValueError(f"warpgroups must be 1, 2, 4 or 8, got {self.warpgroups}")
        if self.teams not in (1, 2):
            raise ValueError(f"teams must be 1 or 2, got {self.teams}")
        if self.places < 2:
            raise ValueError(f"places must be at least 2, got {self.places}")
        if not 0 < self.target_share < 1:
            raise ValueError(f"target_share must be between 0 and 1, got {self.target_share}")


def default_config(columns: int) -> TopkConfig:
    """The configuration that was fastest on an H200; see docs/kernels_topk.md."""
    return TopkConfig(sample_vectors=1 if columns <= 1 << 18 else 4)


def why_not(columns: int, k: int) -> str | None:
    """Why the kernel cannot run the call, or None."""
    if k > MAX_K:
        return f"{k=} is above {MAX_K}"
    if columns >= 1 << 30:
        return f"{columns} columns do not fit its 32-bit ids"
    return None


def _layout(config: TopkConfig, columns: int, k: int, slices: int) -> select.Layout:
    layout = select.Layout(
        k, columns, slices, config.teams, 4 * config.warpgroups, config.places, config.sample_vectors, 0
    )
    target = k + int(config.target_share * (layout.capacity - k))
    return dataclasses.replace(layout, sample_target=target)


class _Rows:
    """Emits the walk of one team over its rows: every `stride`-th, the copies of the next one under way early."""

    def __init__(self, rows: int, stride: int, team: StreamingTeam, scores, starts, ends, ids_out, scores_out):
        self.rows, self.stride, self.team, self.layout = rows, stride, team, team.layout
        self.scores, self.starts, self.ends = scores, starts, ends
        self.ids_out, self.scores_out = ids_out, scores_out

    def bounds(self, index: em.Int) -> list[em.Int]:
        """First column and length of a row, and what to add to a column relative to the first to get its id."""
        index = index.min(self.rows - 1)
        start, end = self.starts.load(index), self.ends.load(index)
        first = start.max(0)
        return [first, end.min(self.layout.columns) - first, first - start]

    def row(self, index: em.Int, first: em.Int, length: em.Int) -> Row:
        """The row with these bounds."""
        begin = em.Wide.of(index.udiv(self.layout.slices)) * self.layout.columns + em.Wide.of(first)
        skew = begin.low() & (select.VECTOR - 1)
        return Row(self.scores.shifted(begin - em.Wide.of(skew)), skew, length)

    def outputs(self, index: em.Int):
        """Where the ids and the scores of a row go."""
        at = em.Wide.of(index) * self.layout.k
        return self.ids_out.shifted(at), self.scores_out and self.scores_out.shifted(at)

    def write_short(self, index: em.Int, first: em.Int, length: em.Int, shift: em.Int) -> None:
        """A row of at most k columns: all of them, without looking at the scores."""
        ids_out, scores_out = self.outputs(index)
        row = self.row(index, first, length)

        def write(i):
            inside = i < length
            ids_out.store(i, inside.choose(i + shift, em.constant(-1)))
            if scores_out is not None:
                scores_out.store(i, em.float_from_bits(em.constant(0xFF800000)))
                with em.when(inside):
                    scores_out.store(i, row.data.load(row.skew + i))

        em.strided(self.team.thread, self.layout.k, self.layout.threads, write)

    def next_long(self, index: em.Int, bounds: list[em.Int]) -> list[em.Int]:
        """The next row longer than k from `index` on and its bounds; shorter ones on the way are done at once."""

        def is_short(state):
            return (state[0] < self.rows) & (state[2] <= self.layout.k)

        def write(state):
            self.write_short(*state)
            index = state[0] + self.stride
            return [index, *self.bounds(index)]

        return em.loop_while([index, *bounds], is_short, write)

    def wants_sample(self, length: em.Int) -> em.Bool:
        """Whether a gate is worth its sample: everything fits the buffer otherwise."""
        return length > max(self.layout.capacity, self.layout.sample_columns)

    def begin(self, index: em.Int, bounds: list[em.Int], turn: em.Int, histogram: em.Int) -> list:
        """Find the next long row, start its copies and load its sample; the state of `run`."""
        layout = self.layout
        index, first, length, shift = self.next_long(index, bounds)
        sample = [em.float_from_bits(em.constant(0))] * (layout.sample_vectors * select.VECTOR)
        row = self.row(index.min(self.rows - 1), first, length)
        with em.when(index < self.rows):
            RowSource(self.team, row).prime(turn)
        if sample:
            some = (index < self.rows) & self.wants_sample(length)
            sample = em.branch(some, sample, lambda: self.team.sample(row), lambda: sample)
        return [index, first, length, shift, turn, histogram, *sample]

    def run(self, index: em.Int) -> None:
        """All rows of the team, whose first is `index`."""
        team, zero = self.team, em.constant(0)

        def body(state):
            index, first, length, shift, turn, histogram, *sample = state
            following = self.bounds(index + self.stride)
            row, gate = self.row(index, first, length), zero
            if sample:
                gate, histogram = em.branch(
                    self.wants_sample(length),
                    [gate, histogram],
                    lambda: team.sampled_gate(row, sample, histogram),
                    lambda: [gate, histogram],
                )
            count, gate, turn, histogram = team.collect(RowSource(team, row), gate, turn, histogram)
            begun = self.begin(index + self.stride, following, turn, histogram)
            begun[5] = self.finish(index, shift, count, gate, histogram)
            return begun

        em.loop_while(self.begin(index, self.bounds(index), zero, zero), lambda state: state[0] < self.rows, body)

    def finish(self, index: em.Int, shift: em.Int, count: em.Int, gate: em.Int, histogram: em.Int) -> em.Int:
        """Cut the candidates of a row to its answer; returns the next histogram to use."""
        layout = self.layout
        ids_out, scores_out = self.outputs(index)

        def write(place, key, column):
            ids_out.store(place, column + shift)
            if scores_out is not None:
                scores_out.store(place, select.score_of_key(key))

        def cut(entries):
            return [self.team.cut(count, gate, histogram, entries, write)[2]]

        few = layout.few_entries
        fits = count <= few * layout.threads
        return em.branch(fits, [histogram], lambda: cut(few), lambda: cut(layout.entries))[0]


def _body(rows: int, blocks: int, layout: select.Layout, with_scores: bool):
    """The function that emits the kernel."""

    def emit(ctx, *refs):
        del ctx
        *arrays, index = refs
        scores, starts, ends, ids_out, *rest = map(em.Array.of, arrays)
        scores_out = rest.pop(0) if with_scores else None
        team = em.thread_index() >> (layout.threads.bit_length() - 1)
        own = [x.shifted(team * size) for x, (size, _) in zip(rest, _shared_arrays(layout), strict=True)]
        ring = em.BulkRing(*own[4:], layout.places, layout.step)
        worker = StreamingTeam(layout, select.Shared(*own[:4], ring), team)
        worker.initialise()
        walk = _Rows(rows, blocks * layout.teams, worker, scores, starts, ends, ids_out, scores_out)
        walk.run(em.Int(index.registers.flat[0]) * layout.teams + team)

    return emit


def _shared_arrays(layout: select.Layout) -> list[tuple[int, jnp.dtype]]:
    """Size and dtype of each array of a team in shared memory, in the order of `Shared` and `BulkRing`."""
    return [
        (layout.capacity, jnp.float32),
        (layout.capacity, jnp.int32),
        (select.HISTOGRAMS * select.BINS, jnp.int32),
        (4 * select.LANES, jnp.int32),
        (layout.places * layout.step, jnp.float32),
        (2 * layout.places, jnp.int32),
    ]


@functools.lru_cache
def _build(rows: int, blocks: int, layout: select.Layout, with_scores: bool):
    """The kernel over `rows` (row, slice) pairs."""
    outputs = [jax.ShapeDtypeStruct((rows * layout.k,), jnp.int32)]
    if with_scores:
        outputs.append(jax.ShapeDtypeStruct((rows * layout.k,), jnp.float32))
    scratch = [plgpu.SMEM((layout.teams * size,), dtype) for size, dtype in _shared_arrays(layout)]
    refs = 3 + len(outputs) + len(scratch)
    emit = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * refs + (plgpu.Layout.WG_SPLAT(()),))(
        _body(rows, blocks, layout, with_scores)
    )

    def kernel(*refs):
        emit(*refs, lax.axis_index("block"))

    return plgpu.kernel(
        kernel,
        out_type=outputs,
        grid=(blocks,),
        grid_names=("block",),
        num_threads=layout.teams * layout.warps // 4,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
    )


def _blocks(rows: int, config: TopkConfig) -> int:
    return min(-(-rows // config.teams), config.blocks)


def slices_of_row(rows: int, columns: int, k: int, blocks: int) -> int:
    """How many blocks share each row: enough to fill the GPU, but merging their winners must not cost more."""
    return max(1, min(blocks // rows, math.isqrt(columns // k)))


def topk(
    scores: jax.Array,
    k: int,
    key_start: jax.Array,
    key_end: jax.Array,
    *,
    return_scores: bool = False,
    config: TopkConfig | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.topk.api.topk`. Valid ids are ascending."""
    rows, columns = scores.shape
    config = config or default_config(columns)
    slices = slices_of_row(rows, columns, k, config.blocks)
    if slices > 1:
        return _topk_sliced(scores, k, key_start, key_end, slices, return_scores, config)
    kernel = _build(rows, _blocks(rows, config), _layout(config, columns, k, 1), return_scores)
    out = kernel(scores, key_start, key_end)
    out = [x.reshape(rows, k) for x in out]
    return (out[0], out[1]) if return_scores else out[0]


def _topk_sliced(scores, k, key_start, key_end, slices, return_scores, config):
    """Top-k of each slice of a row, then of the winners, which stay in column order."""
    rows, columns = scores.shape
    width = -(-columns // slices)
    offsets = jnp.arange(slices, dtype=jnp.int32) * width
    first = jnp.maximum(key_start, 0)
    starts = first[:, None] + offsets  # [T, P]
    ends = jnp.minimum(starts + width, jnp.minimum(key_end, columns)[:, None])
    kernel = _build(rows * slices, _blocks(rows * slices, config), _layout(config, columns, k, slices), True)
    ids, values = kernel(scores, starts.reshape(-1), ends.reshape(-1))
    # Only the last slice of a row that holds any column can have fewer than k winners, so the valid ones are in front.
    valid = jnp.clip(ends - starts, 0, k).sum(axis=1, dtype=jnp.int32)
    picked = topk(
        values.reshape(rows, slices * k), k, jnp.zeros_like(valid), valid, return_scores=return_scores, config=dataclasses.replace(config, blocks=rows)
    )
    picked, best = picked if return_scores else (picked, None)
    at = jnp.maximum(picked, 0)
    columns_of = jnp.take_along_axis(ids.reshape(rows, slices * k), at, axis=1) + at // k * width
    chosen = jnp.where(picked >= 0, columns_of + (first - key_start)[:, None], -1)
    return (chosen, best) if return_scores else chosen
