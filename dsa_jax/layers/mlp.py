"""Dense MLP and mixture of experts, each rank holding a share; outputs are partial sums over TP."""

# Modules gain attributes while they are built, which the type checker cannot see.
# pyright: reportAttributeAccessIssue=false

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from dsa_jax.config import ModelConfig
from dsa_jax.fp8_weights import matmul_of
from dsa_jax.layers.grouped_matmul import fp8_grouped_matmul, grouped_matmul
from dsa_jax.layers.linear import Linear
from dsa_jax.params import declare, round_up
from dsa_jax.quantization import SCALE_SUFFIX
from sharding.expert_exchange import exchange_rows
from sharding.mesh import TP_AXES

# Rows times choices that an expert-parallel rank has buffers for without rounds.
SERVED_AT_ONCE = 4096


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
    """The routed experts, dealt whole to the ranks of TP: each rank serves all rows with its own experts."""

    FP8 = ("gate_proj", "up_proj", "down_proj")

    def __init__(self, config: ModelConfig, tp: int, *, stack=None):
        """Declare the parameters; the number of experts is padded to a multiple of `tp`."""
        assert config.moe is not None
        count, width, hidden = config.moe.num_experts, config.moe.intermediate_size, config.hidden_size
        padded = round_up(count, tp)
        axes = ("experts", None, None)
        options = {"axes": axes, "stack": stack, "whole": True}
        self.gate_proj = declare(padded, width, hidden, stored=(count, width, hidden), **options)
        self.up_proj = declare(padded, width, hidden, stored=(count, width, hidden), **options)
        self.down_proj = declare(padded, hidden, width, stored=(count, hidden, width), **options)
        self.limit = config.swiglu_limit

    def __call__(self, x: jax.Array, experts: jax.Array, weights: jax.Array, *, layer: jax.Array) -> jax.Array:
        """Partial output [T, hidden] of x [T, hidden] for its experts [T, k] int32 and weights [T, k] float32.

        `layer` says which of a stack of layers' experts serve.

        Assignments are sorted by local expert, those of other ranks last, and served in rounds of a fixed number of
        rows, each with one grouped matmul over all experts; see `expert_capacity`. Ranks need not have as many rounds.
        """
        local, choices = self.local_experts, experts.shape[1]
        ids = (experts - jax.lax.axis_index(TP_AXES) * local).reshape(-1)
        owned = (ids >= 0) & (ids < local)
        ids = jnp.where(owned, ids, local)
        order = jnp.argsort(ids).astype(jnp.int32)  # stable
        place = jnp.where(owned, jnp.argsort(order).astype(jnp.int32), -1).reshape(-1, choices)
        ends = jnp.cumsum(jnp.bincount(ids, length=local + 1)[:local].astype(jnp.int32), dtype=jnp.int32)
        capacity = expert_capacity(ids.size, jax.lax.axis_size(TP_AXES))
        order = jnp.pad(order, (0, -ids.size % capacity))
        operand, dtype = self._quantized(x, "gate_proj", "up_proj"), x.dtype

        def add_round(number, total):
            first = number * capacity
            window = jnp.clip(ends - first, 0, capacity)
            picked = jax.lax.dynamic_slice_in_dim(order, first, capacity) // choices
            sizes = jnp.diff(window, prepend=jnp.zeros(1, jnp.int32))
            results = self.serve(_take(operand, picked), sizes, dtype, layer)
            return _add_results(total, results, place - first, weights)

        total = jnp.zeros(x.shape, jnp.float32)
        if capacity == ids.size:
            return add_round(0, total).astype(dtype)
        return jax.lax.fori_loop(0, (ends[-1] + capacity - 1) // capacity, add_round, total).astype(dtype)

    @property
    def local_experts(self) -> int:
        """Experts of this rank, inside `shard_map`."""
        return self.gate_proj.shape[-3]

    def serve(self, rows: "Operand", sizes: jax.Array, dtype: jnp.dtype, layer: jax.Array) -> jax.Array:
        """Results [N, hidden] of rows [N, hidden] sorted by local expert, `sizes` [local experts] of each."""

        def matmul(name: str, rows: Operand) -> jax.Array:
            return self._matmul(name, rows, sizes, dtype, layer)

        gated = swiglu(matmul("gate_proj", rows), matmul("up_proj", rows), self.limit)
        return matmul("down_proj", self._quantized(gated, "down_proj"))

    def serve_rows(self, rows: jax.Array, sizes: jax.Array, *, layer: jax.Array) -> jax.Array:
        """`serve` of rows that are not quantised yet."""
        return self.serve(self._quantized(rows, "gate_proj", "up_proj"), sizes, rows.dtype, layer)

    def _quantized(self, rows: jax.Array, *names: str) -> "Operand":
        """Rows as the matmuls with these weights take them."""
        found = [matmul_of(getattr(self, name + SCALE_SUFFIX, None)) for name in names]
        return rows if found[0] is None or None in found else found[0].quantize(rows)

    def _matmul(self, name: str, rows: "Operand", sizes: jax.Array, dtype: jnp.dtype, layer: jax.Array) -> jax.Array:
        """Rows sorted by local expert through the weights `name` of their experts."""
        weights, scale = getattr(self, name), getattr(self, name + SCALE_SUFFIX, None)
        matmul = matmul_of(scale)
        if isinstance(rows, tuple):
            assert scale is not None and matmul is not None
            stack, scales = (array[...].reshape(-1, *array.shape[-2:]) for array in (weights, scale))
            return fp8_grouped_matmul(rows, stack, scales, sizes, matmul, dtype, first=layer * self.local_experts)
        if scale is None:
            return grouped_matmul(rows, _of_layer(weights, layer), sizes)
        options = {"scale": _of_layer(scale, layer), "block": scale.get_metadata()["block"]}
        return grouped_matmul(rows, _of_layer(weights, layer), sizes, **options)


def _of_layer(weights: nnx.Param, layer: jax.Array) -> jax.Array:
    """The experts' weights of one layer."""
    whole = weights[...]
    return jax.lax.dynamic_index_in_dim(whole, layer, keepdims=False) if weights.get_metadata()["whole"] else whole


# Rows [N, hidden], or e4m3 rows and their scales.
Operand = jax.Array | tuple[jax.Array, jax.Array]


def _take(rows: Operand, index: jax.Array) -> Operand:
    """Rows of these numbers."""
    return (rows[0][index], rows[1][:, index]) if isinstance(rows, tuple) else rows[index]


def _add_results(total: jax.Array, results: jax.Array, place: jax.Array, weights: jax.Array) -> jax.Array:
    """Add the weighted results of a round to their rows, one choice after another.

    Args:
      total: [T, hidden] float32.
      results: [capacity, hidden]; what no row has a place for is anything.
      place: Where each row's results are [T, k] int32; those outside of the round's belong to others.
      weights: [T, k] float32.
    """
    for choice in range(place.shape[1]):
        at = place[:, choice]
        here = (at >= 0) & (at < results.shape[0])
        found = results[jnp.where(here, at, 0)].astype(jnp.float32)
        total = total + jnp.where(here[:, None], found, 0.0) * weights[:, choice, None]
    return total


def expert_capacity(assignments: int, ranks: int) -> int:
    """Rows that a rank serves at a time, of `assignments` (rows times choices) that are dealt to all ranks.

    Any number of assignments can be a rank's own, whatever the others have. Buffers for all of them would be as many
    times too large as there are ranks, and a grouped matmul over them takes the time of all rows on GPUs. So a rank
    serves its rows in rounds, in one as long as it has no more than one and a half times its share. A few rows
    are served at once: for them a loop would cost more than its buffers.
    """
    if ranks == 1 or assignments <= SERVED_AT_ONCE:
        return assignments
    return min(assignments, round_up(-(-3 * assignments // (2 * ranks)), 128))


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

    def __call__(self, x: jax.Array, *, exchange: bool = False, layer: jax.Array) -> jax.Array:
        """Partial output [T, hidden] of x [T, hidden], which is the same on every rank.

        `layer` says which of a stack of layers' experts serve.

        Without `exchange` each rank routes all rows and serves those of its experts. With it a rank routes a share of
        the rows and sends them to their experts: an eighth of the router's work on 8 ranks, for two more transfers.
        """
        exchange = exchange and jax.lax.axis_size(TP_AXES) > 1
        out = self._exchanged(x, layer) if exchange else self.experts(x, *self.gate(x), layer=layer)
        return out + self.shared_experts(x) if hasattr(self, "shared_experts") else out

    def _exchanged(self, x: jax.Array, layer: jax.Array) -> jax.Array:
        """Routed part of this rank's run of rows, 0 in all others."""
        ranks, total = jax.lax.axis_size(TP_AXES), x.shape[0]
        share = -(-total // ranks)
        start = jax.lax.axis_index(TP_AXES) * share
        padded = jnp.pad(x, ((0, share * ranks - total), (0, 0)))
        rows = jax.lax.dynamic_slice_in_dim(padded, start, share)
        experts, weights = self.gate(rows)
        real = start + jnp.arange(share, dtype=jnp.int32) < total
        experts = jnp.where(real[:, None], experts, -1)
        serve = functools.partial(self.experts.serve_rows, layer=layer)
        out = exchange_rows(rows, experts, weights, serve, local_experts=self.experts.local_experts)
        return jax.lax.dynamic_update_slice_in_dim(jnp.zeros_like(padded), out.astype(x.dtype), start, 0)[:total]
