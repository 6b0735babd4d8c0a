"""One decoder layer on this rank's share of heads, experts and features."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dsa_jax.cache import PagedCache, RequestState
from dsa_jax.config import ModelConfig
from dsa_jax.layers.attention import Selection, attend, gather_layer, locate
from dsa_jax.layers.context import StepContext
from dsa_jax.layers.kda import LinearAttention
from dsa_jax.layers.linear import RMSNorm
from dsa_jax.layers.mhc import residual
from dsa_jax.layers.mla import SparseAttention
from dsa_jax.layers.mlp import GatedMLP, MoE
from pallas_kernels.ckv_records import pack, quantize_power_of_two, split_index_keys
from sharding.indexer_sharding import sharded_index_topk
from sharding.mesh import TP_AXES

# Smallest magnitude that an index query is scaled by when it is quantised (DeepGEMM, vLLM).
QUERY_AMAX_FLOOR = 1e-10


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """What tells the layers of a model apart.

    Attributes:
      full: Whether the layer owns an indexer; else it reuses the last full layer's selection.
      sparse_mlp: Whether the MLP is a mixture of experts.
      linear: Whether linear attention takes the place of sparse attention; such a layer is neither full nor shared.
    """

    full: bool
    sparse_mlp: bool
    linear: bool = False


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerPlace:
    """Where a layer's parts of the cache are, each an int or an int32 scalar; meaningless for parts it has not.

    Attributes:
      ckv: Index in `PagedCache.ckv`.
      index_keys: Index in `PagedCache.index_keys` and in the ring of open pools.
      state: Index in the states of the linear attention.
    """

    ckv: Any
    index_keys: Any
    state: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCarry:
    """What passes from layer to layer.

    Attributes:
      x: Residual stream [T, hidden], or streams [T, streams, hidden]; the same on every TP rank.
      state: What the cache keeps of each request; each layer writes its own part in place.
      selection: Selection of the last full layer.
      ahead: The history of this layer's records, gathered by the layer before; None without prefetch.
    """

    x: jax.Array
    state: RequestState
    selection: Selection
    ahead: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerOutputs:
    """What a layer leaves behind; each is None where the layer has no such thing.

    Attributes:
      record: The step's own records, as they are stored [T, width].
      index_keys: Its own index keys, as they are stored [keys, width].
      selected: Selected positions [T, selected_width] int32; None unless asked for.
    """

    record: jax.Array | None = None
    index_keys: jax.Array | None = None
    selected: jax.Array | None = None


class DecoderLayer(nnx.Module):
    """Attention and MLP with their norms. Runs inside `shard_map`; parameters may be stacked for a scan."""

    def __init__(self, config: ModelConfig, kind: LayerKind, tp: int, *, stack: int | None = None):
        """Declare the parameters of one layer, or of `stack` layers of one kind."""
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, stack=stack)
        self.hc_attn = residual(config, stack=stack)
        self.self_attn: Any  # which of the two is known from `kind`, not to the type checker
        if kind.linear:
            self.self_attn = LinearAttention(config, stack=stack)
        else:
            self.self_attn = SparseAttention(config, full=kind.full, stack=stack)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, stack=stack)
        self.hc_ffn = residual(config, stack=stack)
        if kind.sparse_mlp:
            self.mlp = MoE(config, tp, stack=stack)
        else:
            width, limit = config.intermediate_size, config.swiglu_limit
            self.mlp = GatedMLP(config.hidden_size, width, tp, limit=limit, stack=stack)
        self.config = config
        self.kind = kind

    def select(
        self,
        hidden: jax.Array,
        q_latent: jax.Array,
        context: StepContext,
        cache: PagedCache,
        state: RequestState,
        layer: jax.Array,
    ) -> tuple[Selection, jax.Array, RequestState]:
        """Score and select.

        Args:
          hidden: Normed hidden states [T, hidden].
          q_latent: Normed query latent [T, q_lora_rank].
          context: What the layers of the step share.
          cache: The cache as it was before the step.
          state: What the cache keeps of each request.
          layer: This layer's place among the index keys.

        Returns:
          The selection, the step's own index keys as they are stored, and the state with the layer's open pools.
        """
        assert isinstance(self.self_attn, SparseAttention)
        indexer, fmt = self.self_attn.indexer, context.index_keys.fmt
        q, own, weights = indexer(hidden, q_latent, context.cos, context.sin)
        own, ring = indexer.own_keys(hidden, own, context, state.read("ring", layer, context.state_slots))
        state = state.write(layer, context.state_slots, ring=ring)
        q, own = indexer.rotated(q, fmt), pack(fmt, indexer.rotated(own, fmt))
        k, k_scale = split_index_keys(fmt, context.index_keys.fill(cache.index_keys, layer, own))
        if k_scale is None:
            q = q.astype(k.dtype)
        else:
            q, q_scale = quantize_power_of_two(q, QUERY_AMAX_FLOOR)
            weights = weights * q_scale[..., 0]
        selected = sharded_index_topk(
            q,
            k,
            weights,
            context.requests,
            context.index_visible,
            context.index_keys.layout,
            self.config.indexer.topk // self.config.index_kpool,
            sharding=context.index_sharding,
            plan=context.plan,
            k_scale=k_scale,
            **context.options.kernels,
        )
        return locate(indexer.expand(selected, context), context), own, state

    def _sparse(
        self, hidden: jax.Array, carry: LayerCarry, context: StepContext, cache: PagedCache, place: LayerPlace
    ) -> tuple[jax.Array, LayerCarry, LayerOutputs]:
        """Partial output of sparse attention [T, hidden], what goes on, and what the layer leaves behind."""
        attention, selection, state, index_keys = self.self_attn, carry.selection, carry.state, None
        assert isinstance(attention, SparseAttention)
        with jax.named_scope("projections"):
            q_latent = attention.query_latent(hidden)
        if self.kind.full:
            with jax.named_scope("indexer"):
                selection, index_keys, state = self.select(hidden, q_latent, context, cache, state, place.index_keys)
        with jax.named_scope("projections"):
            record = pack(context.ckv.fmt, attention.record(hidden, context.cos, context.sin))
            query = attention.absorbed_query(q_latent, context.cos, context.sin)
            value_rows = attention.value_rows(hidden.dtype)
        with jax.named_scope("sparse_mla"):
            values = attend(
                query,
                value_rows,
                cache.ckv,
                place.ckv,
                record,
                selection,
                context,
                softmax_scale=self.config.softmax_scale,
                history=carry.ahead,
            )
        with jax.named_scope("projections"):
            out = attention.output(values)
        selected = selection.ids if context.options.return_selected else None
        carry = dataclasses.replace(carry, state=state, selection=selection)
        return out, carry, LayerOutputs(record, index_keys, selected)

    def _linear(self, hidden: jax.Array, carry: LayerCarry, context: StepContext, layer: jax.Array):
        """Partial output of linear attention [T, hidden], and what goes on."""
        slots, rows = context.state_slots, context.states
        kda, conv = (carry.state.read(name, layer, slots) for name in ("kda", "conv"))
        assert isinstance(self.self_attn, LinearAttention) and kda is not None and conv is not None
        assert rows is not None
        with jax.named_scope("linear_attention"):
            out, kda, conv = self.self_attn(hidden, kda, conv, rows, context.options.workspace_bytes)
            state = carry.state.write(layer, slots, kda=kda, conv=conv)
        return out, dataclasses.replace(carry, state=state)

    def __call__(
        self, carry: LayerCarry, context: StepContext, cache: PagedCache, place: LayerPlace, repeat: jax.Array
    ) -> tuple[LayerCarry, LayerOutputs]:
        """Run the layer on one chunk.

        Args:
          carry: What the layer before passed on.
          context: What the layers of the step share.
          cache: The cache as it was before the step.
          place: Where the layer's parts of it are.
          repeat: Which layer of its stack it is, for parameters that are handed to it whole.

        Returns:
          What goes on to the next layer, and what the layer leaves behind.
        """
        # What a layer reads from the cache depends on nothing that it computes. Tied to its input it stays there;
        # the compiler would else gather for several layers at once and hold a buffer for each.
        place = jax.tree.map(jnp.int32, place)
        x, place = jax.lax.optimization_barrier((carry.x, place))
        ahead = carry.ahead
        fetch = ahead is not None and not self.kind.linear
        if fetch:
            # Behind the last sparse layer, its own history is read again.
            ahead = gather_layer(cache.ckv, jnp.minimum(place.ckv + 1, cache.ckv.shape[0] - 1), context)
        with jax.named_scope("residual"):
            mixed, gates = self.hc_attn.read(x)
            hidden = self.input_layernorm(mixed)
        if self.kind.linear:
            (out, carry), outputs = self._linear(hidden, carry, context, place.state), LayerOutputs()
        else:
            out, carry, outputs = self._sparse(hidden, carry, context, cache, place)
        if fetch:
            # Awaited before the sum: a collective in flight bars the next, so it hides behind what lies between.
            out, ahead = jax.lax.optimization_barrier((out, ahead))
        with jax.named_scope("residual"):
            x = self.hc_attn.write(x, jax.lax.psum(out, TP_AXES), gates)
        with jax.named_scope("mlp"):
            mixed, gates = self.hc_ffn.read(x)
            options = {"exchange": context.options.expert_exchange, "layer": repeat} if self.kind.sparse_mlp else {}
            out = self.mlp(self.post_attention_layernorm(mixed), **options)
            x = self.hc_ffn.write(x, jax.lax.psum(out, TP_AXES), gates)
        return LayerCarry(x, carry.state, carry.selection, ahead), outputs
