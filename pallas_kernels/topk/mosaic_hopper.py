"""Exact top-k for Hopper: one pass over each row by one thread block; few long rows are cut into slices."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.topk import mosaic_emit as em
from pallas_kernels.topk.mosaic_rows import Rows, make_block, shared_arrays
from pallas_kernels.topk.mosaic_select import Layout

MAX_K = 2048
SLICE_FROM = 1 << 18  # columns; on an H200 one block takes 24 us for a row of half that, slices and their merge 27


@dataclasses.dataclass(frozen=True)
class TopkConfig:
    """Tuning of the kernel.

    Attributes:
      warpgroups: Warpgroups of a block, 128 threads each.
      places: Steps of the row that are on their way into shared memory at once.
      sample_vectors: 16-byte pieces a thread samples for the first gate; 0 starts without one.
      target_share: Where between k and the buffer's size the expected number of passing columns lies.
      blocks: Blocks of the grid, one for each SM of the GPU.
    """

    warpgroups: int = 4
    places: int = 3
    sample_vectors: int = 1
    target_share: float = 0.23
    blocks: int = 132

    def __post_init__(self):
        if self.warpgroups not in (1, 2, 4, 8):
            raise ValueError(f"warpgroups must be 1, 2, 4 or 8, got {self.warpgroups}")
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


def make_layout(config: TopkConfig, columns: int, k: int, slices: int) -> Layout:
    """Sizes of the kernel that the configuration makes for a call."""
    layout = Layout(
        k=k,
        columns=columns,
        slices=slices,
        warps=4 * config.warpgroups,
        places=config.places,
        sample_vectors=config.sample_vectors,
        sample_target=0,
    )
    target = k + int(config.target_share * (layout.capacity - k))
    return dataclasses.replace(layout, sample_target=target)


def _body(rows: int, blocks: int, layout: Layout, with_scores: bool):
    """The function that emits the kernel."""

    def emit(ctx, *refs):
        del ctx
        *arrays, index = refs
        scores, starts, ends, ids_out, *shared = map(em.Array.of, arrays)
        scores_out = shared.pop(0) if with_scores else None
        block = make_block(layout, shared)
        block.initialise()
        walk = Rows(rows, blocks, block, scores, starts, ends, ids_out, scores_out)
        walk.run(em.Int(index.registers.flat[0]))

    return emit


def build_kernel(rows: int, blocks: int, layout: Layout, with_scores: bool, body, *, inputs: int, more_shared=()):
    """The kernel whose body `body` emits from its inputs, outputs, arrays in shared memory and block index.

    Args:
      rows: Rows of the outputs.
      blocks: Blocks of the grid.
      layout: Sizes.
      with_scores: Whether there is an output of scores.
      body: Called with the MLIR context and one reference for each array, then the index.
      inputs: Number of input arrays.
      more_shared: Sizes of int32 arrays in shared memory beside those of `shared_arrays`.
    """
    outputs = [jax.ShapeDtypeStruct((rows * layout.k,), jnp.int32)]
    if with_scores:
        outputs.append(jax.ShapeDtypeStruct((rows * layout.k,), jnp.float32))
    scratch = [plgpu.SMEM((size,), dtype) for size, dtype in shared_arrays(layout)]
    scratch += [plgpu.SMEM((size,), jnp.int32) for size in more_shared]
    refs = inputs + len(outputs) + len(scratch)
    emit = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * refs + (plgpu.Layout.WG_SPLAT(()),))(body)

    def kernel(*refs):
        emit(*refs, lax.axis_index("block"))

    return plgpu.kernel(
        kernel,
        out_type=outputs,
        grid=(blocks,),
        grid_names=("block",),
        num_threads=layout.warps // 4,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
    )


@functools.lru_cache
def _build(rows: int, blocks: int, layout: Layout, with_scores: bool):
    """The kernel over `rows` (row, slice) pairs."""
    return build_kernel(rows, blocks, layout, with_scores, _body(rows, blocks, layout, with_scores), inputs=3)


def slices_of_row(rows: int, columns: int, k: int, blocks: int) -> int:
    """How many blocks share each row: enough to fill the GPU, but merging their winners must not cost more."""
    if columns < SLICE_FROM:
        return 1
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
    kernel = _build(rows, min(rows, config.blocks), make_layout(config, columns, k, 1), return_scores)
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
    kernel = _build(rows * slices, min(rows * slices, config.blocks), make_layout(config, columns, k, slices), True)
    ids, values = kernel(scores, starts.reshape(-1), ends.reshape(-1))
    # Only the last slice of a row that holds any column can have fewer than k winners, so the valid ones are in front.
    valid = jnp.clip(ends - starts, 0, k).sum(axis=1, dtype=jnp.int32)
    once = dataclasses.replace(config, blocks=rows)
    values = values.reshape(rows, slices * k)
    picked, best = topk(values, k, jnp.zeros_like(valid), valid, return_scores=True, config=once)
    at = jnp.maximum(picked, 0)
    columns_of = jnp.take_along_axis(ids.reshape(rows, slices * k), at, axis=1) + at // k * width
    chosen = jnp.where(picked >= 0, columns_of + (first - key_start)[:, None], -1)
    return (chosen, best) if return_scores else chosen
