"""One decoder layer on this rank's share of heads, experts and features."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from dsa_jax.cache import PagedCache
from dsa_jax.config import ModelConfig
from dsa_jax.layers.attention import Selection, attend, gather_layer, locate
from dsa_jax.layers.context import StepContext
from dsa_jax.layers.linear import RMSNorm
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
    """

    full: bool
    sparse_mlp: bool


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCarry:
    """What passes from layer to layer.

    Attributes:
      x: Residual stream [T, hidden], the same on every TP rank.
      selection: Selection of the last full layer.
      ahead: The history of this layer's records, gathered by the layer before; None without prefetch.
    """

    x: jax.Array
    selection: Selection
    ahead: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerOutputs:
    """What a layer leaves behind.

    Attributes:
      record: The step's own records, as they are stored [T, width].
      index_keys: Its own index keys, as they are stored [T, width]; None on shared layers.
      selected: Selected positions [T, index_topk] int32; None unless asked for.
    """

    record: jax.Array
    index_keys: jax.Array | None
    selected: jax.Array | None


class DecoderLayer(nnx.Module):
    """Attention and MLP with their norms. Runs inside `shard_map`; parameters may be stacked for a scan."""

    def __init__(self, config: ModelConfig, kind: LayerKind, tp: int, *, stack: int | None = None):
        """Declare the parameters of one layer, or of `stack` layers of one kind."""
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, stack=stack)
        self.self_attn = SparseAttention(config, full=kind.full, stack=stack)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, stack=stack)
        if kind.sparse_mlp:
            self.mlp = MoE(config, tp, stack=stack)
        else:
            self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, tp, stack=stack)
        self.config = config
        self.kind = kind

    def select(
        self, hidden: jax.Array, q_latent: jax.Array, context: StepContext, pages: jax.Array, layer: jax.Array
    ) -> tuple[Selection, jax.Array]:
        """Score and select.

        Args:
          hidden: Normed hidden states [T, hidden].
          q_latent: Normed query latent [T, q_lora_rank].
          context: What the layers of the step share.
          pages: The cache of index keys.
          layer: This layer's place in it.

        Returns:
          The selection, and the step's own index keys as they are stored.
        """
        q, own, weights = self.self_attn.indexer(hidden, q_latent, context.cos, context.sin)
        own = pack(context.index_keys.fmt, own)
        k, k_scale = split_index_keys(context.index_keys.fmt, context.index_keys.fill(pages, layer, own))
        if k_scale is None:
            q = q.astype(k.dtype)
        else:
            q, q_scale = quantize_power_of_two(q, QUERY_AMAX_FLOOR)
            weights = weights * q_scale[..., 0]
        topk_indices = sharded_index_topk(
            q,
            k,
            weights,
            context.requests,
            context.visible,
            context.index_keys.layout,
            self.config.indexer.topk,
            sharding=context.index_sharding,
            plan=context.plan,
            k_scale=k_scale,
            **context.options.kernels,
        )
        return locate(topk_indices, context), own

    def __call__(
        self,
        carry: LayerCarry,
        context: StepContext,
        cache: PagedCache,
        layer: jax.Array,
        index_layer: jax.Array,
    ) -> tuple[LayerCarry, LayerOutputs]:
        """Run the layer on one chunk.

        Args:
          carry: What the layer before passed on.
          context: What the layers of the step share.
          cache: The cache as it was before the step.
          layer: This layer's place in `cache.ckv`.
          index_layer: Its place in `cache.index_keys`; meaningless on shared layers.

        Returns:
          What goes on to the next layer, and what the layer leaves behind.
        """
        attention, options = self.self_attn, context.options
        selection, ahead, index_keys = carry.selection, carry.ahead, None
        # What a layer reads from the cache depends on nothing that it computes. Tied to its input it stays in the layer;
        # the compiler would else gather for several layers at once and hold a buffer for each.
        x, layer = jax.lax.optimization_barrier((carry.x, layer))
        if ahead is not None:
            # Behind the last layer its own history is read again.
            ahead = gather_layer(cache.ckv, jnp.minimum(layer + 1, cache.ckv.shape[0] - 1), context)
        hidden = self.input_layernorm(x)
        q_latent = attention.query_latent(hidden)
        if self.kind.full:
            with jax.named_scope("indexer"):
                selection, index_keys = self.select(hidden, q_latent, context, cache.index_keys, index_layer)
        with jax.named_scope("sparse_mla"):
            record = pack(context.ckv.fmt, attention.record(hidden, context.cos, context.sin))
            values = attend(
                attention.absorbed_query(q_latent, context.cos, context.sin),
                attention.value_rows(),
                cache.ckv,
                layer,
                record,
                selection,
                context,
                softmax_scale=self.config.softmax_scale,
                history=carry.ahead,
            )
            output = attention.output(values)
            if ahead is not None:
                # Awaited before the sum: a collective in flight bars the next, so only what lies between hides it.
                output, ahead = jax.lax.optimization_barrier((output, ahead))
            x = x + jax.lax.psum(output, TP_AXES)
        with jax.named_scope("mlp"):
            x = x + jax.lax.psum(self.mlp(self.post_attention_layernorm(x)), TP_AXES)
        selected = selection.ids if options.return_selected else None
        return LayerCarry(x, selection, ahead), LayerOutputs(record, index_keys, selected)
