"""Public function of the fused scoring and selection."""

import jax

from pallas_kernels import dispatch
from pallas_kernels.checks import check_positive
from pallas_kernels.index_topk import mosaic_hopper, reference
from pallas_kernels.lightning_indexer.api import check_operands

OP = "index_topk"
DEFAULT_WORKSPACE_BYTES = 1 << 30


def index_topk(
    q: jax.Array,
    k: jax.Array,
    weights: jax.Array,
    key_start: jax.Array,
    key_end: jax.Array,
    top_k: int,
    *,
    k_scale: jax.Array | None = None,
    return_scores: bool = False,
    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Select the `top_k` best keys of each query row without holding all scores.

    Equal to `topk(lightning_indexer(q, k, weights, ...), top_k, ...)`, in tiles of rows that keep the scores within
    `workspace_bytes` whatever T is. Not differentiable.

    Args:
      q: Index queries [T, Hi, D], float32, bfloat16 or float8_e4m3fn.
      k: Index keys [S, D] of the same dtype.
      weights: Head weights [T, Hi] float32; see `lightning_indexer`.
      key_start: First visible key of each row [T] int32.
      key_end: One past the last visible key of each row [T] int32; a row with `key_end <= key_start` sees none, and
        a range that reaches outside [0, S) is cut to it.
      top_k: How many keys to keep, static and positive; the model's `index_topk`.
      k_scale: Scale of each key [S] float32, or None for 1.
      return_scores: Whether to return the scores of the selected keys too.
      workspace_bytes: Bound on the scores held at once, in bytes; one row is always processed.
      implementation: "mosaic_hopper" or "reference"; None takes the first that supports the call and
        the device.

    Returns:
      Key ids [T, top_k] int32 relative to `key_start`, valid ones first in unspecified order, then -1; with
      `return_scores` also the scores [T, top_k] float32, -inf where the id is -1.

    Raises:
      ValueError: An argument has the wrong shape or dtype, or the implementation cannot run the call.
    """
    check_operands(OP, q, k, weights, key_start, key_end, k_scale)
    top_k = check_positive(OP, "top_k", top_k)
    workspace_bytes = check_positive(OP, "workspace_bytes", workspace_bytes)
    chosen = dispatch.resolve(
        OP,
        implementation,
        {
            "mosaic_hopper": (lambda: mosaic_hopper.why_not(q, k, top_k), dispatch.needs_compute_capability(9)),
            "reference": (dispatch.always, dispatch.always),
        },
    )
    select = {"mosaic_hopper": mosaic_hopper.index_topk, "reference": reference.index_topk}[chosen]
    return select(
        q,
        k,
        weights,
        key_start,
        key_end,
        top_k,
        k_scale=k_scale,
        return_scores=return_scores,
        workspace_bytes=workspace_bytes,
    )
