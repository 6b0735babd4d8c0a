"""Dense MLP and mixture of experts, each rank holding a share; outputs are partial sums over TP."""

# Modules gain attributes while they are built, which the type checker cannot see.
# pyright: reportAttributeAccessIssue=false

import jax
import jax.numpy as jnp
from flax import nnx

from dsa_jax.config import ModelConfig
from dsa_jax.layers.grouped_matmul import grouped_matmul
from dsa_jax.layers.linear import Linear
from dsa_jax.params import declare, round_up
from dsa_jax.quantization import SCALE_SUFFIX
from sharding.expert_exchange import exchange_rows
from sharding.mesh import TP_AXES


def swiglu(gate: jax.Array, up: jax.Array, limit: float | None) -> jax.Array:
    """`silu(gate) * up`; with a limit, the gate is clamped from above and `up` both ways first."""
    if limit is not None:
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return jax.nn.silu(gate) * up


class GatedMLP(nnx.Module):
    """`down(swiglu(gate(x), up(x)))` with the intermediate features split over TP."""

    def __init__(self, hidden: int, intermediate: int, tp: int, *, limit: float | None = None, stack=None):
        """Declare the parameters; the intermediate size is padded to a multiple of `tp`. `limit`: see `swiglu`."""
        padded = round_up(intermediate, tp)
        rows = {"axes": ("mlp", None), "stack": stack, "stored": (intermediate, hidden)}
        self.gate_proj = Linear(padded, hidden, **rows)
        self.up_proj = Linear(padded, hidden, **rows)
        self.down_proj = Linear(hidden, padded, axes=(None, "mlp"), stack=stack, stored=(hidden, intermediate))
        self.limit = limit

    def __call__(self, x: jax.Array) -> jax.Array:
        """Partial output [T, hidden] of x [T, hidden]."""
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x), self.limit))


