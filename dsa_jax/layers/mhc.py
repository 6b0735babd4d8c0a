"""Residual connections: the plain one, and manifold-constrained hyper-connections (arXiv:2512.24880)."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dsa_jax.config import HyperConnectionsConfig, ModelConfig
from dsa_jax.params import declare


def open_streams(x: jax.Array, config: HyperConnectionsConfig | None) -> jax.Array:
    """The residual of embeddings [T, hidden]: themselves, or a copy for each stream [T, streams, hidden]."""
    if config is None:
        return x
    return jnp.broadcast_to(x[:, None], (x.shape[0], config.streams, x.shape[1]))


def close_streams(x: jax.Array, config: HyperConnectionsConfig | None) -> jax.Array:
    """The output [T, hidden] of a residual: itself, or the mean of its streams."""
    return x if config is None else jnp.mean(x.astype(jnp.float32), axis=1).astype(x.dtype)


def doubly_stochastic(logits: jax.Array, *, iterations: int, eps: float) -> jax.Array:
    """Matrices [..., n, n] whose rows and columns sum to 1 (Sinkhorn and Knopp), columns normalised last."""
    matrix = jax.nn.softmax(logits, axis=-1) + eps
    matrix = matrix / (jnp.sum(matrix, axis=-2, keepdims=True) + eps)

    def normalised(_, matrix: jax.Array) -> jax.Array:
        matrix = matrix / (jnp.sum(matrix, axis=-1, keepdims=True) + eps)
        return matrix / (jnp.sum(matrix, axis=-2, keepdims=True) + eps)

    return jax.lax.fori_loop(0, iterations - 1, normalised, matrix)


class Residual(nnx.Module):
    """`x + y` around a sublayer."""

    def read(self, x: jax.Array) -> tuple[jax.Array, Any]:
        """Input of the sublayer, and what `write` needs."""
        return x, None

    def write(self, x: jax.Array, y: jax.Array, gates: Any) -> jax.Array:
        """The residual with the sublayer's output added."""
        return x + y


class HyperConnection(Residual):
    """Several streams that a sublayer reads a mixture of and writes to; gates and mixing depend on the token."""

    def __init__(self, config: ModelConfig, *, stack=None):
        """Declare the parameters, replicated over TP."""
        assert config.hyper_connections is not None
        streams = config.hyper_connections.streams
        gates = streams * (2 + streams)
        self.fn = declare(gates, streams * config.hidden_size, stack=stack)
        self.base = declare(gates, stack=stack, dtype=jnp.float32)
        self.scale = declare(3, stack=stack, dtype=jnp.float32)
        self.config = config.hyper_connections
        self.norm_eps = config.rms_norm_eps

    def read(self, x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Mix the streams x [T, n, hidden] to the sublayer's input [T, hidden].

        Returns:
          The input; the streams' gates of the output [T, n] and their mixing [T, from, to], both float32.
        """
        n, eps = self.config.streams, self.config.eps
        streams = x.astype(jnp.float32)
        flat = streams.reshape(x.shape[0], -1)
        flat = flat * jax.lax.rsqrt(jnp.mean(flat * flat, axis=-1, keepdims=True) + self.norm_eps)
        weight = self.fn[...].astype(jnp.float32)
        logits = jnp.einsum("ti,gi->tg", flat, weight, precision=jax.lax.Precision.HIGHEST)
        scale = jnp.repeat(self.scale[...], jnp.array([n, n, n * n]), total_repeat_length=n * (2 + n))
        logits = logits * scale + self.base[...]
        before = jax.nn.sigmoid(logits[:, :n]) + eps
        after = 2 * jax.nn.sigmoid(logits[:, n : 2 * n])
        mixing = logits[:, 2 * n :].reshape(-1, n, n)
        mixing = doubly_stochastic(mixing, iterations=self.config.sinkhorn_iterations, eps=eps)
        # Sums over few streams: elementwise, so that no matmul precision enters the residual.
        return jnp.sum(before[:, :, None] * streams, axis=1).astype(x.dtype), (after, mixing)

    def write(self, x: jax.Array, y: jax.Array, gates: tuple[jax.Array, jax.Array]) -> jax.Array:
        """Mix the streams and add the output y [T, hidden] to each by its gate."""
        after, mixing = gates
        streams = jnp.sum(mixing[..., None] * x.astype(jnp.float32)[:, :, None], axis=1)
        return (after[:, :, None] * y.astype(jnp.float32)[:, None] + streams).astype(x.dtype)


def residual(config: ModelConfig, *, stack=None) -> Residual:
    """The model's kind of residual connection."""
    return Residual() if config.hyper_connections is None else HyperConnection(config, stack=stack)
