"""The lightning indexer's scores on Hopper: Pallas Mosaic GPU, sm_90a.

A tile is 64 query rows by the keys of all consumer warpgroups. Queries lie along M and keys along N of the wgmma, one
head after another: the scores of a tile stay in registers while the heads are added up, `s += w[h] * relu(q[h] . k)`,
two instructions an element with no shuffle, and a tile is stored once. (Heads along N, as the CUDA kernels do it, needs
shuffles, selects and a store for every tile of 128 dot products.) The keys of a tile stay in shared memory, the
queries stream through a ring of stages, one head a stage.

Where it stands: the products need the register file for their accumulators, the sums for their operands, and the two
wait for each other (`stall_dispatch`); under sustained load the card lowers its clock at its power limit.

The kernel is persistent. Tiles that no row of a block of 64 needs are left out of the work list; each CTA takes an
equal share of the rest, whatever the ranges of the rows.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.lightning_indexer.mosaic_body import ROWS, consume, produce
from pallas_kernels.lightning_indexer.mosaic_inline import BLOCK_MAX_KEYS

DTYPES = (jnp.bfloat16, jnp.float8_e4m3fn)
HEAD_DIMS = (64, 128)
MAX_HEADS = 128
_TMA_ROWS = 8  # rows of a swizzled tile
_REGISTERS = {1: (240, 40), 2: (240, 24), 3: (160, 32), 4: (112, 32)}  # of a consumer's and the producer's threads
_SMEM_BYTES = 232_448 - 4096  # of a block, less barriers and alignment


@dataclasses.dataclass(frozen=True)
class Config:
    """Shape of the kernel.

    Attributes:
      warpgroups: Consumer warpgroups; each owns its own keys of a tile.
      keys: Keys a warpgroup scores at a time, the N of its wgmma.
      k_stages: Tiles of keys in shared memory; with 2 the next one arrives during the work on the last.
      q_stages: Stages of the ring of queries; None takes what shared memory holds.
      ctas: Size of the persistent grid: the number of multiprocessors of an H100 or H200.
      turns: Whether warpgroups take turns at the tensor cores, each starting when the one before is halfway.
    """

    warpgroups: int = 3
    keys: int = 128
    k_stages: int = 2
    q_stages: int | None = None
    ctas: int = 132
    turns: bool = False

    def __post_init__(self):
        if self.warpgroups not in _REGISTERS:
            raise ValueError(f"{self.warpgroups=} must be among {sorted(_REGISTERS)}")
        if self.keys % BLOCK_MAX_KEYS or not 0 < self.keys <= 256:
            raise ValueError(f"{self.keys=} must be a multiple of {BLOCK_MAX_KEYS} and at most 256")
        for name in ("k_stages", "q_stages"):
            value = getattr(self, name)
            if value is not None and (value < 1 or value & (value - 1)):
                raise ValueError(f"{name}={value} must be a power of two: the slot of a step is a mask")

    @property
    def tile_keys(self) -> int:
        """Keys of a tile."""
        return self.warpgroups * self.keys

    def stages(self, itemsize: int, dim: int, heads: int) -> int:
        """Stages of the ring of queries."""
        if self.q_stages is not None:
            return self.q_stages
        tiles = self.k_stages * (self.tile_keys * (dim * itemsize + 4) + heads * ROWS * 4)
        room = (_SMEM_BYTES - tiles) // (ROWS * dim * itemsize)
        if room < 1:
            raise ValueError(f"no room for a stage of queries beside {tiles} bytes of keys")
        return min(16, 1 << (room.bit_length() - 1))


def why_not(q: jax.Array) -> str | None:
    """Why the kernel cannot run queries of this shape and dtype, or None."""
    _, heads, dim = q.shape
    if q.dtype not in DTYPES:
        return f"dtype {q.dtype.name} is not bfloat16 or float8_e4m3fn"
    if dim not in HEAD_DIMS:
        return f"head dimension {dim} is not among {HEAD_DIMS}"
    if heads > MAX_HEADS:
        return f"{heads} heads are more than the {MAX_HEADS} whose weights fit beside the keys"
    return None


def default_config(dtype, dim: int) -> Config:
    """The configuration that measured fastest; at a head dimension of 64, which was not measured, the plain one."""
    if jnp.dtype(dtype).itemsize == 1 or dim < 128:
        return Config()
    return Config(k_stages=1, turns=True)


def schedule(key_start, key_end, keys: int, config: Config):
    """Work lists of the CTAs.

    Returns:
      blocks: For each block of 64 rows [blocks, 3] int32: first and last (exclusive) tile that one of its rows needs,
        and the number of needed tiles in the blocks before it.
      shares: For each CTA [ctas, 8] int32: first and last (exclusive) needed tile, counted over all blocks, first and
        last (exclusive) block that holds one of them; then the same for the tiles that are not needed.
    """
    tile, ctas = config.tile_keys, config.ctas
    rows = key_start.shape[0]
    pad = (0, -rows % ROWS)
    start = jnp.pad(jnp.clip(key_start, 0, keys), pad).reshape(-1, ROWS)
    end = jnp.pad(jnp.clip(key_end, 0, keys), pad).reshape(-1, ROWS)
    empty = end <= start
    first = jnp.min(jnp.where(empty, keys, start), axis=1) // tile
    last = -(-jnp.max(jnp.where(empty, 0, end), axis=1) // tile)
    first = jnp.minimum(first, last)
    blocks, tiles = first.shape[0], -(-keys // tile)
    after = jnp.cumsum(last - first, dtype=jnp.int32)
    before = after - (last - first)

    def share(before, after):
        total = after[-1]
        edges = jnp.arange(ctas + 1, dtype=jnp.int32)
        edges = total // ctas * edges + jnp.minimum(edges, total % ctas)
        # The first block whose tiles reach past the share's first tile; the first that starts at or past its end.
        # Counting is one fused kernel where searchsorted is a loop of many.
        first_block = jnp.sum(after[None, :] <= edges[:-1, None], axis=1, dtype=jnp.int32)
        last_block = jnp.sum(before[None, :] < edges[1:, None], axis=1, dtype=jnp.int32)
        return [edges[:-1], edges[1:], first_block, last_block]

    index = jnp.arange(blocks, dtype=jnp.int32) * tiles
    shares = share(before, after) + share(index - before, index + tiles - after)
    return jnp.stack([first, last, before], axis=1), jnp.stack(shares, axis=1)


@functools.lru_cache(maxsize=64)
def _build(rows, keys, heads, dim, dtype, scaled, clean, with_max, config: Config, interpret):
    """The kernel for one shape: (blocks, shares, start, end, q, w, k, [scale]) -> scores, [maxima]."""
    plain = interpret is not None
    itemsize = jnp.dtype(dtype).itemsize
    # With turns a wgmma works on a half of the head dimension, which must be whole swizzled tiles.
    swizzle = dim * itemsize // 2 if config.turns else min(128, dim * itemsize)
    transforms = (
        plgpu.TilingTransform((8, swizzle // itemsize)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(swizzle),  # pyright: ignore[reportAbstractUsage]
    )
    stages = config.stages(itemsize, dim, heads)
    consumers = config.warpgroups
    registers, producer_registers = _REGISTERS[consumers]
    out_keys, out_rows = keys, rows
    if plain:  # plain stores have no predicate, so the interpreter writes whole tiles
        out_keys, out_rows = pl.cdiv(keys, config.tile_keys) * config.tile_keys, pl.cdiv(rows, ROWS) * ROWS
    out_type = [jax.ShapeDtypeStruct((out_rows, out_keys), jnp.float32)]
    if with_max:
        out_type.append(jax.ShapeDtypeStruct((out_rows, pl.cdiv(out_keys, BLOCK_MAX_KEYS)), jnp.float32))

    def kernel(*refs):
        refs = list(refs)
        blocks, shares, start, end, q, w, k = refs[:7]
        del refs[:7]
        scale = refs.pop(0) if scaled else None
        out = refs.pop(0)
        block_max = refs.pop(0) if with_max else None
        q_smem, w_smem, k_smem = refs[:3]
        del refs[:3]
        scale_smem = refs.pop(0) if scaled else None
        barriers = refs
        wg = lax.axis_index("wg")

        @pl.when(wg < consumers)
        def _consumer():
            plgpu.set_max_registers(registers, action="increase")
            arrays = (blocks, shares, start, end, out, block_max, q_smem, w_smem, k_smem, scale_smem)
            shape = (rows, keys, heads)
            consume(wg, arrays, barriers, shape=shape, config=config, clean=clean, plain=plain)

        @pl.when(wg == consumers)
        def _producer():
            plgpu.set_max_registers(producer_registers, action="decrease")
            arrays = (blocks, shares, q, w, k, scale, q_smem, w_smem, k_smem, scale_smem)
            produce(arrays, barriers, heads=heads, config=config)

    scratch = [
        plgpu.SMEM((stages, ROWS, dim), dtype, transforms=transforms),
        plgpu.SMEM((config.k_stages, heads, ROWS), jnp.float32),
        plgpu.SMEM((config.k_stages, config.tile_keys, dim), dtype, transforms=transforms),
        *([plgpu.SMEM((config.k_stages, config.tile_keys), jnp.float32)] if scaled else []),
        plgpu.Barrier(num_barriers=stages),
        plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
        plgpu.Barrier(num_arrivals=1 + consumers * (2 if scaled else 1), num_barriers=config.k_stages),
        plgpu.Barrier(num_arrivals=consumers, num_barriers=config.k_stages),
        plgpu.Barrier(num_barriers=consumers),
    ]
    params = plgpu.CompilerParams(
        lowering_semantics=plgpu.LoweringSemantics.Lane,
        unsafe_no_auto_barriers=True,  # every access of shared memory is ordered by a barrier above
        reduction_scratch_bytes=0,
    )
    options = {} if interpret is None else {"interpret": interpret}
    return plgpu.kernel(
        kernel,
        out_type=out_type,
        scratch_types=scratch,
        grid=(config.ctas,),
        grid_names=("cta",),
        num_threads=consumers + 1,
        thread_name="wg",
        compiler_params=params,
        **options,
    )


def lightning_indexer(
    q: jax.Array,
    k: jax.Array,
    weights: jax.Array,
    key_start: jax.Array,
    key_end: jax.Array,
    *,
    k_scale: jax.Array | None = None,
    clean_logits: bool = True,
    block_max: bool = False,
    config: Config | None = None,
    interpret=None,
) -> Any:
    """See `pallas_kernels.lightning_indexer.api.lightning_indexer`.

    Args:
      q: [T, Hi, D].
      k: [S, D].
      weights: [T, Hi].
      key_start: [T].
      key_end: [T].
      k_scale: [S] or None.
      clean_logits: Whether tiles that no row of a block of 64 needs are filled with -inf or left unwritten. In the
        other tiles keys outside a row's range are -inf in any case.
      block_max: Whether to return also the highest score of each 16 keys of a row's range, NaN left out
        [T, ceil(S / 16)] float32. Where no key is in range it is -inf, or unwritten as the scores are.
      config: Shape of the kernel.
      interpret: `plgpu.InterpretGPUParams` for the interpreter, which runs a form without inline code.

    Returns:
      Scores [T, S] float32, and with `block_max` the maxima.
    """
    (rows, heads, dim), keys = q.shape, k.shape[0]
    if not rows or not keys:
        empty = jnp.zeros((rows, keys), jnp.float32)
        return (empty, jnp.zeros((rows, pl.cdiv(keys, BLOCK_MAX_KEYS)), jnp.float32)) if block_max else empty
    config = config or default_config(q.dtype, dim)
    blocks, shares = schedule(key_start, key_end, keys, config)
    # The copy engine reads zeros past the end of an array, but its box must fit the array, and the array its tiling.
    row_pad = max(-rows % _TMA_ROWS, ROWS - rows)
    key_pad = max(-keys % _TMA_ROWS, config.keys - keys)
    if interpret is not None:
        row_pad, key_pad = -rows % ROWS, -keys % config.tile_keys
    q = jnp.pad(q.reshape(rows, heads * dim), ((0, row_pad), (0, 0)))
    k = jnp.pad(k, ((0, key_pad), (0, 0)))
    by_head = jnp.pad(weights.T, ((0, 0), (0, -rows % ROWS)))  # a stage's 64 weights lie together
    operands = [blocks, shares, key_start, key_end, q, by_head, k]
    if interpret is not None:
        operands[2:4] = [jnp.pad(x, (0, row_pad)) for x in operands[2:4]]
    if k_scale is not None:
        operands.append(jnp.pad(k_scale, (0, key_pad)))
    kernel = _build(
        rows, keys, heads, dim, jnp.dtype(q.dtype), k_scale is not None, clean_logits, block_max, config, interpret
    )
    out = [x[:rows] for x in kernel(*operands)]
    scores = out[0][:, :keys]
    return (scores, out[1][:, : pl.cdiv(keys, BLOCK_MAX_KEYS)]) if block_max else scores
