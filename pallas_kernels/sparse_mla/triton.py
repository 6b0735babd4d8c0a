"""Sparse MLA in Triton, for GPUs without a Mosaic kernel.

One program a query row and block of heads; it gathers its own keys. Importing it needs jax_triton, which is optional.
"""

import jax
import jax.numpy as jnp
import jax_triton  # pyright: ignore[reportMissingImports]
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

# 16 heads and 32 keys, twice buffered, stay below the 99 KB of shared memory of the smallest of these GPUs.
BLOCK_HEADS, BLOCK_KEYS = 16, 32
WARPS, STAGES = 4, 2


@triton.jit  # pyright: ignore[reportAttributeAccessIssue]
def attention_kernel(
    q,
    kv,
    ids,
    num_valid,
    out,
    lse,
    LOG2_SCALE: tl.constexpr,
    KEYS: tl.constexpr,
    HEADS: tl.constexpr,
    LISTED: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """Online softmax over the row's list, in units of log2."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    head_exists = head < HEADS
    latent, rope = tl.arange(0, LATENT), tl.arange(0, ROPE)
    width: tl.constexpr = LATENT + ROPE
    line = (row * HEADS + head)[:, None]
    q_latent = tl.load(q + line * width + latent[None, :], mask=head_exists[:, None], other=0.0)
    q_rope = tl.load(q + line * width + LATENT + rope[None, :], mask=head_exists[:, None], other=0.0)
    count = tl.minimum(tl.load(num_valid + row), LISTED)
    top = tl.full((BLOCK_HEADS,), -1e30, dtype=tl.float32)  # finite: a block without valid keys is no special case
    total = tl.zeros((BLOCK_HEADS,), dtype=tl.float32)
    acc = tl.zeros((BLOCK_HEADS, LATENT), dtype=tl.float32)
    for start in range(0, count, BLOCK_KEYS):
        position = start + tl.arange(0, BLOCK_KEYS)
        key = tl.load(ids + row * LISTED + position, mask=position < count, other=-1)
        valid = (key >= 0) & (key < KEYS)
        record = tl.where(valid, key, 0).to(tl.int64)[:, None] * width
        values = tl.load(kv + record + latent[None, :], mask=valid[:, None], other=0.0)  # [keys, latent]
        turned = tl.load(kv + record + LATENT + rope[None, :], mask=valid[:, None], other=0.0)
        scores = tl.dot(q_latent, tl.trans(values))
        scores = tl.dot(q_rope, tl.trans(turned), scores) * LOG2_SCALE
        scores = tl.where(valid[None, :], scores, float("-inf"))
        after = tl.maximum(top, tl.max(scores, axis=1))
        decay = tl.exp2(top - after)
        p = tl.exp2(scores - after[:, None])
        total = total * decay + tl.sum(p, axis=1)
        acc = tl.dot(p.to(values.dtype), values, acc * decay[:, None])
        top = after
    empty = total == 0
    safe = tl.where(empty, 1.0, total)
    acc = acc / safe[:, None]
    natural = (top + tl.log2(safe)) * 0.6931471805599453
    tl.store(out + line * LATENT + latent[None, :], acc.to(out.dtype.element_ty), mask=head_exists[:, None])
    tl.store(lse + row * HEADS + head, tl.where(empty, float("-inf"), natural), mask=head_exists)


def sparse_mla(
    q: jax.Array,
    kv: jax.Array,
    topk_indices: jax.Array,
    *,
    softmax_scale: float,
    kv_lora_rank: int,
    num_valid: jax.Array | None,
    out_dtype: jnp.dtype,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.sparse_mla.api.sparse_mla`."""
    rows, heads, width = q.shape
    listed = topk_indices.shape[1]
    if num_valid is None:
        num_valid = jnp.full((rows,), listed, jnp.int32)
    out, lse = jax_triton.triton_call(
        q,
        kv,
        topk_indices,
        num_valid,
        kernel=attention_kernel,
        out_shape=[
            jax.ShapeDtypeStruct((rows, heads, kv_lora_rank), out_dtype),
            jax.ShapeDtypeStruct((rows, heads), jnp.float32),
        ],
        grid=(rows, -(-heads // BLOCK_HEADS)),
        num_warps=WARPS,
        num_stages=STAGES,
        LOG2_SCALE=softmax_scale * 1.4426950408889634,
        KEYS=kv.shape[0],
        HEADS=heads,
        LISTED=listed,
        LATENT=kv_lora_rank,
        ROPE=width - kv_lora_rank,
        BLOCK_HEADS=BLOCK_HEADS,
        BLOCK_KEYS=BLOCK_KEYS,
    )
    return out, lse
