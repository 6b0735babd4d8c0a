"""Residual connections: the plain one, and manifold-constrained hyper-connections (arXiv:2512.24880)."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dsa_jax.config import HyperConnectionsConfig, ModelConfig
from dsa_jax.layers.linear import contract
from dsa_jax.params import declare

# Rounds of normalisation in one kernel of a GPU: all of them take a minute to compile, these three a second.
ROUNDS_IN_KERNEL = 3


def open_streams(x: jax.Array, config: HyperConnectionsConfig | None) -> jax.Array:
    """The residual of embeddings [T, hidden]: themselves, or a copy for each stream [T, streams, hidden]."""
    if config is None:
        return x
    return jnp.broadcast_to(x[:, None], (x.shape[0], config.streams, x.shape[1]))


def close_streams(x: jax.Array, config: HyperConnectionsConfig | None) -> jax.Array:
    """The output [T, hidden] of a residual: itself, or the mean of its streams."""
    return x if config is None else jnp.mean(x.astype(jnp.float32), axis=1).astype(x.dtype)


Entries = list[list[jax.Array]]


def _normalised(matrix: Entries, eps: float) -> Entries:
    """Entries [i][j] divided by the sum of their row."""
    sums = [functools.reduce(jnp.add, row) + eps for row in matrix]
    return [[entry / total for entry in row] for row, total in zip(matrix, sums, strict=True)]


def _transposed(matrix: Entries) -> Entries:
    return [list(column) for column in zip(*matrix, strict=True)]


def sinkhorn_rounds(matrix: Entries, *, rounds: int, eps: float, at_once: int) -> Entries:
    """Normalise rows, then columns, `rounds` times; `at_once` rounds of the loop are one expression."""

    def several(matrix: Entries, count: int) -> Entries:
        for _ in range(count):
            matrix = _transposed(_normalised(_transposed(_normalised(matrix, eps)), eps))
        return matrix

    loops, rest = divmod(rounds, at_once)
    return jax.lax.fori_loop(0, loops, lambda _, matrix: several(matrix, at_once), several(matrix, rest))


def doubly_stochastic(logits: jax.Array, *, iterations: int, eps: float) -> jax.Array:
    """Matrices [..., n, n] whose rows and columns sum to 1 (Sinkhorn and Knopp), columns normalised last.

    Each entry is an array of its own: a whole round is then elementwise, and XLA makes one kernel of several rounds,
    where a sum over an axis of the matrix ends a kernel and starts the next.
    """
    n = logits.shape[-1]
    matrix = jax.nn.softmax(logits, axis=-1) + eps
    entries = [[matrix[..., i, j] for j in range(n)] for i in range(n)]
    entries = _transposed(_normalised(_transposed(entries), eps))
    rounds = functools.partial(sinkhorn_rounds, rounds=iterations - 1, eps=eps)
    # On CPUs each entry becomes a function that computes all others anew, back to where the expression starts.
    entries = jax.lax.platform_dependent(
        entries,
        cpu=functools.partial(rounds, at_once=1),
        default=functools.partial(rounds, at_once=ROUNDS_IN_KERNEL),
    )
    return jnp.stack([jnp.stack(row, axis=-1) for row in entries], axis=-2)


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
        # The norm is a factor of each token: behind the product, nothing of the streams' size is made in float32.
        norm = jax.lax.rsqrt(jnp.mean(streams * streams, axis=(1, 2))[:, None] + self.norm_eps)
        flat = x.reshape(x.shape[0], -1)
        logits = norm * contract("ti,gi->tg", flat, self.fn[...].astype(x.dtype), jnp.dtype(jnp.float32))
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
        streams = (after[:, :, None] * y.astype(jnp.float32)[:, None] + streams).astype(x.dtype)
        # Without it XLA keeps the float32 values too, twice the bytes, for those who read the streams in float32.
        return jax.lax.optimization_barrier(streams)


def residual(config: ModelConfig, *, stack=None) -> Residual:
    """The model's kind of residual connection."""
    return Residual() if config.hyper_connections is None else HyperConnection(config, stack=stack)
