"""Configuration of a model, read from the config.json of a Hugging Face checkpoint.

Supported are `glm_moe_dsa` (GLM-5, 5.1, 5.2, 5.3), `deepseek_v32` (DeepSeek-V3.2) and the text model of `glm5_next`
(GLM-5.3-Flash). Fields that change what is computed are honoured or refused. `head_dim` is not read: it means something
else in each release. Nor are fields about training or deployment (dropout, ep_size, ...).
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsa_jax.config_flash import (
    NO_INDEXER,
    HyperConnectionsConfig,
    KdaConfig,
    check_flash,
    flash_indexer_types,
    hyper_connections,
    linear_attention,
    text_fields,
)
from dsa_jax.config_layers import SPARSE, indexer_types, mlp_types
from dsa_jax.config_quantization import QuantizationConfig, from_hf_quant_config, read_quantization
from dsa_jax.config_rope import RopeConfig, YarnConfig, read_rope
from dsa_jax.config_validation import ConfigError, Fields, check_counts, check_plain, check_routing, check_supported

__all__ = [
    "ConfigError",
    "HyperConnectionsConfig",
    "IndexerConfig",
    "KdaConfig",
    "ModelConfig",
    "MoeConfig",
    "QuantizationConfig",
    "RopeConfig",
    "YarnConfig",
]

# model_type -> (architecture, whether the indexer rotates interleaved pairs when config.json does not say).
# deepseek_v32 publishes no such field and rotates halves; a GLM checkpoint run that way selects other keys.
_FAMILIES = {
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM", True),
    "deepseek_v32": ("DeepseekV32ForCausalLM", False),
    "glm5_next": ("Glm5NextForConditionalGeneration", True),
}
# Names of the attention with an indexer: transformers before 5.2x and exports, then transformers since.
_SPARSE_ATTENTION = ("deepseek_sparse_attention", "indexed_attention")
DEFAULT_LATENT_NORM_EPS = 1e-6
# Positive integers that have one name in config.json and here.
_SIZES = (
    "hidden_size",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "v_head_dim",
    "intermediate_size",
    "max_position_embeddings",
)


@dataclasses.dataclass(frozen=True)
class IndexerConfig:
    """Lightning indexer of the full layers.

    Attributes:
      num_heads: Query heads; there is one key head.
      head_dim: Width of a head, of which the first `qk_rope_head_dim` values are rotated.
      topk: Keys selected for each query row.
      rope_interleave: Whether the rotated pairs are neighbours (GLM) or halves apart (DeepSeek-V3.2).
    """

    num_heads: int
    head_dim: int
    topk: int
    rope_interleave: bool


@dataclasses.dataclass(frozen=True)
class MoeConfig:
    """Mixture of experts of the sparse layers: sigmoid router with a correction bias, and shared experts."""

    num_experts: int
    num_experts_per_tok: int
    num_shared_experts: int
    intermediate_size: int
    n_group: int
    topk_group: int
    routed_scaling_factor: float
    norm_topk_prob: bool


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Everything about a model that its computation depends on.

    Attributes:
      rms_norm_eps: eps of the RMS norms on the residual stream.
      latent_norm_eps: eps of the norms of the query and the KV latent (`q_a_layernorm`, `kv_a_layernorm`). Not in
        config.json. The default is 1e-6, which transformers, the published reference, hard-codes for both families;
        vLLM takes `rms_norm_eps`, which is 1e-5 for GLM. Between the two, the logits of small random GLM models (up
        to 10 in size) move by 6e-5 to 1.3e-4; for DeepSeek-V3.2, whose `rms_norm_eps` is 1e-6, both are the same.
      intermediate_size: Width of the dense MLP layers.
      moe: None where every layer is dense.
      rope: None where no layer has a positional encoding.
      indexer_types: Per layer "full" (owns an indexer), "shared" (reuses the selection of the last full layer) or
        "none" (linear attention).
      mlp_types: Per layer "dense" or "sparse" (mixture of experts).
      eos_token_ids: Tokens that end a generation; empty where the checkpoint names none.
      num_mtp_layers: Multi-token-prediction layers stored after the `num_layers` layers; the model does not run them.
      kda: The linear attention, or None where every layer is sparse attention.
      index_kpool: Tokens of an index key: 1, or the size of the pools that are selected as a whole.
      hyper_connections: The residual streams, or None for a single plain one.
      swiglu_limit: Bound of the MLPs' gate (from above) and up-projection (both ways), or None.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rms_norm_eps: float
    latent_norm_eps: float
    intermediate_size: int
    max_position_embeddings: int
    rope: RopeConfig | None
    indexer: IndexerConfig
    moe: MoeConfig | None
    indexer_types: tuple[str, ...]
    mlp_types: tuple[str, ...]
    eos_token_ids: tuple[int, ...]
    quantization: QuantizationConfig | None
    tie_word_embeddings: bool
    num_mtp_layers: int
    kda: KdaConfig | None = None
    index_kpool: int = 1
    hyper_connections: HyperConnectionsConfig | None = None
    swiglu_limit: float | None = None

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """Numbers of the layers with sparse attention, which have records in the cache."""
        return tuple(layer for layer, kind in enumerate(self.indexer_types) if kind != NO_INDEXER)

    @property
    def tensor_prefix(self) -> str:
        """What the names of the checkpoint's tensors start with, but for the head's."""
        return "model.language_model." if self.model_type == "glm5_next" else "model."

    @property
    def selected_width(self) -> int:
        """Most tokens that a row attends to: with pools, those of the row's incomplete pool come on top."""
        return self.indexer.topk + self.index_kpool - 1

    @property
    def qk_head_dim(self) -> int:
        """Width of a query head of the attention."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """Scale of the attention scores, YaRN's factor included."""
        factor = 1.0 if self.rope is None or self.rope.yarn is None else self.rope.yarn.softmax_factor
        return self.qk_head_dim**-0.5 * factor

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], *, latent_norm_eps: float | None = None) -> "ModelConfig":
        """Configuration from the parsed config.json of a checkpoint.

        Args:
          raw: The parsed JSON object.
          latent_norm_eps: eps of the two latent norms; None means 1e-6, and `rms_norm_eps` for GLM-5.3-Flash, as in
            transformers (see `ModelConfig`).

        Returns:
          The configuration, with every default of transformers filled in.

        Raises:
          ConfigError: A field is missing, of the wrong type, not supported, or contradicts another one.
        """
        family_interleave = _check_family(Fields(raw))
        flash = raw["model_type"] == "glm5_next"
        fields = text_fields(raw) if flash else Fields(raw)
        check_supported(fields)
        check_counts(fields, minimum_rope=0 if flash else 1)
        num_layers = fields.integer("num_hidden_layers")
        mlps = mlp_types(fields, num_layers)
        parts = _flash_parts(fields, num_layers) if flash else _plain_parts(fields, num_layers)
        default_eps = fields.positive("rms_norm_eps") if flash else DEFAULT_LATENT_NORM_EPS
        vocab_size = fields.integer("vocab_size")
        return cls(
            model_type=raw["model_type"],
            vocab_size=vocab_size,
            num_layers=num_layers,
            num_heads=fields.integer("num_attention_heads"),
            qk_rope_head_dim=fields.integer("qk_rope_head_dim", minimum=0),
            rms_norm_eps=fields.positive("rms_norm_eps"),
            latent_norm_eps=Fields({"latent_norm_eps": latent_norm_eps}).positive("latent_norm_eps", default_eps),
            indexer=IndexerConfig(
                num_heads=fields.integer("index_n_heads"),
                head_dim=fields.integer("index_head_dim"),
                topk=fields.integer("index_topk"),
                rope_interleave=fields.boolean("indexer_rope_interleave", family_interleave),
            ),
            moe=_moe(fields) if SPARSE in mlps else None,
            mlp_types=mlps,
            eos_token_ids=_eos_token_ids(fields, vocab_size),
            quantization=read_quantization(fields),
            tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
            num_mtp_layers=fields.integer("num_nextn_predict_layers", 0, minimum=0),
            **{name: fields.integer(name) for name in _SIZES},
            **parts,
        )

    @classmethod
    def from_folder(cls, path: str | Path, *, latent_norm_eps: float | None = None) -> "ModelConfig":
        """Configuration of the checkpoint in a folder.

        Like in transformers, the eos ids of generation_config.json, where there are any, come before those of
        config.json.

        Args:
          path: Folder with config.json and, optionally, generation_config.json.
          latent_norm_eps: eps of the two latent norms; None means 1e-6, and `rms_norm_eps` for GLM-5.3-Flash, as in
            transformers (see `ModelConfig`).

        Returns:
          The configuration.

        Raises:
          ConfigError: The folder or its config.json is missing or unreadable, or as in `from_dict`; the message starts
            with the path.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise ConfigError(f"{folder}: no such folder")
        if not (folder / "config.json").is_file():
            raise ConfigError(f"{folder}: the folder has no config.json")
        raw = dict(_read_json(folder / "config.json"))
        if (folder / "generation_config.json").is_file():
            eos = _read_json(folder / "generation_config.json").get("eos_token_id")
            raw["eos_token_id"] = raw.get("eos_token_id") if eos is None else eos
        if raw.get("quantization_config") is None and (folder / "hf_quant_config.json").is_file():
            # Exports of NVIDIA's ModelOpt may describe the quantization only there.
            raw["quantization_config"] = from_hf_quant_config(_read_json(folder / "hf_quant_config.json"))
        try:
            return cls.from_dict(raw, latent_norm_eps=latent_norm_eps)
        except ConfigError as error:
            raise ConfigError(f"{folder}: {error}") from None


def _plain_parts(fields: Fields, num_layers: int) -> dict[str, Any]:
    """Layers and positions of a model whose layers all have sparse attention."""
    check_plain(fields)
    if fields.has("layer_types"):
        fields.choices("layer_types", num_layers, _SPARSE_ATTENTION)
    return {"indexer_types": indexer_types(fields, num_layers), "rope": read_rope(fields)}


def _flash_parts(fields: Fields, num_layers: int) -> dict[str, Any]:
    """The same of GLM-5.3-Flash, with what only it has."""
    check_flash(fields)
    kda, linear = linear_attention(fields, num_layers)
    return {
        "indexer_types": flash_indexer_types(fields, linear),
        "rope": None,
        "kda": kda,
        "index_kpool": fields.integer("index_kpool"),
        "hyper_connections": hyper_connections(fields),
        "swiglu_limit": fields.positive("swiglu_limit"),
    }


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a JSON file ({error})") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: must hold a JSON object, got {type(value).__name__}")
    return value


def _check_family(fields: Fields) -> bool:
    """Refuse other models; returns the family's layout of the index RoPE."""
    model_type = fields.get("model_type")
    supported = ", ".join(_FAMILIES)
    if model_type is None:
        raise ConfigError(f"the field model_type is missing; supported: {supported}")
    if not isinstance(model_type, str) or model_type not in _FAMILIES:
        raise ConfigError(f"model_type={model_type!r} is not supported; supported: {supported}")
    architecture, interleave = _FAMILIES[model_type]
    architectures = fields.get("architectures", [architecture])
    if architectures != [architecture]:
        raise ConfigError(f"architectures={architectures!r} contradicts {model_type=}, which is {[architecture]}")
    return interleave


def _moe(fields: Fields) -> MoeConfig:
    check_routing(fields)
    return MoeConfig(
        num_experts=fields.integer("n_routed_experts"),
        num_experts_per_tok=fields.integer("num_experts_per_tok"),
        num_shared_experts=fields.integer("n_shared_experts"),
        intermediate_size=fields.integer("moe_intermediate_size"),
        n_group=fields.integer("n_group"),
        topk_group=fields.integer("topk_group"),
        routed_scaling_factor=fields.positive("routed_scaling_factor"),
        norm_topk_prob=fields.boolean("norm_topk_prob"),
    )


def _eos_token_ids(fields: Fields, vocab_size: int) -> tuple[int, ...]:
    value = fields.get("eos_token_id", [])
    ids = value if isinstance(value, list) else [value]
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            raise ConfigError(f"eos_token_id={value!r} must be ids in [0, vocab_size={vocab_size})")
    return tuple(ids)
