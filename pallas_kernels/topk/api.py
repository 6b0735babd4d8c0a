"""Public function of the exact top-k."""

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.checks import check_array, check_positive
from pallas_kernels.topk import mosaic_hopper, reference

OP = "topk"


def topk(
    scores: jax.Array,
    k: int,
    key_start: jax.Array | None = None,
    key_end: jax.Array | None = None,
    *,
    return_scores: bool = False,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """The k best columns of each row, exactly.

    The set of a row equals sorting its range by (score descending, column ascending). NaN ranks after every number,
    -0.0 equals 0.0, and both infinities are ordinary scores. The result is the same on every device and every run.
    Not differentiable.

    Args:
      scores: [T, S] float32.
      k: How many columns to keep, static and positive; may exceed S.
      key_start: First column of each row's range [T] int32; None means 0. What lies outside a range never
        matters.
      key_end: One past the last column of each row's range [T] int32; None means S. A row with
        `key_end <= key_start` is empty, and a range that reaches outside [0, S) is cut to it.
      return_scores: Whether to return the scores of the selected columns too.
      implementation: "mosaic_hopper" or "reference"; None takes the first that supports the call and
        the device.

    Returns:
      Column ids [T, k] int32 relative to `key_start`: `min(k, key_end - key_start)` valid ones first, in unspecified
      order, then -1. With `return_scores` also their scores [T, k] float32: a zero may lose its sign, and -inf stands
      where the id is -1.

    Raises:
      ValueError: An argument has the wrong shape or dtype, or the implementation cannot run the call.
    """
    check_array(OP, "scores", scores, ("T", "S"), (jnp.float32,))
    k = check_positive(OP, "k", k)
    scores = jnp.asarray(scores)
    rows, columns = scores.shape
    if key_start is None:
        key_start = jnp.zeros((rows,), jnp.int32)
    if key_end is None:
        key_end = jnp.full((rows,), columns, jnp.int32)
    check_array(OP, "key_start", key_start, (rows,), (jnp.int32,))
    check_array(OP, "key_end", key_end, (rows,), (jnp.int32,))
    key_start, key_end = jnp.asarray(key_start), jnp.asarray(key_end)
    chosen = dispatch.resolve(
        OP,
        implementation,
        {
            "mosaic_hopper": (lambda: mosaic_hopper.why_not(columns, k), dispatch.needs_compute_capability(9)),
            "reference": (dispatch.always, dispatch.always),
        },
    )
    select = {"mosaic_hopper": mosaic_hopper.topk, "reference": reference.topk}[chosen]
    return select(scores, k, key_start, key_end, return_scores=return_scores)
