"""Public function of sparse multi-head latent attention."""

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.checks import check_array, check_positive, check_same_dtype
from pallas_kernels.sparse_mla import plan, reference

OP = "sparse_mla"
DEFAULT_WORKSPACE_BYTES = 1 << 30


def sparse_mla(
    q: jax.Array,
    kv: jax.Array,
    topk_indices: jax.Array,
    *,
    softmax_scale: float,
    kv_lora_rank: int,
    num_valid: jax.Array | None = None,
    out_dtype: jax.typing.DTypeLike | None = None,
    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attend each query row to its selected rows of the compressed KV only: O(T * K), never O(T * N).

    `softmax(softmax_scale * q . kv[ids]) @ kv[ids, :kv_lora_rank]`, accumulated in float32 (DeepSeek-V2's MLA in its
    absorbed form, DeepSeek-V3.2's sparsity). Not differentiable.

    Args:
      q: Absorbed queries [T, H, Dk], float32 or bfloat16; Dk is latent plus rope, 576 in the released models.
      kv: Compressed KV [N, Dk] of the same dtype, one head shared by all.
      topk_indices: Selected rows of `kv` [T, K] int32, in any order. An id below 0 or at or above N is skipped, and
        an id listed twice counts twice.
      softmax_scale: Factor on the logits, usually `(nope + rope)**-0.5`; never derived from Dk.
      kv_lora_rank: How many leading columns of a row are its value; 512 in the released models.
      num_valid: How many leading ids of each row count [T] int32; the rest is ignored. None means all.
      out_dtype: float32 or bfloat16; None means q's dtype.
      workspace_bytes: Bound on what is held at once for the call: gathered rows for "reference", reordered lists of
        ids for "mosaic_hopper".
      implementation: "mosaic_hopper" (bfloat16 rows of 512 or 576 columns on compute capability 9) or "reference";
        None takes the first that supports the call and the device.

    Returns:
      Output [T, H, kv_lora_rank] and the natural log-sum-exp of the scaled logits [T, H] float32. A row without a
      valid id gives 0 and -inf.

    Raises:
      ValueError: An argument has the wrong shape or dtype, or the implementation cannot run the call.
    """
    check_array(OP, "q", q, ("T", "H", "Dk"), (jnp.float32, jnp.bfloat16))
    rows, _, width = q.shape
    check_array(OP, "kv", kv, ("N", width), (jnp.float32, jnp.bfloat16))
    check_same_dtype(OP, "q", q, "kv", kv)
    check_array(OP, "topk_indices", topk_indices, (rows, "K"), (jnp.int32,))
    check_positive(OP, "kv_lora_rank", kv_lora_rank)
    check_positive(OP, "workspace_bytes", workspace_bytes)
    if kv_lora_rank > width:
        raise ValueError(f"{OP}: {kv_lora_rank=} exceeds the width {width} of kv")
    if num_valid is not None:
        check_array(OP, "num_valid", num_valid, (rows,), (jnp.int32,))
    out_dtype = jnp.dtype(q.dtype if out_dtype is None else out_dtype)
    if out_dtype not in (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)):
        raise ValueError(f"{OP}: out_dtype must be float32 or bfloat16, got {out_dtype.name}")
    chosen = dispatch.resolve(
        OP,
        implementation,
        {
            "mosaic_hopper": (
                lambda: plan.unsupported(q, kv, topk_indices.shape[1], softmax_scale, kv_lora_rank),
                dispatch.needs_compute_capability(9),
            ),
            "reference": (dispatch.always, dispatch.always),
        },
    )
    if chosen == "mosaic_hopper":
        return plan.sparse_mla(
            q,
            kv,
            topk_indices,
            softmax_scale=softmax_scale,
            num_valid=num_valid,
            out_dtype=out_dtype,
            workspace_bytes=workspace_bytes,
        )
    return reference.sparse_mla(
        q,
        kv,
        topk_indices,
        softmax_scale=softmax_scale,
        kv_lora_rank=kv_lora_rank,
        num_valid=num_valid,
        out_dtype=out_dtype,
        workspace_bytes=workspace_bytes,
    )
