"""Public functions of block-scaled FP8 products."""

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.checks import check_array, check_dtype
from pallas_kernels.scaled_matmul import mosaic_hopper, reference

BLOCK = 128
OUT_DTYPES = (jnp.bfloat16, jnp.float32)
IMPLEMENTATIONS = ("reference", "mosaic_hopper")


def _check_rows(op: str, x, x_scale) -> None:
    check_array(op, "x", x, ("M", "K"), (jnp.float8_e4m3fn,))
    if x.shape[1] == 0 or x.shape[1] % BLOCK:
        raise ValueError(f"{op}: columns of x must be a positive multiple of {BLOCK}, got shape {list(x.shape)}")
    check_array(op, "x_scale", x_scale, (x.shape[1] // BLOCK, x.shape[0]), (jnp.float32,))


def _choose(op: str, implementation: str | None, rows: int, contracted: int, columns: int) -> str:
    # The definition comes first: the kernel has been compiled for Hopper and not yet run there.
    candidates: dict[str, tuple[dispatch.Support, dispatch.Support]] = {
        "reference": (dispatch.always, dispatch.always),
        "mosaic_hopper": (
            lambda: mosaic_hopper.why_not(rows, contracted, columns),
            dispatch.needs_compute_capability(9),
        ),
    }
    return dispatch.resolve(op, implementation, candidates)


def scaled_matmul(
    x: jax.Array,
    x_scale: jax.Array,
    weight: jax.Array,
    weight_scale: jax.Array,
    *,
    out_dtype: jax.typing.DTypeLike = jnp.bfloat16,
    implementation: str | None = None,
) -> jax.Array:
    """Product of rows with a weight, both e4m3 with scales for blocks of the contracted dimension (DeepSeek-V3).

    `out[m, n] = sum_b x_scale[b, m] * weight_scale[n // 128, b] * (x[m, b] . weight[n, b])` over blocks b of 128
    columns: each block's product is scaled in float32 and added in float32, as DeepGEMM does. Not differentiable.

    Args:
      x: Rows [M, K] float8_e4m3fn; K is a multiple of 128.
      x_scale: Scale of each row's block [K / 128, M] float32, see `quantize_rows`.
      weight: [N, K] float8_e4m3fn, in the orientation of checkpoints.
      weight_scale: Scale of each block of 128 x 128 [ceil(N / 128), K / 128] float32; the last block of rows may be
        partial.
      out_dtype: bfloat16 or float32.
      implementation: "mosaic_hopper" or "reference"; None takes the reference until the kernel has run on a GPU.

    Returns:
      [M, N] of out_dtype.

    Raises:
      ValueError: An argument has the wrong shape or dtype, or the implementation cannot run the call.
    """
    op = "scaled_matmul"
    _check_rows(op, x, x_scale)
    rows, contracted = x.shape
    check_array(op, "weight", weight, ("N", contracted), (jnp.float8_e4m3fn,))
    columns = weight.shape[0]
    blocks = (-(-columns // BLOCK), contracted // BLOCK)
    check_array(op, "weight_scale", weight_scale, blocks, (jnp.float32,))
    out_dtype = check_dtype(op, "out_dtype", out_dtype, OUT_DTYPES)
    if _choose(op, implementation, rows, contracted, columns) == "reference":
        return reference.scaled_matmul(x, x_scale, weight, weight_scale, out_dtype=out_dtype)
    return mosaic_hopper.scaled_matmul(x, x_scale, weight, weight_scale, out_dtype=out_dtype)


def grouped_scaled_matmul(
    x: jax.Array,
    x_scale: jax.Array,
    weights: jax.Array,
    weight_scales: jax.Array,
    group_sizes: jax.Array,
    *,
    first_group: jax.Array | None = None,
    out_dtype: jax.typing.DTypeLike = jnp.bfloat16,
    implementation: str | None = None,
) -> jax.Array:
    """`scaled_matmul` of consecutive groups of rows, each with its own weight; the groups are known on the device only.

    The work is that of the groups' rows, not of all M.

    Args:
      x: Rows [M, K] float8_e4m3fn, sorted by group; K is a multiple of 128.
      x_scale: Scale of each row's block [K / 128, M] float32.
      weights: [W, N, K] float8_e4m3fn, those of the groups among them.
      weight_scales: [W, ceil(N / 128), K / 128] float32.
      group_sizes: Rows of each group [G] int32, not negative; their sum may be below M and must not exceed it.
      first_group: Which weight is the first group's, an int32 scalar below W - G + 1; None means 0, and then G = W. The
        experts of one layer can be named so inside a stack of layers, without being copied out of it.
      out_dtype: bfloat16 or float32.
      implementation: As in `scaled_matmul`.

    Returns:
      [M, N] of out_dtype. Rows behind the last group are unspecified.

    Raises:
      ValueError: An argument has the wrong shape or dtype, or the implementation cannot run the call.
    """
    op = "grouped_scaled_matmul"
    _check_rows(op, x, x_scale)
    rows, contracted = x.shape
    check_array(op, "weights", weights, ("G", "N", contracted), (jnp.float8_e4m3fn,))
    stored, columns, _ = weights.shape
    if stored == 0:
        raise ValueError(f"{op}: weights must have groups, got shape {list(weights.shape)}")
    blocks = (stored, -(-columns // BLOCK), contracted // BLOCK)
    check_array(op, "weight_scales", weight_scales, blocks, (jnp.float32,))
    check_array(op, "group_sizes", group_sizes, (stored if first_group is None else "G",), (jnp.int32,))
    if not 0 < group_sizes.shape[0] <= stored:
        raise ValueError(f"{op}: group_sizes must name 1 to {stored} groups, got shape {list(group_sizes.shape)}")
    if first_group is None:
        first_group = jnp.int32(0)
    check_array(op, "first_group", first_group, (), (jnp.int32,))
    out_dtype = check_dtype(op, "out_dtype", out_dtype, OUT_DTYPES)
    chosen = _choose(op, implementation, rows, contracted, columns)
    run = reference.grouped_scaled_matmul if chosen == "reference" else mosaic_hopper.grouped_scaled_matmul
    return run(x, x_scale, weights, weight_scales, group_sizes, first_group, out_dtype=out_dtype)
