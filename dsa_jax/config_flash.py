"""What the config.json of GLM-5.3-Flash (`glm5_next`) has and the other families do not."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from dsa_jax.config_layers import FULL
from dsa_jax.config_validation import ConfigError, Fields

LINEAR = "linear_attention"
# What `indexer_types` says of a layer without sparse attention.
NO_INDEXER = "none"
# Fields that describe the whole checkpoint; they stand beside `text_config` and win over its own.
_OUTER = ("quantization_config", "eos_token_id", "tie_word_embeddings")


@dataclasses.dataclass(frozen=True)
class KdaConfig:
    """Kimi Delta Attention, the linear attention of some layers (arXiv:2510.26692).

    Attributes:
      num_heads: Heads; the same for queries, keys and values.
      head_dim: Width of a head's queries, keys and values.
      conv_size: Taps of the causal convolution in front of queries, keys and values.
      gate_lower_bound: Most negative logarithm of a step's decay.
    """

    num_heads: int
    head_dim: int
    conv_size: int
    gate_lower_bound: float

    @property
    def width(self) -> int:
        """Values of all heads."""
        return self.num_heads * self.head_dim


@dataclasses.dataclass(frozen=True)
class HyperConnectionsConfig:
    """Manifold-constrained hyper-connections: several residual streams with learned mixing (arXiv:2512.24880).

    Attributes:
      streams: Residual streams.
      sinkhorn_iterations: Rounds of normalisation of the mixing matrix.
      eps: Added to gates and to the sums that are divided by.
    """

    streams: int
    sinkhorn_iterations: int
    eps: float


def text_fields(raw: Mapping[str, Any]) -> Fields:
    """The fields of the text model, with those of the whole checkpoint where only they are given.

    Raises:
      ConfigError: There is no `text_config`, or it is of another model.
    """
    text = raw.get("text_config")
    if not isinstance(text, Mapping):
        raise ConfigError(f"text_config={text!r} must be an object")
    merged = dict(text) | {name: raw[name] for name in _OUTER if raw.get(name) is not None}
    fields = Fields(merged, "text_config.")
    fields.refuse_unless("model_type", "glm5_next_text")
    return fields


def check_flash(fields: Fields) -> None:
    """Raise ConfigError where a field asks for a computation that the model does not have."""
    for name in ("mhc", "mla_use_nope", "index_kpool_compress", "index_kpool_always_select_tail"):
        fields.refuse_unless(name, True)
    fields.refuse_unless("qk_rope_head_dim", 0)
    kpool, topk = fields.integer("index_kpool"), fields.integer("index_topk")
    if topk % kpool:
        raise ConfigError(f"index_topk={topk} must be divisible by index_kpool={kpool}")
    if kpool < 2:
        raise ConfigError(f"index_kpool={kpool} is not supported for glm5_next; supported: 2 or more")


def linear_attention(fields: Fields, num_layers: int) -> tuple[KdaConfig, tuple[bool, ...]]:
    """The linear attention, and which layers have it.

    Raises:
      ConfigError: A field is missing or has the wrong form, or two fields disagree.
    """
    section = fields.section("linear_attn_config")
    if section is None:
        raise ConfigError("the field linear_attn_config is missing")
    names = (LINEAR, "deepseek_sparse_attention", "indexed_attention", "full_attention")
    linear = tuple(name == LINEAR for name in fields.choices("layer_types", num_layers, names))
    for name, wanted in (("kda_layers", True), ("full_attn_layers", False)):
        derived = [layer for layer, is_linear in enumerate(linear) if is_linear == wanted]
        if section.has(name) and section.get(name) != derived:
            raise ConfigError(
                f"{section.label(name)}={section.get(name)!r} contradicts layer_types, whose are {derived}"
            )
    if all(linear):
        raise ConfigError("layer_types must have a layer of sparse attention, got none")
    bound = section.get("gate_lower_bound")
    if not isinstance(bound, int | float) or isinstance(bound, bool) or not -80 <= bound < 0:
        raise ConfigError(f"{section.label('gate_lower_bound')}={bound!r} must be a number in [-80, 0)")
    config = KdaConfig(
        num_heads=section.integer("num_heads"),
        head_dim=section.integer("head_dim"),
        conv_size=section.integer("short_conv_kernel_size", minimum=2),
        gate_lower_bound=float(bound),
    )
    # Spellings that transformers adds when it saves.
    fields.refuse_unless_equal("linear_num_heads", config.num_heads, section.label("num_heads"))
    fields.refuse_unless_equal("linear_head_dim", config.head_dim, section.label("head_dim"))
    fields.refuse_unless_equal("linear_conv_kernel_dim", config.conv_size, section.label("short_conv_kernel_size"))
    fields.refuse_unless_equal("linear_lower_bound", config.gate_lower_bound, section.label("gate_lower_bound"))
    return config, linear


def hyper_connections(fields: Fields) -> HyperConnectionsConfig:
    """The residual streams."""
    return HyperConnectionsConfig(
        streams=fields.integer("hc_mult"),
        sinkhorn_iterations=fields.integer("hc_sinkhorn_iters"),
        eps=fields.positive("hc_eps"),
    )


def flash_indexer_types(fields: Fields, linear: tuple[bool, ...]) -> tuple[str, ...]:
    """Per layer "full", or "none" for linear attention, which ends the reach of a selection.

    Raises:
      ConfigError: A layer shares the indexer of another.
    """
    if fields.has("indexer_types"):
        fields.choices("indexer_types", len(linear), (FULL,))
    fields.refuse_unless("index_topk_freq", 1)
    return tuple(NO_INDEXER if is_linear else FULL for is_linear in linear)
