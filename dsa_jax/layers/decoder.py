"""One decoder layer on this rank's share of heads, experts and features."""

import dataclasses
from typing import cast

import jax
import jax.numpy as jnp
from flax import nnx

from dsa_jax.cache import PagedCache
from dsa_jax.config import ModelConfig
from dsa_jax.layers.linear import RMSNorm
from dsa_jax.layers.mla import SparseAttention
from dsa_jax.layers.mlp import GatedMLP, MoE
from pallas_kernels.index_topk import index_topk
from pallas_kernels.sparse_mla import sparse_mla
from sharding.mesh import TP_AXES


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """What tells the layers of a model apart.

    Attributes:
      full: Whether the layer owns an indexer; else it reuses the last full layer's selection.
      sparse_mlp: Whether the MLP is a mixture of experts.
    """

    full: bool
    sparse_mlp: bool


@dataclasses.dataclass(frozen=True)
class Execution:
    """How the operations run; part of the compiled step's identity.

    Attributes:
      implementation: Implementation of the kernels, or None for the fastest the device supports.
      workspace_bytes: Bound on the temporaries of one operation, in bytes.
    """

    implementation: str | None = None
    workspace_bytes: int = 1 << 30


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepContext:
    """What every layer of a step shares; arrays of one data group.

    The keys of a step stand in one buffer of N rows, each request's keys in one run ordered by position.

    Attributes:
      cos: Cosine of the rotary angles [T, rope / 2] float32.
      sin: Sine [T, rope / 2] float32.
      key_start: First key of each row's request in the buffer [T] int32.
      key_end: One past the last key that the row may see [T] int32.
      own_row: Buffer row of the row's own key [T] int32, N for padding rows.
      history_page: Page of each buffer row [N] int32; past the last page where the row holds no history.
      history_offset: Offset in that page [N] int32.
    """

    cos: jax.Array
    sin: jax.Array
    key_start: jax.Array
    key_end: jax.Array
    own_row: jax.Array
    history_page: jax.Array
    history_offset: jax.Array

    def keys(self, pages: jax.Array, layer: jax.Array, own: jax.Array) -> jax.Array:
        """All keys of the step: the history out of the cache with the chunk's own put behind it.

        Args:
          pages: [layers, pages, page_size, width], only read.
          layer: Which layer of `pages`, int32 scalar.
          own: The chunk's own rows [T, width].

        Returns:
          [N, width], rows that belong to no key are 0.
        """
        history = pages.at[layer, self.history_page, self.history_offset].get(
            mode="fill", fill_value=0, wrap_negative_indices=False
        )
        return history.at[self.own_row].set(own, mode="drop", wrap_negative_indices=False)


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
        self,
        hidden: jax.Array,
        q_latent: jax.Array,
        context: StepContext,
        index_pages: jax.Array,
        index_layer: jax.Array,
        execution: Execution,
    ) -> tuple[jax.Array, jax.Array]:
        """Selected keys [T, index_topk] int32, relative to `key_start`, and the chunk's own index keys [T, D]."""
        q, own, weights = self.self_attn.indexer(hidden, q_latent, context.cos, context.sin)
        topk_indices = index_topk(
            q,
            context.keys(index_pages, index_layer, own),
            weights,
            context.key_start,
            context.key_end,
            self.config.indexer.topk,
            workspace_bytes=execution.workspace_bytes,
            implementation=execution.implementation,
        )
        return cast(jax.Array, topk_indices), own

    def __call__(
        self,
        x: jax.Array,
        topk_indices: jax.Array,
        context: StepContext,
        cache: PagedCache,
        layer: jax.Array,
        index_layer: jax.Array,
        execution: Execution,
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
        """Run the layer on one chunk.

        Args:
          x: Residual stream [T, hidden], the same on every TP rank.
          topk_indices: Selection of the last full layer [T, index_topk] int32, relative to `key_start`.
          context: What the layers of the step share.
          cache: The cache as it was before the step.
          layer: This layer's place in `cache.ckv`.
          index_layer: Its place in `cache.index_keys`; meaningless on shared layers.
          execution: How the operations run.

        Returns:
          The new x, the selection in force, the chunk's records [T, kv_lora_rank + rope], and its index keys [T, D],
          None on shared layers.
        """
        config = self.config
        hidden = self.input_layernorm(x)
        q_latent = self.self_attn.query_latent(hidden)
        index_keys = None
        if self.kind.full:
            with jax.named_scope("indexer"):
                topk_indices, index_keys = self.select(
                    hidden, q_latent, context, cache.index_keys, index_layer, execution
                )
        with jax.named_scope("sparse_mla"):
            record = self.self_attn.record(hidden, context.cos, context.sin)
            slots = jnp.where(topk_indices < 0, -1, topk_indices + context.key_start[:, None])
            attended, _ = sparse_mla(
                self.self_attn.absorbed_query(q_latent, context.cos, context.sin),
                context.keys(cache.ckv, layer, record),
                slots,
                softmax_scale=config.softmax_scale,
                kv_lora_rank=config.kv_lora_rank,
                num_valid=jnp.minimum(context.key_end - context.key_start, slots.shape[1]),
                workspace_bytes=execution.workspace_bytes,
                implementation=execution.implementation,
            )
            x = x + jax.lax.psum(self.self_attn.output(attended), TP_AXES)
        with jax.named_scope("mlp"):
            x = x + jax.lax.psum(self.mlp(self.post_attention_layernorm(x)), TP_AXES)
        return x, topk_indices, record, index_keys
