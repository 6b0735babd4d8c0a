"""How a call of sparse MLA on Hopper is cut into tiles of the kernel, and the call itself."""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.ckv_records.formats import RecordFormat
from pallas_kernels.sparse_mla import mosaic_hopper, union
from pallas_kernels.sparse_mla.tile_shape import BLOCK, LATENT, TILE_ROWS, WIDTH, TileShape
from pallas_kernels.tiling import map_row_tiles, rows_per_tile

PACKED = "fp8_ds_mla"  # the encoding of records that the kernel reads
MIN_HEADS = 8
MAX_ROWS = 1 << 30  # of the cache or the flattened queries: ids carry a flag above
MAX_LIST = 1 << 24
# In blocks of 64 keys: what a tile costs besides its keys, and what part of the summed lists a union is taken to hold.
TILE_OVERHEAD = 4
ASSUMED_UNION = 0.9
MIN_TILES_FOR_ORDER = 512  # fewer tiles do not walk the cache together long enough to pay for the sort


@dataclasses.dataclass(frozen=True)
class Plan:
    """How rows and keys are cut.

    Attributes:
      group: Neighbouring rows of a tile, which gather the union of their keys once.
      splits: Parts of each list that run side by side; their outputs are merged.
      ordered: Whether lists are rebuilt in ascending order; always so for a group of several rows.
    """

    group: int
    splits: int
    ordered: bool

    def __post_init__(self):
        if self.group > 1 and not self.ordered:
            raise ValueError(f"a group of several rows needs ordered lists: {self}")


