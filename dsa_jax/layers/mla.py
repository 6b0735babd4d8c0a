"""Multi-head latent attention in its absorbed form (DeepSeek-V2), on this rank's heads."""

import jax
import jax.numpy as jnp
from flax import nnx

from dsa_jax.config import ModelConfig
from dsa_jax.layers.indexer import Indexer
from dsa_jax.layers.kpool import PooledIndexer
from dsa_jax.layers.linear import Linear, RMSNorm, contract
from dsa_jax.layers.rope import rotate


class SparseAttention(nnx.Module):
    """Projections around the sparse attention; a full layer also owns an indexer.

    The keys and values of the history are never expanded: queries are mapped into the latent space instead.
    """

    def __init__(self, config: ModelConfig, *, full: bool, stack=None):
        """Declare the parameters; `full` says whether the layer owns an indexer."""
        heads, eps = config.num_heads, config.latent_norm_eps
        hidden, latent, rope = config.hidden_size, config.kv_lora_rank, config.qk_rope_head_dim
        self.q_a_proj = Linear(config.q_lora_rank, hidden, stack=stack)
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, eps, stack=stack)
        self.q_b_proj = Linear(heads * config.qk_head_dim, config.q_lora_rank, axes=("heads", None), stack=stack)
        self.kv_a_proj_with_mqa = Linear(latent + rope, hidden, stack=stack)
        self.kv_a_layernorm = RMSNorm(latent, eps, stack=stack)
        kv_rows = heads * (config.qk_nope_head_dim + config.v_head_dim)
        self.kv_b_proj = Linear(kv_rows, latent, axes=("heads", None), stack=stack)
        self.o_proj = Linear(hidden, heads * config.v_head_dim, axes=(None, "heads"), stack=stack)
        if full:
            self.indexer = (PooledIndexer if config.index_kpool > 1 else Indexer)(config, stack=stack)
        self.config = config

    def query_latent(self, hidden: jax.Array) -> jax.Array:
        """Normed query latent [T, q_lora_rank], the input of the queries and of the indexer."""
        return self.q_a_layernorm(self.q_a_proj(hidden))

    def record(self, hidden: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        """Compressed KV of the chunk [T, kv_lora_rank + rope]: normed latent, then the rotated shared key."""
        kv = self.kv_a_proj_with_mqa(hidden)
        latent = self.kv_a_layernorm(kv[:, : self.config.kv_lora_rank])
        k_pe = rotate(kv[:, self.config.kv_lora_rank :], cos, sin, interleave=True)
        return jnp.concatenate([latent, k_pe], axis=-1)

    def _up_projections(self, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
        """Key rows [h, nope, latent] and value rows [h, v, latent] of the local heads."""
        config = self.config
        weight = self.kv_b_proj.values(dtype)
        weight = weight.reshape(-1, config.qk_nope_head_dim + config.v_head_dim, config.kv_lora_rank)
        return weight[:, : config.qk_nope_head_dim], weight[:, config.qk_nope_head_dim :]

    def absorbed_query(self, q_latent: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        """Queries of the local heads in the space of the records [T, h, kv_lora_rank + rope]."""
        config = self.config
        q = self.q_b_proj(q_latent).reshape(q_latent.shape[0], -1, config.qk_head_dim)
        q_nope, q_pe = q[..., : config.qk_nope_head_dim], q[..., config.qk_nope_head_dim :]
        key_rows, _ = self._up_projections(q.dtype)
        # Heads in front: XLA's CPU backend has no bfloat16 product that puts them in the middle.
        absorbed = contract("thn,hnl->htl", q_nope, key_rows).swapaxes(0, 1)
        return jnp.concatenate([absorbed, rotate(q_pe, cos, sin, interleave=True)], axis=-1)

    def value_rows(self, dtype: jnp.dtype) -> jax.Array:
        """Rows of the value up-projection of the local heads [h, v, latent], of activations of `dtype`."""
        return self._up_projections(dtype)[1]

    def output(self, values: jax.Array) -> jax.Array:
        """Partial output of the local heads [T, hidden], to be summed over TP, from their values [T, h, v]."""
        return self.o_proj(values.reshape(values.shape[0], -1))
