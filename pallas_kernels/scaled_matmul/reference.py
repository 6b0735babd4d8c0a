"""The definition of block-scaled FP8 products in plain jnp."""

import jax
import jax.numpy as jnp

BLOCK = 128

# `lax.ragged_dot` contracts rows [m, k] with weights [g, n, k].
_DIMENSIONS = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)


def _at(x: jax.Array, index: jax.Array, axis: int) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(x, index, axis, keepdims=False)


def grouped_scaled_matmul(
    x: jax.Array,
    x_scale: jax.Array,
    weights: jax.Array,
    weight_scales: jax.Array,
    group_sizes: jax.Array,
    first_group: jax.Array,
    *,
    out_dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """See `pallas_kernels.scaled_matmul.api.grouped_scaled_matmul`; float32 throughout, a block of K at a time."""
    rows, columns, groups = x.shape[0], weights.shape[1], group_sizes.shape[0]
    weights, weight_scales = (
        jax.lax.dynamic_slice_in_dim(array, first_group, groups) for array in (weights, weight_scales)
    )
    group = jnp.searchsorted(jnp.cumsum(group_sizes), jnp.arange(rows, dtype=jnp.int32), side="right")
    group = jnp.minimum(group, groups - 1)

    def add(total, block):
        at = block * BLOCK
        part = jax.lax.ragged_dot_general(
            jax.lax.dynamic_slice_in_dim(x, at, BLOCK, 1).astype(jnp.float32),
            jax.lax.dynamic_slice_in_dim(weights, at, BLOCK, 2).astype(jnp.float32),
            group_sizes,
            _DIMENSIONS,
            precision=jax.lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )
        scale = jnp.repeat(_at(weight_scales, block, 2), BLOCK, axis=1)[group, :columns]  # [M, N]
        return total + part * (_at(x_scale, block, 0)[:, None] * scale), None

    blocks = jnp.arange(x.shape[1] // BLOCK, dtype=jnp.int32)
    total, _ = jax.lax.scan(add, jnp.zeros((rows, columns), jnp.float32), blocks)
    return total.astype(out_dtype)


def scaled_matmul(
    x: jax.Array,
    x_scale: jax.Array,
    weight: jax.Array,
    weight_scale: jax.Array,
    *,
    out_dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """See `pallas_kernels.scaled_matmul.api.scaled_matmul`; float32 throughout, a block of K at a time."""
    columns = weight.shape[0]

    def add(total, block):
        at = block * BLOCK
        part = jnp.einsum(
            "mk,nk->mn",
            jax.lax.dynamic_slice_in_dim(x, at, BLOCK, 1).astype(jnp.float32),
            jax.lax.dynamic_slice_in_dim(weight, at, BLOCK, 1).astype(jnp.float32),
            precision=jax.lax.Precision.HIGHEST,
        )
        scale = jnp.repeat(_at(weight_scale, block, 1), BLOCK)[:columns]
        return total + part * (_at(x_scale, block, 0)[:, None] * scale), None

    blocks = jnp.arange(x.shape[1] // BLOCK, dtype=jnp.int32)
    total, _ = jax.lax.scan(add, jnp.zeros((x.shape[0], columns), jnp.float32), blocks)
    return total.astype(out_dtype)
