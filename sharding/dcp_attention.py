"""Sparse attention where each rank of a DCP group attends to the tokens it holds, for the heads of all of them.

The queries of the group's heads are gathered, every rank attends to the selected tokens of its own shard, and the
partial outputs are merged by their log-sum-exp while they are scattered back to their heads (vLLM's
`cp_lse_ag_out_rs`). Nothing of the cache travels, so it needs no room beyond the cache.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.ckv_records import RecordFormat
from pallas_kernels.sparse_mla import sparse_mla
from pallas_kernels.sparse_mla.api import DEFAULT_WORKSPACE_BYTES
from pallas_kernels.sparse_mla.merge import merge_weights, weigh
from sharding.local_keys import KeyLayout, local_rows
from sharding.mesh import DCP


def owned_slots(
    positions: jax.Array,
    requests: jax.Array,
    layout: KeyLayout,
    rank: jax.Array | int,
    *,
    interleave: int,
    visible: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Rows of a rank's buffer for those selected tokens that it holds, moved to the front in their order.

    It depends on the selection and the lengths, not on the layer: compute it once for a full layer and all layers that
    share its selection.

    Args:
      positions: Selected tokens of each row, as positions in its request [T, K] int32, -1 for none.
      requests: Request of each row [T] int32, -1 for padding.
      layout: Where the ranks hold the tokens, those of this step included.
      rank: Whose buffer.
      interleave: Tokens in a run.
      visible: Tokens that each row may see over all ranks, its causal length [T] int32; None allows the request.

    Returns:
      Rows [T, K] int32, -1 behind the last one, and how many there are [T] int32; 0 on a rank that holds none.
    """
    if visible is not None:
        positions = jnp.where(positions < visible[:, None], positions, -1)
    rows = local_rows(layout, positions, requests[:, None], rank, interleave=interleave)
    valid = rows >= 0
    last = rows.shape[1]
    place = jnp.where(valid, jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1, last)
    row = jnp.arange(rows.shape[0], dtype=jnp.int32)[:, None]
    packed = jnp.full_like(rows, -1).at[row, place].set(rows, mode="drop", wrap_negative_indices=False)
    return packed, jnp.sum(valid, axis=1, dtype=jnp.int32)


def dcp_sparse_mla(
    q: jax.Array,
    kv: jax.Array,
    slots: jax.Array,
    num_valid: jax.Array,
    *,
    softmax_scale: float,
    kv_lora_rank: int,
    value_up: jax.Array | None = None,
    kv_format: RecordFormat | None = None,
    out_dtype: jax.typing.DTypeLike | None = None,
    reduce_dtype: jax.typing.DTypeLike = jnp.float32,
    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attend over the shards of a DCP group. Call it inside `shard_map` on all ranks alike.

    Args:
      q: Absorbed queries of this rank's heads [T, h, Dk].
      kv: This rank's records [N, Dk] in the layout that `slots` point into.
      slots: Rows of `kv` to attend to [T, K] int32, from `owned_slots`.
      num_valid: How many leading slots of each row count [T] int32.
      softmax_scale: Factor on the logits.
      kv_lora_rank: How many leading columns of a record are its value.
      value_up: Rows of the value up-projection of this rank's heads [h, V, kv_lora_rank]. Given, the partial outputs
        are projected before the merge: fewer columns travel, for the price of gathering these weights.
      kv_format: Format of the records when they are packed; see `sparse_mla`.
      out_dtype: dtype of the output; None means q's.
      reduce_dtype: dtype of the partial outputs and of their sum across ranks. bfloat16 halves the bytes and rounds
        each partial; float32 equals one device to rounding.
      workspace_bytes: Bound on the gathered rows held at once.
      implementation: Of the kernel.

    Returns:
      Output [T, h, kv_lora_rank], or [T, h, V] with `value_up`, and the log-sum-exp [T, h] float32, of this rank's
      heads over the tokens of all ranks. A row without a selected token anywhere gives 0 and -inf.
    """
    ranks = jax.lax.axis_size(DCP)
    out_dtype = q.dtype if out_dtype is None else out_dtype
    if ranks > 1:
        q = jax.lax.all_gather(q, DCP, axis=1, tiled=True)  # [T, W * h, Dk]
        if value_up is not None:
            value_up = jax.lax.all_gather(value_up, DCP, axis=0, tiled=True)
    out, lse = sparse_mla(
        q,
        kv,
        slots,
        softmax_scale=softmax_scale,
        kv_lora_rank=kv_lora_rank,
        num_valid=num_valid,
        kv_format=kv_format,
        out_dtype=reduce_dtype,
        workspace_bytes=workspace_bytes,
        implementation=implementation,
    )
    if value_up is not None:
        out = project_values(out, value_up).astype(reduce_dtype)
    if ranks == 1:
        return out.astype(out_dtype), lse
    weights, merged = merge_weights(jax.lax.all_gather(lse, DCP))  # [W, T, W * h], [T, W * h]
    rank = jax.lax.axis_index(DCP)
    # A rank that holds none of a row's tokens may have put NaN there: its weight of 0 clears it.
    weighed = weigh(out, weights[rank]).astype(reduce_dtype)
    out = jax.lax.psum_scatter(weighed, DCP, scatter_dimension=1, tiled=True)
    heads = out.shape[1]
    return out.astype(out_dtype), jax.lax.dynamic_slice_in_dim(merged, rank * heads, heads, axis=1)


def project_values(out: jax.Array, value_up: jax.Array) -> jax.Array:
    """Attention output in the latent space [T, H, R] times the heads' value rows [H, V, R]: [T, H, V] float32."""
    # XLA has no batched bfloat16 product with a float32 output on CPUs: the product is rounded to the weights' dtype.
    values = jnp.einsum(
        "thr,hvr->thv",
        out.astype(value_up.dtype),
        value_up,
        precision=jax.lax.Precision.HIGHEST if value_up.dtype == jnp.float32 else None,
    )
    return values.astype(jnp.float32)
