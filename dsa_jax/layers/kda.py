"""Kimi Delta Attention (arXiv:2510.26692): linear attention with a state for each request, on this rank's heads."""

# Modules gain attributes while they are built, which the type checker cannot see.
# pyright: reportAttributeAccessIssue=false

import jax
import jax.numpy as jnp
from flax import nnx

from dsa_jax.config import ModelConfig
from dsa_jax.layers.delta_rule import chunked, decode_step
from dsa_jax.layers.linear import Linear, RMSNorm, precision_for
from dsa_jax.layers.ragged import StateRows
from dsa_jax.params import declare

L2_EPS = 1e-6


class ShortConv(nnx.Module):
    """Taps of a causal convolution of each channel; parameters only."""

    def __init__(self, channels: int, taps: int, *, stack=None):
        """Declare the weight [channels, 1, taps], the latest token last."""
        self.weight = declare(channels, 1, taps, axes=("heads", None, None), stack=stack)


def _unit(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + L2_EPS)


class LinearAttention(nnx.Module):
    """A short convolution, the gated delta rule, and a gated norm."""

    def __init__(self, config: ModelConfig, *, stack=None):
        """Declare the parameters, split by heads over TP."""
        assert config.kda is not None
        kda, hidden = config.kda, config.hidden_size
        heads = {"axes": ("heads", None), "stack": stack}
        self.q_proj, self.k_proj, self.v_proj = (Linear(kda.width, hidden, **heads) for _ in range(3))
        convs = (ShortConv(kda.width, kda.conv_size, stack=stack) for _ in range(3))
        self.q_conv1d, self.k_conv1d, self.v_conv1d = convs
        self.f_a_proj = Linear(kda.head_dim, hidden, stack=stack)
        self.f_b_proj = Linear(kda.width, kda.head_dim, **heads)
        self.dt_bias = declare(kda.width, axes=("heads",), stack=stack, dtype=jnp.float32)
        self.A_log = declare(kda.num_heads, axes=("heads",), stack=stack, dtype=jnp.float32)
        self.b_proj = Linear(kda.num_heads, hidden, **heads)
        self.g_a_proj = Linear(kda.head_dim, hidden, stack=stack)
        self.g_b_proj = Linear(kda.width, kda.head_dim, **heads)
        self.o_norm = RMSNorm(kda.head_dim, config.rms_norm_eps, stack=stack)
        self.o_proj = Linear(hidden, kda.width, axes=(None, "heads"), stack=stack)
        self.kda = kda

    def _by_head(self, x: jax.Array) -> jax.Array:
        """[T, h * D] as [T, h, D]."""
        return x.reshape(x.shape[0], -1, self.kda.head_dim)

    def _convolved(self, hidden: jax.Array, kept: jax.Array, rows: StateRows) -> tuple[jax.Array, jax.Array]:
        """Queries, keys and values behind the convolution.

        Args:
          hidden: Normed hidden states [T, hidden].
          kept: Their projections at the last tokens of each request before the step [R, h, taps - 1, 3, D].
          rows: Neighbours of each row.

        Returns:
          [T, h, 3, D] float32, and `kept` behind the step.
        """
        own = jnp.stack([self._by_head(p(hidden)) for p in (self.q_proj, self.k_proj, self.v_proj)], axis=2)
        before = jnp.where(rows.fresh[:, None, None, None, None], 0, kept).astype(own.dtype)
        before = jnp.moveaxis(before, 2, 1).reshape(-1, *own.shape[1:])  # [R * (taps - 1), h, 3, D]
        tokens = jnp.concatenate([own, before])
        convs = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
        weight = jnp.stack([self._by_head(conv.weight[...][:, 0].T) for conv in convs], axis=2)  # [taps, h, 3, D]
        taps = weight.shape[0]
        out = sum(
            tokens[rows.taps[:, d]].astype(jnp.float32) * weight[taps - 1 - d].astype(jnp.float32) for d in range(taps)
        )
        return jax.nn.silu(jnp.asarray(out)), jnp.moveaxis(tokens[rows.tail], 1, 2).astype(kept.dtype)

    def __call__(
        self, hidden: jax.Array, state: jax.Array, kept: jax.Array, rows: StateRows, workspace_bytes: int
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Run the rows of a step.

        Args:
          hidden: Normed hidden states [T, hidden].
          state: State of each request before the step [R, h, K, V] float32; read as 0 for fresh ones.
          kept: Inputs of the convolution that it still needs [R, h, taps - 1, 3, D].
          rows: The rows in blocks.
          workspace_bytes: Bound on the temporaries.

        Returns:
          Partial output of the local heads [T, hidden], to be summed over TP; state and `kept` behind the step.
        """
        qkv, kept = self._convolved(hidden, kept, rows)
        q, k = _unit(qkv[:, :, 0]) * self.kda.head_dim**-0.5, _unit(qkv[:, :, 1])
        rate = jnp.exp(self.A_log[...])[:, None]
        gate = self._by_head(self.f_b_proj(self.f_a_proj(hidden), jnp.dtype(jnp.float32)) + self.dt_bias[...])
        log_decay = self.kda.gate_lower_bound * jax.nn.sigmoid(rate * gate)
        beta = jax.nn.sigmoid(self.b_proj(hidden, jnp.dtype(jnp.float32)))
        state = jnp.where(rows.fresh[:, None, None, None], 0, state)

        def in_blocks(x: jax.Array) -> jax.Array:
            """[T, h, ...] as [N, h, C, ...], zeros where a block has no row."""
            taken = x.at[rows.blocks].get(mode="fill", fill_value=0, wrap_negative_indices=False)
            return jnp.moveaxis(taken, 1, 2)

        tokens = [in_blocks(x) for x in (q, k, qkv[:, :, 2], log_decay, beta)]
        if rows.single:
            state, out = decode_step(state, *(x[:, :, 0] for x in tokens))
        else:
            state, out = chunked(
                state,
                rows.sequence,
                *tokens,
                max_decay=-self.kda.gate_lower_bound,
                precision=precision_for(hidden.dtype),
                workspace_bytes=workspace_bytes,
            )
            out = jnp.moveaxis(out, 2, 1)
        out = out.reshape(-1, *q.shape[1:])[rows.place]  # [T, h, V]
        open_gate = jax.nn.sigmoid(self._by_head(self.g_b_proj(self.g_a_proj(hidden), jnp.dtype(jnp.float32))))
        out = (self.o_norm(out) * open_gate).astype(hidden.dtype)
        return self.o_proj(out.reshape(out.shape[0], -1)), state, kept
