"""Names and random values of the tensors of a tiny checkpoint."""

from collections.abc import Iterator

import ml_dtypes
import numpy as np

from dsa_jax.config import KdaConfig, ModelConfig
from dsa_jax.config_flash import NO_INDEXER
from dsa_jax.config_layers import FULL, SPARSE


class Random:
    """Random tensors of a checkpoint, scaled so that activations keep their size from layer to layer."""

    def __init__(self, rng: np.random.Generator):
        self._rng = rng

    def normal(self, *shape: int, std: float, mean: float = 0.0) -> np.ndarray:
        return (mean + std * self._rng.standard_normal(shape, dtype=np.float32)).astype(ml_dtypes.bfloat16)

    def linear(self, rows: int, columns: int) -> np.ndarray:
        return self.normal(rows, columns, std=columns**-0.5)

    def norm(self, size: int) -> np.ndarray:
        return self.normal(size, std=0.1, mean=1.0)

    def float32(self, size: int, std: float, mean: float = 0.0) -> np.ndarray:
        return (mean + std * self._rng.standard_normal((size,), dtype=np.float32)).astype(np.float32)


def tensors(config: ModelConfig, rng: np.random.Generator) -> Iterator[tuple[str, np.ndarray]]:
    """Name and value of each tensor."""
    random = Random(rng)
    hidden, vocab, layers, model = config.hidden_size, config.vocab_size, config.num_layers, config.tensor_prefix
    yield model + "embed_tokens.weight", random.normal(vocab, hidden, std=1.0)
    for layer in range(layers):
        prefix = f"{model}layers.{layer}."
        yield from _layer(config, random, prefix, config.indexer_types[layer], config.mlp_types[layer])
        if config.hyper_connections is not None:
            yield from _hyper_connections(random, prefix, config.hyper_connections.streams, hidden)
    yield model + "norm.weight", random.norm(hidden)
    yield "lm_head.weight", random.linear(vocab, hidden)
    for layer in range(layers, layers + config.num_mtp_layers):
        prefix = f"{model}layers.{layer}."
        yield from _layer(config, random, prefix, FULL, SPARSE)
        yield prefix + "enorm.weight", random.norm(hidden)
        yield prefix + "hnorm.weight", random.norm(hidden)
        yield prefix + "eh_proj.weight", random.linear(hidden, 2 * hidden)
        yield prefix + "shared_head.norm.weight", random.norm(hidden)


def _layer(
    config: ModelConfig, random: Random, prefix: str, indexer_type: str, mlp_type: str
) -> Iterator[tuple[str, np.ndarray]]:
    hidden = config.hidden_size
    yield prefix + "input_layernorm.weight", random.norm(hidden)
    yield prefix + "post_attention_layernorm.weight", random.norm(hidden)
    if indexer_type == NO_INDEXER and config.kda is not None:
        yield from _linear_attention(config.kda, random, prefix + "self_attn.", hidden)
    else:
        yield from _sparse_attention(config, random, prefix + "self_attn.", indexer_type)
    moe = config.moe
    if mlp_type != SPARSE or moe is None:
        yield from _mlp(random, prefix + "mlp.", hidden, config.intermediate_size)
        return
    yield prefix + "mlp.gate.weight", random.linear(moe.num_experts, hidden)
    yield prefix + "mlp.gate.e_score_correction_bias", random.float32(moe.num_experts, std=0.05)
    for expert in range(moe.num_experts):
        yield from _mlp(random, f"{prefix}mlp.experts.{expert}.", hidden, moe.intermediate_size)
    shared = moe.num_shared_experts * moe.intermediate_size
    yield from _mlp(random, prefix + "mlp.shared_experts.", hidden, shared)


def _sparse_attention(
    config: ModelConfig, random: Random, attention: str, indexer_type: str
) -> Iterator[tuple[str, np.ndarray]]:
    hidden, heads, latent = config.hidden_size, config.num_heads, config.kv_lora_rank
    yield attention + "q_a_proj.weight", random.linear(config.q_lora_rank, hidden)
    yield attention + "q_a_layernorm.weight", random.norm(config.q_lora_rank)
    yield attention + "q_b_proj.weight", random.linear(heads * config.qk_head_dim, config.q_lora_rank)
    yield attention + "kv_a_proj_with_mqa.weight", random.linear(latent + config.qk_rope_head_dim, hidden)
    yield attention + "kv_a_layernorm.weight", random.norm(latent)
    yield attention + "kv_b_proj.weight", random.linear(heads * (config.qk_nope_head_dim + config.v_head_dim), latent)
    yield attention + "o_proj.weight", random.linear(hidden, heads * config.v_head_dim)
    if indexer_type == FULL:
        indexer, width = config.indexer, config.indexer.head_dim
        yield attention + "indexer.wq_b.weight", random.linear(indexer.num_heads * width, config.q_lora_rank)
        yield attention + "indexer.wk.weight", random.linear(width, hidden)
        yield attention + "indexer.k_norm.weight", random.norm(width)
        yield attention + "indexer.k_norm.bias", random.normal(width, std=0.1)
        yield attention + "indexer.weights_proj.weight", random.linear(indexer.num_heads, hidden)
        if config.index_kpool > 1:
            yield attention + "indexer.index_kpool_compress_ape", random.normal(config.index_kpool, width, std=0.5)
            yield attention + "indexer.index_kpool_compress_gate", random.linear(width, hidden)


def _linear_attention(kda: KdaConfig, random: Random, attention: str, hidden: int) -> Iterator[tuple[str, np.ndarray]]:
    for name in ("q", "k", "v"):
        yield f"{attention}{name}_proj.weight", random.linear(kda.width, hidden)
        yield f"{attention}{name}_conv1d.weight", random.normal(kda.width, 1, kda.conv_size, std=kda.conv_size**-0.5)
    yield attention + "A_log", random.float32(kda.num_heads, std=0.5)
    # Most channels then forget slowly, as trained ones do.
    yield attention + "dt_bias", random.float32(kda.width, std=1.0, mean=-4.0)
    yield attention + "b_proj.weight", random.linear(kda.num_heads, hidden)
    for name in ("f", "g"):
        yield f"{attention}{name}_a_proj.weight", random.linear(kda.head_dim, hidden)
        yield f"{attention}{name}_b_proj.weight", random.linear(kda.width, kda.head_dim)
    yield attention + "o_norm.weight", random.norm(kda.head_dim)
    yield attention + "o_proj.weight", random.linear(hidden, kda.width)


def _hyper_connections(random: Random, prefix: str, streams: int, hidden: int) -> Iterator[tuple[str, np.ndarray]]:
    gates = streams * (2 + streams)
    for name in ("attn", "ffn"):
        yield f"{prefix}hc_{name}_fn", random.linear(gates, streams * hidden)
        yield f"{prefix}hc_{name}_base", random.float32(gates, std=0.5)
        yield f"{prefix}hc_{name}_scale", random.float32(3, std=0.1, mean=1.0)


def _mlp(random: Random, prefix: str, hidden: int, width: int) -> Iterator[tuple[str, np.ndarray]]:
    yield prefix + "gate_proj.weight", random.linear(width, hidden)
    yield prefix + "up_proj.weight", random.linear(width, hidden)
    yield prefix + "down_proj.weight", random.linear(hidden, width)
