"""The lightning indexer's scores in Triton, for GPUs without a Mosaic kernel.

Importing it needs jax_triton, which is optional. e4m3 operands are widened to bfloat16 first, which is exact: tensor
cores take e4m3 only from compute capability 8.9 on, and there they accumulate it with fewer bits.
"""

import jax
import jax.numpy as jnp
import jax_triton  # pyright: ignore[reportMissingImports]
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

BLOCK_ROWS, BLOCK_KEYS = 64, 64
WARPS, STAGES = 4, 3


@triton.jit  # pyright: ignore[reportAttributeAccessIssue]
def score_kernel(
    q,
    k,
    weights,
    key_start,
    key_end,
    k_scale,
    out,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    SCALED: tl.constexpr,
    CLEAN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """One block of rows by one block of keys; the heads are summed in registers."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    key = tl.program_id(1) * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
    dim = tl.arange(0, DIM)
    row_exists, key_exists = row < ROWS, key < KEYS
    start = tl.load(key_start + row, mask=row_exists, other=0)
    end = tl.load(key_end + row, mask=row_exists, other=0)
    visible = (key[None, :] >= start[:, None]) & (key[None, :] < end[:, None])  # [rows, keys]
    needed = tl.max(tl.max(visible.to(tl.int32), axis=1), axis=0) > 0
    scores = tl.zeros((BLOCK_ROWS, BLOCK_KEYS), dtype=tl.float32)
    wide_row, wide_key = row.to(tl.int64), key.to(tl.int64)
    if needed:
        keys = tl.load(k + wide_key[None, :] * DIM + dim[:, None], mask=key_exists[None, :], other=0.0)  # [D, keys]
        for head in range(HEADS):
            line = wide_row * HEADS + head
            queries = tl.load(q + line[:, None] * DIM + dim[None, :], mask=row_exists[:, None], other=0.0)
            dots = tl.dot(queries, keys)
            weight = tl.load(weights + line, mask=row_exists, other=0.0)
            scores += weight[:, None] * tl.where(dots > 0, dots, 0.0)
        if SCALED:
            scores *= tl.load(k_scale + key, mask=key_exists, other=0.0)[None, :]
    if needed or CLEAN:
        target = out + wide_row[:, None] * KEYS + wide_key[None, :]
        scores = tl.where(visible, scores, float("-inf"))
        tl.store(target, scores, mask=row_exists[:, None] & key_exists[None, :])


def lightning_indexer(
    q: jax.Array,
    k: jax.Array,
    weights: jax.Array,
    key_start: jax.Array,
    key_end: jax.Array,
    *,
    k_scale: jax.Array | None = None,
    clean_logits: bool = True,
) -> jax.Array:
    """See `pallas_kernels.lightning_indexer.api.lightning_indexer`."""
    (rows, heads, dim), keys = q.shape, k.shape[0]
    if not rows or not keys:
        return jnp.zeros((rows, keys), jnp.float32)
    q, k = q.astype(jnp.bfloat16), k.astype(jnp.bfloat16)
    return jax_triton.triton_call(
        q,
        k,
        weights,
        key_start,
        key_end,
        weights if k_scale is None else k_scale,  # not read without SCALED
        kernel=score_kernel,
        out_shape=jax.ShapeDtypeStruct((rows, keys), jnp.float32),
        grid=(-(-rows // BLOCK_ROWS), -(-keys // BLOCK_KEYS)),
        num_warps=WARPS,
        num_stages=STAGES,
        ROWS=rows,
        KEYS=keys,
        HEADS=heads,
        DIM=dim,
        SCALED=k_scale is not None,
        CLEAN=clean_logits,
        BLOCK_ROWS=BLOCK_ROWS,
        BLOCK_KEYS=BLOCK_KEYS,
    )