class Router(nnx.Module):
    """Sigmoid router with a correction bias and group-limited choice (DeepSeek-V3, "noaux_tc")."""

    def __init__(self, config: ModelConfig, *, stack=None):
        """Declare the parameters, replicated over TP."""
        assert config.moe is not None
        self.weight = declare(config.moe.num_experts, config.hidden_size, stack=stack)
        self.e_score_correction_bias = declare(config.moe.num_experts, stack=stack, dtype=jnp.float32)
        self.moe = config.moe

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Experts [T, k] int32 of each row of x [T, hidden], and their weights [T, k] float32."""
        moe = self.moe
        scores = jnp.einsum(
            "ti,ei->te",
            x.astype(jnp.float32),
            self.weight[...].astype(jnp.float32),
            precision=jax.lax.Precision.HIGHEST,
        )
        scores = jax.nn.sigmoid(scores)
        choice = scores + self.e_score_correction_bias[...]
        if moe.n_group > 1:
            grouped = choice.reshape(-1, moe.n_group, moe.num_experts // moe.n_group)
            group_score = jnp.sum(jax.lax.top_k(grouped, 2)[0], axis=-1)  # [T, groups]
            kept = jax.lax.top_k(group_score, moe.topk_group)[1]
            mask = jnp.any(jax.nn.one_hot(kept, moe.n_group, dtype=jnp.bool_), axis=1)
            choice = jnp.where(mask[:, :, None], grouped, -jnp.inf).reshape(choice.shape)
        experts = jax.lax.top_k(choice, moe.num_experts_per_tok)[1].astype(jnp.int32)
        weights = jnp.take_along_axis(scores, experts, axis=1)
        if moe.norm_topk_prob:
            weights = weights / (jnp.sum(weights, axis=1, keepdims=True) + 1e-20)
        return experts, weights * moe.routed_scaling_factor


class Experts(nnx.Module):
    """Routed experts, whole experts split over TP; each rank serves all rows with its own experts."""

    FP8 = ("gate_proj", "up_proj", "down_proj")

    def __init__(self, config: ModelConfig, tp: int, *, stack=None):
        """Declare the parameters; the number of experts is padded to a multiple of `tp`."""
        assert config.moe is not None
        count, width, hidden = config.moe.num_experts, config.moe.intermediate_size, config.hidden_size
        padded = round_up(count, tp)
        axes = ("experts", None, None)
        rows = {"axes": axes, "stack": stack, "stored": (count, width, hidden)}
        self.gate_proj = declare(padded, width, hidden, **rows)
        self.up_proj = declare(padded, width, hidden, **rows)
        self.down_proj = declare(padded, hidden, width, axes=axes, stack=stack, stored=(count, hidden, width))
        self.limit = config.swiglu_limit

    def __call__(self, x: jax.Array, experts: jax.Array, weights: jax.Array) -> jax.Array:
        """Partial output [T, hidden] of x [T, hidden] for its experts [T, k] int32 and weights [T, k] float32.

        Assignments are sorted by local expert, those of other ranks last, for one grouped matmul over all experts.
        """
        local = self.local_experts
        choices = experts.shape[1]
        ids = (experts - jax.lax.axis_index(TP_AXES) * local).reshape(-1)
        owned = (ids >= 0) & (ids < local)
        ids = jnp.where(owned, ids, local)
        order = jnp.argsort(ids)  # stable
        sizes = jnp.bincount(ids, length=local + 1)[:local].astype(jnp.int32)
        out = self.serve(x[order // choices], sizes)  # [T * k, hidden]
        # Rows of other ranks' experts are whatever the library leaves behind its last group.
        out = out[jnp.argsort(order)].reshape(-1, choices, x.shape[1])
        out = jnp.where(owned.reshape(-1, choices)[:, :, None], out.astype(jnp.float32), 0.0)
        return jnp.einsum("tkd,tk->td", out, weights, precision=jax.lax.Precision.HIGHEST).astype(x.dtype)

    @property
    def local_experts(self) -> int:
        """Experts of this rank, inside `shard_map`."""
        return self.gate_proj.shape[-3]

    def serve(self, rows: jax.Array, sizes: jax.Array) -> jax.Array:
        """Results [N, hidden] of rows [N, hidden] sorted by local expert, `sizes` [local experts] of each."""
        gate = self._matmul("gate_proj", rows, sizes)
        gated = swiglu(gate, self._matmul("up_proj", rows, sizes), self.limit)
        return self._matmul("down_proj", gated, sizes)

    def _matmul(self, name: str, rows: jax.Array, sizes: jax.Array) -> jax.Array:
        """Rows sorted by local expert through the weights `name` of their experts."""
        scale = getattr(self, name + SCALE_SUFFIX, None)
        if scale is None:
            return grouped_matmul(rows, getattr(self, name)[...], sizes)
        return grouped_matmul(
            rows, getattr(self, name)[...], sizes, scale=scale[...], block=scale.get_metadata()["block"]
        )


class MoE(nnx.Module):
    """Routed experts plus shared experts."""

    def __init__(self, config: ModelConfig, tp: int, *, stack=None):
        """Declare the parameters."""
        assert config.moe is not None
        self.gate = Router(config, stack=stack)
        self.experts = Experts(config, tp, stack=stack)
        if config.moe.num_shared_experts:
            width = config.moe.intermediate_size * config.moe.num_shared_experts
            self.shared_experts = GatedMLP(config.hidden_size, width, tp, limit=config.swiglu_limit, stack=stack)

    def __call__(self, x: jax.Array, *, exchange: bool = False) -> jax.Array:
        """Partial output [T, hidden] of x [T, hidden], which is the same on every rank.

        Without `exchange` each rank routes all rows and serves those of its experts. With it a rank routes a share of
        the rows and sends them to their experts: an eighth of the router's work on 8 ranks, for two more transfers.
        """
        exchange = exchange and jax.lax.axis_size(TP_AXES) > 1
        out = self._exchanged(x) if exchange else self.experts(x, *self.gate(x))
        return out + self.shared_experts(x) if hasattr(self, "shared_experts") else out

    def _exchanged(self, x: jax.Array) -> jax.Array:
        """Routed part of this rank's run of rows, 0 in all others."""
        ranks, total = jax.lax.axis_size(TP_AXES), x.shape[0]
        share = -(-total // ranks)
        start = jax.lax.axis_index(TP_AXES) * share
        padded = jnp.pad(x, ((0, share * ranks - total), (0, 0)))
        rows = jax.lax.dynamic_slice_in_dim(padded, start, share)
        experts, weights = self.gate(rows)
        real = start + jnp.arange(share, dtype=jnp.int32) < total
        experts = jnp.where(real[:, None], experts, -1)
        out = exchange_rows(rows, experts, weights, self.experts.serve, local_experts=self.experts.local_experts)
        return jax.lax.dynamic_update_slice_in_dim(jnp.zeros_like(padded), out.astype(x.dtype), start, 0)[:total]
