"""Public function of the lightning indexer's scores."""

import importlib.util

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.checks import check_array, check_same_dtype
from pallas_kernels.lightning_indexer import mosaic_hopper, reference

OP = "lightning_indexer"
OPERAND_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn)


def check_operands(op: str, q, k, weights, key_start, key_end, k_scale) -> None:
    """Raise ValueError unless the arguments are those of `lightning_indexer`, checked on behalf of `op`."""
    check_array(op, "q", q, ("T", "Hi", "D"), OPERAND_DTYPES)
    rows, heads, dim = q.shape
    if 0 in (heads, dim):
        raise ValueError(f"{op}: q must have heads and columns, got shape {list(q.shape)}")
    check_array(op, "k", k, ("S", dim), OPERAND_DTYPES)
    check_same_dtype(op, "q", q, "k", k)
    check_array(op, "weights", weights, (rows, heads), (jnp.float32,))
    check_array(op, "key_start", key_start, (rows,), (jnp.int32,))
    check_array(op, "key_end", key_end, (rows,), (jnp.int32,))
    if k_scale is not None:
        check_array(op, "k_scale", k_scale, (k.shape[0],), (jnp.float32,))


def _why_not_triton(q: jax.Array) -> str | None:
    if importlib.util.find_spec("jax_triton") is None:
        return "jax_triton is not installed"
    if q.dtype == jnp.float32:
        return "float32 operands would be rounded to TF32"
    dim = q.shape[2]
    return None if dim >= 16 and dim & (dim - 1) == 0 else f"head dimension {dim} is not a power of two from 16 on"


def lightning_indexer(
    q: jax.Array,
    k: jax.Array,
    weights: jax.Array,
    key_start: jax.Array,
    key_end: jax.Array,
    *,
    k_scale: jax.Array | None = None,
    clean_logits: bool = True,
    implementation: str | None = None,
) -> jax.Array:
    """Score every key of each query row's range (DeepSeek-V3.2, "lightning indexer").

    `out[t, j] = k_scale[j] * sum_h weights[t, h] * relu(q[t, h] . k[j])` for `key_start[t] <= j < key_end[t]`, summed
    in float32, where `relu(x)` is x if x > 0 and else 0, NaN included. Not differentiable.

    Args:
      q: Index queries [T, Hi, D], float32, bfloat16 or float8_e4m3fn.
      k: Index keys [S, D] of the same dtype, one head shared by all query heads.
      weights: Head weights [T, Hi] float32, of either sign. They carry every constant: `Hi**-0.5`, the score scale
        `D**-0.5` and, for float8, the scale of q's quantisation.
      key_start: First visible key of each row [T] int32.
      key_end: One past the last visible key of each row [T] int32; a row with `key_end <= key_start` sees none, and
        a range that reaches outside [0, S) is cut to it.
      k_scale: Scale of each key [S] float32, or None for 1.
      clean_logits: Whether scores outside a row's range are set to -inf. When False they are unspecified, which
        is cheaper; use it only with a consumer that respects the same ranges, such as `topk`.
      implementation: "mosaic_hopper", "triton" or "reference"; None takes the first that supports the call and
        the device.

    Returns:
      Scores [T, S] float32.

    Raises:
      ValueError: An argument has the wrong shape or dtype, or the implementation cannot run the call.
    """
    check_operands(OP, q, k, weights, key_start, key_end, k_scale)
    chosen = dispatch.resolve(
        OP,
        implementation,
        {
            "mosaic_hopper": (lambda: mosaic_hopper.why_not(q), dispatch.needs_compute_capability(9)),
            "triton": (lambda: _why_not_triton(q), dispatch.needs_compute_capability(8, 10, 12)),
            "reference": (dispatch.always, dispatch.always),
        },
    )
    if chosen == "mosaic_hopper":
        score = mosaic_hopper.lightning_indexer
    elif chosen == "triton":
        from pallas_kernels.lightning_indexer import triton  # needs packages that are optional

        score = triton.lightning_indexer
    else:
        score = reference.lightning_indexer
    return score(q, k, weights, key_start, key_end, k_scale=k_scale, clean_logits=clean_logits)
