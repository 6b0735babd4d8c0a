"""Tiny random checkpoints in Hugging Face layout, to try everything without a download."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from dsa_jax.config import ModelConfig
from dsa_jax.config_layers import FULL, SPARSE

_NUM_BYTES = 256
_NUM_FILES = 2
# Some ids are beyond the tokenizer's, as in published checkpoints, and 8 devices do not divide it.
_VOCAB_SIZE = 260

_COMMON: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 64,
    "index_head_dim": 32,
    "index_n_heads": 8,
    "initializer_range": 0.02,
    "intermediate_size": 128,
    "kv_lora_rank": 32,
    "max_position_embeddings": 4096,
    "moe_intermediate_size": 32,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "use_cache": True,
    "v_head_dim": 32,
    "vocab_size": _VOCAB_SIZE,
}
_GLM: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "dtype": "bfloat16",
    "indexer_rope_interleave": True,
    "model_type": "glm_moe_dsa",
    "qk_head_dim": 48,
    "rope_interleave": True,
}
_FAMILIES: dict[str, dict[str, Any]] = {
    "glm5": _GLM
    | {"head_dim": 16, "index_topk": 16, "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}},
    "glm52": _GLM
    | {
        "head_dim": 32,
        "index_share_for_mtp_iteration": True,
        "index_skip_topk_offset": 2,
        "index_topk": 16,
        "index_topk_freq": 3,
        "index_topk_pattern": None,
        "indexer_types": ["full", "full", "shared", "shared", "full", "shared"],
        "mlp_layer_types": ["dense"] + ["sparse"] * 5,
        "moe_router_dtype": "float32",
        "num_hidden_layers": 6,
        "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
    },
    "dsv32": {
        "architectures": ["DeepseekV32ForCausalLM"],
        "index_topk": 16,
        "model_type": "deepseek_v32",
        "n_group": 4,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "rms_norm_eps": 1e-6,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 4,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 1024,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "topk_group": 2,
        "torch_dtype": "bfloat16",
    },
}
FAMILIES = tuple(_FAMILIES)
# Tokens that end a generation; their ids follow the bytes.
_SPECIAL = {
    "glm_moe_dsa": ("<|endoftext|>", "<|user|>", "<|observation|>"),
    "deepseek_v32": ("<|end_of_sentence|>",),
}


def write_tiny(folder: str | Path, family: str, seed: int = 0) -> ModelConfig:
    """Write a tiny random checkpoint with the names, shapes and dtypes of the published ones.

    It has 8 heads, so it shards over up to 8 devices, two weight files with an index, a multi-token-prediction layer
    that readers skip, and a tokenizer with one token for each byte. The same seed writes the same files.

    Args:
      folder: Folder to write to; made if missing. Files of the same names in it are replaced.
      family: "glm5" (every layer owns an indexer), "glm52" (layers share indexers) or "dsv32" (DeepSeek-V3.2: yarn,
        index RoPE over halves, grouped routing).
      seed: Seed of the weights, not negative.

    Returns:
      The configuration of the checkpoint.

    Raises:
      ValueError: The family is unknown or the seed is negative.
    """
    if family not in _FAMILIES:
        raise ValueError(f"{family=} is unknown; one of {FAMILIES}")
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise ValueError(f"seed must be an int >= 0, got {seed!r}")
    raw = _COMMON | _FAMILIES[family]
    eos = [_NUM_BYTES + i for i in range(len(_SPECIAL[raw["model_type"]]))]
    raw["eos_token_id"] = eos if len(eos) > 1 else eos[0]
    config = ModelConfig.from_dict(raw)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    _write_weights(folder, dict(_tensors(config, np.random.default_rng(seed))))
    _write_tokenizer(folder, _SPECIAL[config.model_type])
    _write_json(folder / "config.json", raw)
    _write_json(folder / "generation_config.json", {"eos_token_id": raw["eos_token_id"], "do_sample": False})
    return config


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _write_weights(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    """Files of about equal size, in the order of the names, and the index that says which tensor is where."""
    total = sum(tensor.nbytes for tensor in tensors.values())
    files: list[dict[str, np.ndarray]] = [{} for _ in range(_NUM_FILES)]
    weight_map = {}
    written = 0
    for name in sorted(tensors):
        number = written * _NUM_FILES // total
        files[number][name] = tensors[name]
        weight_map[name] = f"model-{number + 1:05}-of-{_NUM_FILES:05}.safetensors"
        written += tensors[name].nbytes
    for content in files:
        save_file(content, folder / weight_map[next(iter(content))], metadata={"format": "pt"})
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(folder / "model.safetensors.index.json", index)


def _write_tokenizer(folder: Path, special: tuple[str, ...]) -> None:
    """Byte-level BPE without merges: ids 0..255 are the bytes in the order of their printable stand-ins."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    tokenizer.save(str(folder / "tokenizer.json"))