def padded_heads(heads: int) -> int:
    """Heads that tiles can hold: a power of two from 8 to 64, or a multiple of 64."""
    if heads > TILE_ROWS:
        return -(-heads // TILE_ROWS) * TILE_ROWS
    return max(MIN_HEADS, 1 << (heads - 1).bit_length())


def choose_plan(rows: int, heads: int, k: int, blocks: int = mosaic_hopper.Config.blocks) -> Plan:
    """The cut with the least work for the busiest multiprocessor.

    Args:
      rows: Rows of queries.
      heads: Heads of a row.
      k: Ids of a row.
      blocks: Blocks of the persistent grid.
    """
    heads = padded_heads(heads)
    best = None
    group = max(1, TILE_ROWS // heads)
    while group >= 1:
        if group * k <= union.MAX_ENTRIES or group == 1:
            tiles = -(-rows // group) * max(1, heads // TILE_ROWS)
            keys = group * k * (ASSUMED_UNION if group > 1 else 1.0)
            for splits in (1, 2, 4, 8, 16, 32, 64):
                if splits > 1 and (splits > -(-k // BLOCK) or tiles * splits > blocks):
                    break
                waves = -(-tiles * splits // blocks)
                cost = waves * (-(-keys // (BLOCK * splits)) + TILE_OVERHEAD)
                if best is None or cost < best[0]:
                    best = cost, group, splits, tiles
        group //= 2
    assert best is not None
    _, group, splits, tiles = best
    can_order = group * k <= union.MAX_ENTRIES
    return Plan(group, splits, group > 1 or (can_order and tiles >= MIN_TILES_FOR_ORDER))


def unsupported(
    q: jax.Array, kv: jax.Array, k: int, softmax_scale: float, kv_lora_rank: int, kv_format: RecordFormat | None
) -> str | None:
    """Why the kernel cannot run this call, or None."""
    rows, heads, width = q.shape
    if kv_format is not None and kv_format.encoding not in ("plain", PACKED):
        return f"it reads records of {PACKED}, not of {kv_format.name}"
    if kv_format is not None and kv_format.encoding == "plain" and kv.dtype != q.dtype:
        return f"it takes rows of {q.dtype.name}, not of {kv.dtype.name}"
    if q.dtype != jnp.bfloat16:
        return f"it takes bfloat16, not {q.dtype.name}"
    if kv_lora_rank != LATENT or width not in (LATENT, WIDTH):
        return f"it takes rows of {WIDTH} or {LATENT} columns with {LATENT} values, not {width} with {kv_lora_rank}"
    if not isinstance(softmax_scale, int | float) or not softmax_scale > 0:
        return f"it takes a positive Python number as softmax_scale, not {softmax_scale!r}"
    if not 1 <= k <= MAX_LIST:
        return f"it takes 1 to {MAX_LIST} ids a row, not {k}"
    if rows < 1 or kv.shape[0] < 1:
        return f"it takes at least one row of queries and of kv, not {rows} and {kv.shape[0]}"
    if kv.shape[0] >= MAX_ROWS or rows * padded_heads(heads) >= MAX_ROWS:
        return f"it takes fewer than {MAX_ROWS} rows of kv and of heads times rows"
    return None


def sparse_mla(
    q: jax.Array,
    kv: jax.Array,
    topk_indices: jax.Array,
    *,
    softmax_scale: float,
    num_valid: jax.Array | None,
    out_dtype: jnp.dtype,
    workspace_bytes: int,
    kv_format: RecordFormat | None = None,
    plan: Plan | None = None,
    config: mosaic_hopper.Config | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.sparse_mla.api.sparse_mla`; `plan` and `config` override what the shapes suggest."""
    rows, _, _ = q.shape
    k = topk_indices.shape[1]
    if num_valid is None:
        num_valid = jnp.full((rows,), k, jnp.int32)
    chosen = plan or choose_plan(rows, q.shape[1], k)
    packed = kv_format is not None and kv_format.encoding == PACKED
    config = config or (mosaic_hopper.RECORDS_CONFIG if packed else mosaic_hopper.Config())

    def attend(tile):
        q, ids, num_valid = tile
        return _attend(q, ids, num_valid, kv, softmax_scale, out_dtype, chosen, config, packed)

    tile = rows
    if chosen.ordered:
        tile = rows_per_tile(rows, 5 * k, workspace_bytes)
        tile = tile if tile >= rows else max(TILE_ROWS, tile // TILE_ROWS * TILE_ROWS)
    return map_row_tiles(attend, (q, topk_indices, num_valid), tile)


def _attend(q, ids, num_valid, kv, softmax_scale, out_dtype, plan: Plan, config: mosaic_hopper.Config, packed: bool):
    rows, heads, width = q.shape
    k = ids.shape[1]
    whole = padded_heads(heads)
    if whole != heads:
        q = jnp.pad(q, ((0, 0), (0, whole - heads), (0, 0)))
    if plan.ordered:
        lists, masks, counts = union.build(rows, k, kv.shape[0], plan.group)(ids.reshape(-1), num_valid)
    else:
        lists, counts = ids.reshape(-1), jnp.clip(num_valid, 0, k)
        masks = jnp.zeros((4,), jnp.int8)
    shape = TileShape(
        queries=rows * whole,
        heads=whole,
        group=plan.group,
        lists=-(-rows // plan.group),
        length=plan.group * k,
        keys=kv.shape[0],
        splits=plan.splits,
        masked=plan.group > 1,
        width=width,
        packed=packed,
    )
    partial_dtype = "float32" if plan.splits > 1 else jnp.dtype(out_dtype).name
    kernel = mosaic_hopper.build(shape, float(softmax_scale), partial_dtype, config)
    out, lse = kernel(kv, lists, masks, counts, q.reshape(rows * whole, width))
    out = out.reshape(plan.splits, rows, whole, LATENT)[:, :, :heads]
    lse = lse.reshape(plan.splits, rows, whole)[:, :, :heads]
    if plan.splits == 1:
        return out[0], lse[0]
    return _merge(out, lse, out_dtype)


def _merge(out, lse, out_dtype):
    """Outputs over parts of one list, weighted by their sums.

    Unlike in `merge_partials`, a NaN comes from a row that was selected, and stays.
    """
    top = jnp.max(lse, axis=0)
    base = jnp.where(top == -jnp.inf, 0.0, top)
    weights = jnp.exp(lse - base)  # [splits, T, H]
    total = jnp.sum(weights, axis=0)
    empty = total == 0
    merged = jnp.sum(weights[..., None] * out, axis=0) / jnp.where(empty, 1.0, total)[..., None]
    return merged.astype(out_dtype), jnp.where(empty, -jnp.inf, base + jnp.log(jnp.where(empty, 1.0, total)))
