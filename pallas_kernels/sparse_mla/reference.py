"""The definition of sparse multi-head latent attention in plain jnp."""

import jax
import jax.numpy as jnp

from pallas_kernels.ckv_records import unpack
from pallas_kernels.ckv_records.formats import RecordFormat
from pallas_kernels.tiling import map_row_tiles, rows_per_tile


def sparse_mla(
    q: jax.Array,
    kv: jax.Array,
    topk_indices: jax.Array,
    *,
    softmax_scale: float,
    kv_lora_rank: int,
    num_valid: jax.Array | None,
    kv_format: RecordFormat | None,
    out_dtype: jnp.dtype,
    workspace_bytes: int,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.sparse_mla.api.sparse_mla`. Row tiles of gathered rows: O(T * K) work."""
    rows, heads, width = q.shape
    selected = topk_indices.shape[1]
    if num_valid is None:
        num_valid = jnp.full((rows,), selected, jnp.int32)

    def attend(tile):
        q, ids, count = tile
        column = jnp.arange(selected, dtype=jnp.int32)[None, :]
        valid = (ids >= 0) & (ids < kv.shape[0]) & (column < count[:, None])  # [t, K]
        gathered = kv[jnp.where(valid, ids, 0)]  # [t, K, Dk], or records
        gathered = gathered.astype(jnp.float32) if kv_format is None else unpack(kv_format, gathered)
        # Rows that do not count may hold NaN, and 0 * NaN is NaN: clear them.
        gathered = jnp.where(valid[:, :, None], gathered, 0.0)
        logits = jnp.einsum("thd,tkd->thk", q.astype(jnp.float32), gathered, precision=jax.lax.Precision.HIGHEST)
        logits = jnp.where(valid[:, None, :], logits * softmax_scale, -jnp.inf)
        top = jnp.max(logits, axis=-1, keepdims=True)
        top = jnp.where(top == -jnp.inf, 0.0, top)
        p = jnp.exp(logits - top)
        total = jnp.sum(p, axis=-1)  # [t, H]
        # Slicing the output copies less than slicing the gathered rows before the product.
        out = jnp.einsum("thk,tkd->thd", p, gathered, precision=jax.lax.Precision.HIGHEST)[:, :, :kv_lora_rank]
        out = out / jnp.where(total == 0, 1.0, total)[:, :, None]
        lse = jnp.where(total == 0, -jnp.inf, jnp.log(total) + top[:, :, 0])
        return out.astype(out_dtype), lse

    if 0 in (selected, kv.shape[0]):
        return jnp.zeros((rows, heads, kv_lora_rank), out_dtype), jnp.full((rows, heads), -jnp.inf, jnp.float32)
    tile = rows_per_tile(rows, 4 * selected * (2 * width + 2 * heads), workspace_bytes)
    return map_row_tiles(attend, (q, topk_indices, num_valid), tile)