class _Random:
    """Random tensors of a checkpoint, scaled so that activations keep their size from layer to layer."""

    def __init__(self, rng: np.random.Generator):
        self._rng = rng

    def normal(self, *shape: int, std: float, mean: float = 0.0) -> np.ndarray:
        return (mean + std * self._rng.standard_normal(shape, dtype=np.float32)).astype(ml_dtypes.bfloat16)

    def linear(self, rows: int, columns: int) -> np.ndarray:
        return self.normal(rows, columns, std=columns**-0.5)

    def norm(self, size: int) -> np.ndarray:
        return self.normal(size, std=0.1, mean=1.0)

    def router_bias(self, experts: int) -> np.ndarray:
        return (0.05 * self._rng.standard_normal((experts,), dtype=np.float32)).astype(np.float32)


def _tensors(config: ModelConfig, rng: np.random.Generator) -> Iterator[tuple[str, np.ndarray]]:
    """Name and value of each tensor."""
    random = _Random(rng)
    hidden, vocab, layers = config.hidden_size, config.vocab_size, config.num_layers
    yield "model.embed_tokens.weight", random.normal(vocab, hidden, std=1.0)
    for layer in range(layers):
        yield from _layer(
            config, random, f"model.layers.{layer}.", config.indexer_types[layer], config.mlp_types[layer]
        )
    yield "model.norm.weight", random.norm(hidden)
    yield "lm_head.weight", random.linear(vocab, hidden)
    for layer in range(layers, layers + config.num_mtp_layers):
        prefix = f"model.layers.{layer}."
        yield from _layer(config, random, prefix, FULL, SPARSE)
        yield prefix + "enorm.weight", random.norm(hidden)
        yield prefix + "hnorm.weight", random.norm(hidden)
        yield prefix + "eh_proj.weight", random.linear(hidden, 2 * hidden)
        yield prefix + "shared_head.norm.weight", random.norm(hidden)


def _layer(
    config: ModelConfig, random: _Random, prefix: str, indexer_type: str, mlp_type: str
) -> Iterator[tuple[str, np.ndarray]]:
    hidden, heads, latent = config.hidden_size, config.num_heads, config.kv_lora_rank
    yield prefix + "input_layernorm.weight", random.norm(hidden)
    yield prefix + "post_attention_layernorm.weight", random.norm(hidden)
    attention = prefix + "self_attn."
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
    moe = config.moe
    if mlp_type != SPARSE or moe is None:
        yield from _mlp(random, prefix + "mlp.", hidden, config.intermediate_size)
        return
    yield prefix + "mlp.gate.weight", random.linear(moe.num_experts, hidden)
    yield prefix + "mlp.gate.e_score_correction_bias", random.router_bias(moe.num_experts)
    for expert in range(moe.num_experts):
        yield from _mlp(random, f"{prefix}mlp.experts.{expert}.", hidden, moe.intermediate_size)
    shared = moe.num_shared_experts * moe.intermediate_size
    yield from _mlp(random, prefix + "mlp.shared_experts.", hidden, shared)


def _mlp(random: _Random, prefix: str, hidden: int, width: int) -> Iterator[tuple[str, np.ndarray]]:
    yield prefix + "gate_proj.weight", random.linear(width, hidden)
    yield prefix + "up_proj.weight", random.linear(width, hidden)
    yield prefix + "down_proj.weight", random.linear(hidden, width)
