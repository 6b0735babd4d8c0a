"""Block-scaled FP8 products on Hopper: Pallas Mosaic GPU, sm_90a.

One kernel for dense and grouped products; a dense one has one group. A tile is 128 rows of one group by 128 or 256
columns, and its products run over K a block of 128 at a time: four e4m3 wgmmas into a fresh accumulator, which is then
scaled by the row's and the block's scale and added to the tile's sum in float32, as DeepGEMM does. While one of the two
consumer warpgroups adds, the other one's products run.

The rows of a group begin anywhere. Tiles begin at the multiple of 8 below, which the copy engine's tiling asks for, and
rows that belong to a neighbouring group are computed and not stored; sums go from registers to global memory, where a
row needs no whole tile around it. The list of tiles is made on the device and is as long as the groups need: rows
behind the last group cost nothing. Column tiles of a row tile are neighbours in the list, so that a weight stays in the
L2 cache while the tiles of its group use it.

Tiles of 128 x 256 take the place of DeepGEMM's 128 x 128 with multicast in clusters: a stage of 48 KB feeds the tensor
cores for 1024 cycles at their peak, which is 48 bytes a cycle and multiprocessor. None of this has been measured.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.scaled_matmul.mosaic_body import BLOCK, ROWS, consume, produce

_ALIGNED = 8  # rows of a swizzled tile of shared memory
_REGISTERS = {1: (240, 40), 2: (240, 24), 3: (160, 32)}  # of a consumer's and the producer's threads
_SMEM_BYTES = 232_448 - 4096  # of a block, less barriers and alignment


@dataclasses.dataclass(frozen=True)
class Config:
    """Shape of the kernel.

    Attributes:
      warpgroups: Consumer warpgroups; each owns 64 rows of a tile.
      halves: Blocks of 128 columns of a tile, which a warpgroup multiplies one after another.
      stages: Blocks of K in shared memory; None takes what it holds.
      ctas: Size of the persistent grid: the number of multiprocessors of an H100 or H200.
    """

    warpgroups: int = 2
    halves: int = 2
    stages: int | None = None
    ctas: int = 132

    def __post_init__(self):
        if self.warpgroups not in _REGISTERS:
            raise ValueError(f"{self.warpgroups=} must be among {sorted(_REGISTERS)}")
        if self.halves not in (1, 2):
            raise ValueError(f"{self.halves=} must be 1 or 2: more sums do not fit the registers")
        if self.stages is not None and self.stages < 2:
            raise ValueError(f"{self.stages=} must be at least 2: one is loaded while another is used")

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return self.warpgroups * ROWS

    @property
    def ring(self) -> int:
        """Stages of the ring of blocks of K."""
        if self.stages is not None:
            return self.stages
        return _SMEM_BYTES // ((self.rows + self.halves * BLOCK) * BLOCK + 4 * self.rows)


def why_not(rows: int, contracted: int, columns: int) -> str | None:
    """Why the kernel cannot run products of these sizes, or None."""
    if contracted % BLOCK:
        return f"the contracted dimension {contracted} is no multiple of {BLOCK}"
    if columns % _ALIGNED:
        return f"the number of columns {columns} is no multiple of {_ALIGNED}"
    if max(rows, 1) * columns >= 1 << 40:
        return f"{rows} x {columns} results are too many"
    return None


def default_config(columns: int) -> Config:
    """The widest tiles that the columns fill; not measured."""
    return Config(halves=2 if columns % (2 * BLOCK) == 0 else 1)


def schedule(group_sizes: jax.Array, rows: int, tile_rows: int) -> tuple[jax.Array, jax.Array]:
    """Tiles of rows that cover every group.

    Args:
      group_sizes: [G] int32.
      rows: Rows of all groups at most.
      tile_rows: Rows of a tile.

    Returns:
      tiles: Group, first row of the tile (a multiple of 8), and first and last (exclusive) row of the group
        [tiles, 4] int32; as many as there can be.
      count: How many there are [1] int32; the others are unspecified.
    """
    groups = group_sizes.shape[0]
    ends = jnp.cumsum(group_sizes, dtype=jnp.int32)
    starts = ends - group_sizes
    aligned = starts // _ALIGNED * _ALIGNED
    needed = jnp.where(group_sizes > 0, (ends - aligned + tile_rows - 1) // tile_rows, 0)
    behind = jnp.cumsum(needed, dtype=jnp.int32)
    # A group needs at most (size + 7) / tile_rows tiles, rounded up.
    most = (rows + min(groups, rows) * (_ALIGNED - 1 + tile_rows - 1)) // tile_rows
    index = jnp.arange(max(1, most), dtype=jnp.int32)
    group = jnp.minimum(jnp.sum(behind[None, :] <= index[:, None], axis=1, dtype=jnp.int32), groups - 1)
    row0 = aligned[group] + (index - (behind - needed)[group]) * tile_rows
    return jnp.stack([group, row0, starts[group], ends[group]], axis=1), behind[-1:]


@functools.lru_cache(maxsize=64)
def _build(padded_rows, columns, out_dtype, config: Config, interpret):
    """The kernel for one shape: (tiles, count, x, x_scale, weights, weight_scales) -> out."""
    plain = interpret is not None
    transforms = (
        plgpu.TilingTransform((_ALIGNED, BLOCK)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(BLOCK),  # pyright: ignore[reportAbstractUsage]
    )
    stages, consumers, halves = config.ring, config.warpgroups, config.halves
    registers, producer_registers = _REGISTERS[consumers]
    options = {"columns": columns, "config": config, "halves": halves}
    out_columns = pl.cdiv(columns, BLOCK * halves) * BLOCK * halves if plain else columns

    def kernel(tiles, count, x, x_scale, w, w_scale, out, x_smem, xs_smem, w_smem, *rest):
        wg, barriers = lax.axis_index("wg"), rest[:3]

        @pl.when(wg < consumers)
        def _consumer():
            plgpu.set_max_registers(registers, action="increase")
            arrays = (tiles, count, w_scale, out, x_smem, xs_smem, w_smem, rest[3] if plain else None)
            consume(wg, arrays, barriers, **options)

        @pl.when(wg == consumers)
        def _producer():
            plgpu.set_max_registers(producer_registers, action="decrease")
            produce((tiles, count, x, x_scale, w, x_smem, xs_smem, w_smem), barriers, **options)

    scratch = [
        plgpu.SMEM((stages, config.rows, BLOCK), jnp.float8_e4m3fn, transforms=transforms),
        plgpu.SMEM((stages, config.rows), jnp.float32),
        plgpu.SMEM((stages, halves, BLOCK, BLOCK), jnp.float8_e4m3fn, transforms=transforms),
        plgpu.Barrier(num_arrivals=3, num_barriers=stages),
        plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
        plgpu.Barrier(num_barriers=stages),
        *([plgpu.SMEM((consumers, ROWS, BLOCK), out_dtype)] if plain else []),
    ]
    params = plgpu.CompilerParams(
        lowering_semantics=plgpu.LoweringSemantics.Lane,
        unsafe_no_auto_barriers=True,  # every access of shared memory is ordered by a barrier above
        reduction_scratch_bytes=0,
    )
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((padded_rows, out_columns), out_dtype),
        scratch_types=scratch,
        grid=(config.ctas,),
        grid_names=("cta",),
        num_threads=consumers + 1,
        thread_name="wg",
        compiler_params=params,
        **({} if interpret is None else {"interpret": interpret}),
    )


def grouped_scaled_matmul(
    x: jax.Array,
    x_scale: jax.Array,
    weights: jax.Array,
    weight_scales: jax.Array,
    group_sizes: jax.Array,
    first_group: jax.Array,
    *,
    out_dtype: jax.typing.DTypeLike,
    config: Config | None = None,
    interpret=None,
) -> jax.Array:
    """See `pallas_kernels.scaled_matmul.api.grouped_scaled_matmul`.

    Args:
      x: [M, K].
      x_scale: [K / 128, M].
      weights: [W, N, K].
      weight_scales: [W, ceil(N / 128), K / 128].
      group_sizes: [G].
      first_group: [].
      out_dtype: bfloat16 or float32.
      config: Shape of the kernel.
      interpret: `plgpu.InterpretGPUParams` for the interpreter, which runs a form without inline code.

    Returns:
      [M, N] of out_dtype.
    """
    rows, columns = x.shape[0], weights.shape[1]
    if not rows or not columns:
        return jnp.zeros((rows, columns), out_dtype)
    config = config or default_config(columns)
    # The copy engine reads zeros past the end of an array, but its box must fit the array, and the array its tiling.
    pad = max(-rows % _ALIGNED, config.rows - rows)
    x, x_scale = jnp.pad(x, ((0, pad), (0, 0))), jnp.pad(x_scale, ((0, 0), (0, pad)))
    column_pad = max(0, BLOCK - columns)
    weights = jnp.pad(weights, ((0, 0), (0, column_pad), (0, 0))) if column_pad else weights
    tiles, count = schedule(group_sizes, rows, config.rows)
    tiles = tiles.at[:, 0].add(first_group)
    kernel = _build(rows + pad, columns, jnp.dtype(out_dtype), config, interpret)
    return kernel(tiles, count, x, x_scale, weights, weight_scales)[:rows, :columns]


def scaled_matmul(
    x: jax.Array,
    x_scale: jax.Array,
    weight: jax.Array,
    weight_scale: jax.Array,
    *,
    out_dtype: jax.typing.DTypeLike,
    config: Config | None = None,
    interpret=None,
) -> jax.Array:
    """See `pallas_kernels.scaled_matmul.api.scaled_matmul`: one group of all rows."""
    return grouped_scaled_matmul(
        x,
        x_scale,
        weight[None],
        weight_scale[None],
        jnp.full((1,), x.shape[0], jnp.int32),
        jnp.int32(0),
        out_dtype=out_dtype,
        config=config,
        interpret=interpret,
    )
