"""Linear maps and norms, with weights in the orientation of Hugging Face checkpoints."""

# Modules gain attributes while they are built, which the type checker cannot see.
# pyright: reportAttributeAccessIssue=false

import jax
import jax.numpy as jnp
from flax import nnx

from dsa_jax.fp8_weights import dequantize_shard, matmul_of, multiply_shard
from dsa_jax.params import declare
from dsa_jax.quantization import SCALE_SUFFIX


def precision_for(dtype: jnp.dtype) -> jax.lax.Precision | None:
    """Precision of a matmul: GPUs would round float32 operands to TF32 otherwise."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


def contract(subscripts: str, x: jax.Array, weight: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
    """Einsum of two operands, accumulated in float32 and rounded once to `dtype` (None: x's dtype)."""
    # The output's dtype is asked for as it is: XLA has no batched bfloat16 product with a float32 output on CPUs.
    dtype = x.dtype if dtype is None else dtype
    return jnp.einsum(subscripts, x, weight, precision=precision_for(x.dtype), preferred_element_type=dtype)


class Linear(nnx.Module):
    """`x @ weight.T` with weight [out, in], which may be kept in FP8; see `dsa_jax.fp8_weights`."""

    FP8 = ("weight",)

    def __init__(self, out_features: int, in_features: int, *, axes=(None, None), stack=None, stored=None):
        """Declare the weight; see `dsa_jax.params.declare` for `axes`, `stack` and `stored`."""
        self.weight = declare(out_features, in_features, axes=axes, stack=stack, stored=stored)

    def values(self, dtype: jnp.dtype) -> jax.Array:
        """Share of the weight that this rank holds; in `dtype` if it is kept in FP8, as it is otherwise."""
        scale = getattr(self, "weight" + SCALE_SUFFIX, None)
        return self.weight[...] if scale is None else dequantize_shard(self.weight, scale, dtype)

    def __call__(self, x: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
        """Map x [..., in] to [..., out] of `dtype` (None: x's dtype)."""
        scale = getattr(self, "weight" + SCALE_SUFFIX, None)
        if scale is not None and (matmul := matmul_of(scale)) is not None:
            return multiply_shard(x, self.weight, scale, matmul, x.dtype if dtype is None else dtype)
        return contract("...i,oi->...o", x, self.values(x.dtype), dtype)


class RMSNorm(nnx.Module):
    """Root mean square norm, computed in float32."""

    def __init__(self, features: int, eps: float, *, stack=None):
        """Declare the weight [features]."""
        self.weight = declare(features, stack=stack)
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise the last axis."""
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        return (y * self.weight[...].astype(jnp.float32)).astype(x.dtype)


class LayerNorm(nnx.Module):
    """Layer norm with bias, computed in float32."""

    def __init__(self, features: int, eps: float, *, stack=None):
        """Declare the weight and the bias [features]."""
        self.weight = declare(features, stack=stack)
        self.bias = declare(features, stack=stack)
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise the last axis."""
        y = x.astype(jnp.float32)
        y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        y = y * self.weight[...].astype(jnp.float32) + self.bias[...].astype(jnp.float32)
        return y.astype(x.dtype)
