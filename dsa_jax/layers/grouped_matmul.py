"""Grouped matmul of the experts through jax's own kernels."""

import jax
import jax.numpy as jnp

from dsa_jax.fp8_weights import Fp8Matmul, scale_whole_blocks
from dsa_jax.layers.linear import precision_for
from dsa_jax.quantization import dequantize_blocks
from pallas_kernels.scaled_matmul import grouped_scaled_matmul

# `lax.ragged_dot` contracts rows [m, k] with weights [g, n, k]: the orientation of the checkpoints.
_DIMENSIONS = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)


def _portable(rows: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
    out = jax.lax.ragged_dot_general(
        rows,
        weights,
        group_sizes,
        _DIMENSIONS,
        precision=precision_for(rows.dtype),
        preferred_element_type=jnp.float32,
    )
    return out.astype(rows.dtype)


def _hopper(rows: jax.Array, weights: jax.Array, group_sizes: jax.Array) -> jax.Array:
    # Imported here: the module needs a GPU build of Mosaic's dialects and absl.
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot

    return ragged_dot(
        rows,
        weights,
        group_sizes=group_sizes,
        block_m=128,
        block_n=128,
        block_k=64,
        max_concurrent_steps=4,
        grid_block_n=8,
        transpose_rhs=True,
    )


def _dequantized(weights: jax.Array, scale: jax.Array, block: tuple[int, int], dtype: jnp.dtype) -> jax.Array:
    if any(size % width for size, width in zip(weights.shape[1:], block, strict=True)):
        return jax.vmap(lambda w, s: dequantize_blocks(w, s, block_size=block))(weights, scale).astype(dtype)
    return scale_whole_blocks(weights, scale, block).astype(dtype)


def grouped_matmul(
    rows: jax.Array,
    weights: jax.Array,
    group_sizes: jax.Array,
    *,
    scale: jax.Array | None = None,
    block: tuple[int, int] | None = None,
) -> jax.Array:
    """Multiply consecutive groups of rows with their group's weight.

    On an NVIDIA GPU `lax.ragged_dot` is a dense product over all groups; jax's Mosaic kernel for Hopper computes only
    what the groups ask for and is chosen there for the shapes it takes.

    Args:
      rows: [M, K] float32 or bfloat16, sorted by group.
      weights: [G, N, K] of the same dtype.
      group_sizes: Rows of each group [G] int32; their sum may be below M.
      scale: Scales [G, blocks of N, blocks of K] float32 of weights in e4m3, or None.
      block: Rows and columns of a block of the scales.

    Returns:
      [M, N] of rows' dtype. Rows behind the last group are unspecified.
    """
    if scale is not None:
        assert block is not None
        weights = _dequantized(weights, scale, block, rows.dtype)
    hopper_takes = rows.dtype == jnp.bfloat16 and rows.shape[1] % 64 == 0 and weights.shape[1] % 128 == 0
    if not hopper_takes:
        return _portable(rows, weights, group_sizes)
    return jax.lax.platform_dependent(rows, weights, group_sizes, cuda=_hopper, default=_portable)


def fp8_grouped_matmul(
    rows: tuple[jax.Array, jax.Array],
    weights: jax.Array,
    scale: jax.Array,
    group_sizes: jax.Array,
    matmul: Fp8Matmul,
    dtype: jax.typing.DTypeLike,
    *,
    first: jax.Array,
) -> jax.Array:
    """`grouped_matmul` of quantised rows with weights that stay FP8.

    Args:
      rows: From `Fp8Matmul.quantize`, sorted by group.
      weights: [W, N, K] e4m3, those of the groups among them.
      scale: [W, blocks of N, blocks of K] float32.
      group_sizes: Rows of each group [G] int32; their sum may be below M.
      matmul: How to multiply.
      dtype: dtype of the result, bfloat16 or float32.
      first: Which weight is the first group's, an int32 scalar.

    Returns:
      [M, N]. Rows behind the last group are unspecified.
    """
    options = {"out_dtype": dtype, "implementation": matmul.implementation}
    return grouped_scaled_matmul(*rows, weights, scale, group_sizes, first_group=first, **options)
