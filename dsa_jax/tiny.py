"""Tiny random checkpoints in Hugging Face layout, to try everything without a download."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from dsa_jax.config import ModelConfig
from dsa_jax.tiny_tensors import tensors

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
    "glm53_flash": _GLM
    | {
        "architectures": ["Glm5NextForConditionalGeneration"],
        "hc_eps": 1e-6,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "head_dim": 0,
        "index_kpool": 4,
        "index_kpool_always_select_tail": True,
        "index_kpool_compress": True,
        "index_topk": 16,
        "layer_types": ["linear_attention", "deepseek_sparse_attention"] * 2 + ["linear_attention"],
        "linear_attn_config": {
            "full_attn_layers": [1, 3],
            "gate_lower_bound": -5.0,
            "head_dim": 16,
            "kda_layers": [0, 2, 4],
            "num_heads": 8,
            "short_conv_kernel_size": 4,
        },
        "mhc": True,
        "mla_use_nope": True,
        "model_type": "glm5_next",
        "num_hidden_layers": 5,
        "qk_head_dim": 32,
        "qk_rope_head_dim": 0,
        "swiglu_limit": 10.0,
    },
}
# Fields of a model of text and images that describe the whole; its other fields are those of the text model.
_WHOLE = ("architectures", "dtype", "model_type", "tie_word_embeddings")
FAMILIES = tuple(_FAMILIES)
# Tokens that end a generation; their ids follow the bytes.
_SPECIAL = {
    "glm_moe_dsa": ("<|endoftext|>", "<|user|>", "<|observation|>"),
    "deepseek_v32": ("<|end_of_sentence|>",),
    "glm5_next": ("<|endoftext|>", "<|user|>", "<|observation|>"),
}


def write_tiny(folder: str | Path, family: str, seed: int = 0) -> ModelConfig:
    """Write a tiny random checkpoint with the names, shapes and dtypes of the published ones.

    It has 8 heads, so it shards over up to 8 devices, two weight files with an index, a multi-token-prediction layer
    that readers skip, and a tokenizer with one token for each byte. The same seed writes the same files.

    Args:
      folder: Folder to write to; it must not exist or be empty.
      family: "glm5" (every layer owns an indexer), "glm52" (layers share indexers), "dsv32" (DeepSeek-V3.2: yarn,
        index RoPE over halves, grouped routing) or "glm53_flash" (linear attention in most layers, pooled index keys,
        several residual streams; no vision tower).
      seed: Seed of the weights, not negative.

    Returns:
      The configuration of the checkpoint.

    Raises:
      ValueError: The family is unknown, the seed is negative, or the folder holds something.
    """
    if family not in _FAMILIES:
        raise ValueError(f"{family=} is unknown; one of {FAMILIES}")
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise ValueError(f"seed must be an int >= 0, got {seed!r}")
    folder = Path(folder)
    if folder.is_dir() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty: what it holds would be mixed with the new checkpoint")
    raw = _COMMON | _FAMILIES[family]
    eos = [_NUM_BYTES + i for i in range(len(_SPECIAL[raw["model_type"]]))]
    raw["eos_token_id"] = eos if len(eos) > 1 else eos[0]
    if raw["model_type"] == "glm5_next":
        text = {name: value for name, value in raw.items() if name not in _WHOLE} | {"model_type": "glm5_next_text"}
        raw = {name: raw[name] for name in (*_WHOLE, "eos_token_id")} | {"text_config": text}
    config = ModelConfig.from_dict(raw)
    folder.mkdir(parents=True, exist_ok=True)
    _write_weights(folder, dict(tensors(config, np.random.default_rng(seed))))
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
