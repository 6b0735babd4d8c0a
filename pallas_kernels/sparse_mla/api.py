"""Public function of sparse multi-head latent attention."""

import importlib.util

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.checks import check_array, check_dtype, check_positive, check_positive_number, check_same_dtype
from pallas_kernels.ckv_records.formats import RecordFormat
from pallas_kernels.sparse_mla import plan, reference

OP = "sparse_mla"
DEFAULT_WORKSPACE_BYTES = 1 << 30


def _why_not_triton(q: jax.Array, kv: jax.Array, listed: int, kv_lora_rank: int) -> str | None:
    if importlib.util.find_spec("jax_triton") is None:
        return "jax_triton is not installed"
    if q.dtype != jnp.bfloat16:
        return f"it takes bfloat16, not {q.dtype.name}"
    for name, size in (("kv_lora_rank", kv_lora_rank), ("rope width", q.shape[2] - kv_lora_rank)):
        if size < 16 or size & (size - 1):
            return f"{name} {size} is not a power of two from 16 on"
    if 0 in (q.shape[0], q.shape[1], kv.shape[0], listed):
        return "a dimension is empty"
    return None


def sparse_mla(
    q: jax.Array,
    kv: jax.Array,
    topk_indices: jax.Array,
    *,
    softmax_scale: float,
    kv_lora_rank: int,
    num_valid: jax.Array | None = None,
    kv_format: RecordFormat | None = None,
    out_dtype: jax.typing.DTypeLike | None = None,
    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attend each query row to its selected rows of the compressed KV only: O(T * K), never O(T * N).

    `softmax(softmax_scale * q . kv[ids]) @ kv[ids, :kv_lora_rank]`, accumulated in float32 (DeepSeek-V2's MLA in its
    absorbed form, DeepSeek-V3.2's sparsity). Not differentiable.

    Args:
      q: Absorbed queries [T, H, Dk], float32 or bfloat16; Dk is latent plus rope, 576 in the released models.
      kv: Compressed KV [N, Dk] of the same dtype, one head shared by all; or records [N, kv_format.record_width].
      topk_indices: Selected rows of `kv` [T, K] int32, in any order. An id below 0 or at or above N is skipped, and
        an id listed twice counts twice.
      softmax_scale: Factor on the logits, static and positive, usually `(nope + rope)**-0.5`; never derived from Dk.
      kv_lora_rank: How many leading columns of a row are its value; 512 in the released models.
      num_valid: How many leading ids of each row count [T] int32; the rest is ignored. None means all.
      kv_format: Format of the records in `kv`, whose values have the width Dk; only the selected records are ever
        unpacked. None means plain values of q's dtype.
      out_dtype: float32 or bfloat16; None means q's dtype.
      workspace_bytes: Bound on what is held at once for the call: gathered rows for "reference", reordered lists of
        ids for "mosaic_hopper".
      implementation: "mosaic_hopper" (rows of 512 or 576 columns, bfloat16 or `fp8_ds_mla` records, on compute
        capability 9), "triton" (bfloat16, on other NVIDIA GPUs, needs jax_triton) or "reference"; None takes the first
        that supports the call and the device, and for packed records always "reference".

    Returns:
      Output [T, H, kv_lora_rank] and the natural log-sum-exp of the scaled logits [T, H] float32. A row without a
      valid id gives 0 and -inf.

    Raises:
      ValueError: An argument has the wrong shape or dtype, or the implementation cannot run the call.
    """
    check_array(OP, "q", q, ("T", "H", "Dk"), (jnp.float32, jnp.bfloat16))
    rows, _, width = q.shape
    if kv_format is None:
        check_array(OP, "kv", kv, ("N", width), (jnp.float32, jnp.bfloat16))
        check_same_dtype(OP, "q", q, "kv", kv)
    else:
        check_array(OP, "kv", kv, ("N", kv_format.record_width), (kv_format.dtype,))
        if kv_format.width != width:
            raise ValueError(f"{OP}: kv_format {kv_format.name!r} holds {kv_format.width} values, q has {width}")
    check_array(OP, "topk_indices", topk_indices, (rows, "K"), (jnp.int32,))
    softmax_scale = check_positive_number(OP, "softmax_scale", softmax_scale)
    kv_lora_rank = check_positive(OP, "kv_lora_rank", kv_lora_rank)
    workspace_bytes = check_positive(OP, "workspace_bytes", workspace_bytes)
    if kv_lora_rank > width:
        raise ValueError(f"{OP}: {kv_lora_rank=} exceeds the width {width} of kv")
    if num_valid is not None:
        check_array(OP, "num_valid", num_valid, (rows,), (jnp.int32,))
    out_dtype = check_dtype(OP, "out_dtype", q.dtype if out_dtype is None else out_dtype, (jnp.float32, jnp.bfloat16))
    q, kv, topk_indices = jnp.asarray(q), jnp.asarray(kv), jnp.asarray(topk_indices)

    listed = topk_indices.shape[1]
    packed = None if kv_format is None else f"it does not read records ({kv_format.name})"
    # Reading packed records compiles but has not run on a GPU yet: only its name chooses it.
    is_packed = kv_format is not None and kv_format.encoding != "plain"
    unproven = "its reading of packed records must be asked for by name" if is_packed else None
    on_hopper = dispatch.needs_compute_capability(9)

    chosen = dispatch.resolve(
        OP,
        implementation,
        {
            "mosaic_hopper": (
                lambda: plan.unsupported(q, kv, listed, softmax_scale, kv_lora_rank, kv_format),
                lambda: unproven or on_hopper(),
            ),
            "triton": (
                lambda: packed or _why_not_triton(q, kv, listed, kv_lora_rank),
                dispatch.needs_compute_capability(8, 10, 12),
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
            kv_format=kv_format,
            out_dtype=out_dtype,
            workspace_bytes=workspace_bytes,
        )
    if chosen == "triton":
        from pallas_kernels.sparse_mla import triton  # needs packages that are optional

        return triton.sparse_mla(
            q,
            kv,
            topk_indices,
            softmax_scale=softmax_scale,
            kv_lora_rank=kv_lora_rank,
            num_valid=num_valid,
            out_dtype=out_dtype,
        )
    return reference.sparse_mla(
        q,
        kv,
        topk_indices,
        softmax_scale=softmax_scale,
        kv_lora_rank=kv_lora_rank,
        num_valid=num_valid,
        kv_format=kv_format,
        out_dtype=out_dtype,
        workspace_bytes=workspace_bytes,
    )
