"""Reading fields of a config.json, and the refusal of what the model does not compute."""

import math
from collections.abc import Mapping, Sequence
from typing import Any


class ConfigError(ValueError):
    """A config.json that is unreadable, unsupported or contradicts itself."""


class Fields:
    """The fields of a config.json, read with their types checked; null counts as absent, as in transformers."""

    def __init__(self, raw: Mapping[str, Any], prefix: str = ""):
        self._raw = raw
        self._prefix = prefix

    def label(self, name: str) -> str:
        """Field name as an error message shows it."""
        return self._prefix + name

    def has(self, name: str) -> bool:
        """Whether the field is present and not null."""
        return self._raw.get(name) is not None

    def names(self) -> list[str]:
        """Names of the fields that are present and not null."""
        return [name for name in self._raw if self.has(name)]

    def get(self, name: str, default: Any = None) -> Any:
        """The field unchecked, or the default."""
        return self._raw[name] if self.has(name) else default

    def _value(self, name: str, default: Any) -> Any:
        value = self.get(name, default)
        if value is None:
            raise ConfigError(f"the field {self.label(name)} is missing")
        return value

    def integer(self, name: str, default: int | None = None, minimum: int = 1) -> int:
        """An int of at least `minimum`; missing without a default raises."""
        value = self._value(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise ConfigError(f"{self.label(name)}={value!r} must be an int >= {minimum}")
        return value

    def positive(self, name: str, default: float | None = None) -> float:
        """A finite number above 0; missing without a default raises."""
        value = self._value(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise ConfigError(f"{self.label(name)}={value!r} must be a positive number")
        return float(value)

    def boolean(self, name: str, default: bool | None = None) -> bool:
        """True or false; missing without a default raises."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{self.label(name)}={value!r} must be true or false")
        return value

    def section(self, name: str) -> "Fields | None":
        """A nested object, or None where absent."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise ConfigError(f"{self.label(name)}={value!r} must be an object")
        return Fields(value, f"{self.label(name)}.")

    def choices(self, name: str, length: int, allowed: Sequence[str]) -> tuple[str, ...]:
        """A list with one of the allowed words per layer."""
        value = self._value(name, None)
        if not isinstance(value, list) or len(value) != length:
            size = f"{len(value)} entries" if isinstance(value, list) else repr(value)
            raise ConfigError(f"{self.label(name)} must list num_hidden_layers={length} layers, got {size}")
        for layer, word in enumerate(value):
            if word not in allowed:
                raise ConfigError(f"{self.label(name)}[{layer}]={word!r} is not supported; supported: {tuple(allowed)}")
        return tuple(value)

    def refuse_unless(self, name: str, *allowed: Any) -> None:
        """Raise unless the field is absent or has one of the allowed values."""
        value = self.get(name)
        if value is not None and not any(type(value) is type(a) and value == a for a in allowed):
            wanted = " or ".join(repr(a) for a in allowed)
            raise ConfigError(f"{self.label(name)}={value!r} is not supported; supported: {wanted}")

    def refuse_unless_equal(self, name: str, expected: float, meaning: str) -> None:
        """Raise unless the field is absent or equals what other fields say."""
        value = self.get(name)
        if value is not None and value != expected:
            raise ConfigError(f"{self.label(name)}={value!r} contradicts {meaning}={expected}")


def check_supported(fields: Fields) -> None:
    """Raise ConfigError where a field asks for a computation that the model does not have."""
    fields.refuse_unless("attention_bias", False)
    fields.refuse_unless("mlp_bias", False)
    fields.refuse_unless("hidden_act", "silu")
    fields.refuse_unless("scoring_func", "sigmoid")
    fields.refuse_unless("topk_method", "noaux_tc")
    fields.refuse_unless("moe_router_dtype", "float32")
    # The main attention of both families rotates interleaved pairs; only the indexer's layout differs.
    fields.refuse_unless("rope_interleave", True)
    if not fields.has("q_lora_rank"):
        raise ConfigError("q_lora_rank is missing or null; the indexer reads its queries from that latent")


def check_plain(fields: Fields) -> None:
    """Raise ConfigError for what only GLM-5.3-Flash has: pooled index keys and clamped activations."""
    fields.refuse_unless("index_kpool", 1)
    if fields.has("swiglu_limit"):
        raise ConfigError(f"swiglu_limit={fields.get('swiglu_limit')!r} is not supported; supported: null")


def check_counts(fields: Fields, minimum_rope: int = 1) -> None:
    """Raise ConfigError where two fields that count the same thing disagree."""
    heads = fields.integer("num_attention_heads")
    fields.refuse_unless_equal("num_key_value_heads", heads, "num_attention_heads")
    nope, rope = fields.integer("qk_nope_head_dim"), fields.integer("qk_rope_head_dim", minimum=minimum_rope)
    fields.refuse_unless_equal("qk_head_dim", nope + rope, f"qk_nope_head_dim={nope} + qk_rope_head_dim={rope}")
    if rope % 2:
        raise ConfigError(f"qk_rope_head_dim={rope} must be even")
    index_dim = fields.integer("index_head_dim")
    if rope > index_dim:
        raise ConfigError(f"qk_rope_head_dim={rope} must not exceed index_head_dim={index_dim}")


def check_routing(fields: Fields) -> None:
    """Raise ConfigError where the counts of experts, groups and choices cannot hold together."""
    experts, chosen = fields.integer("n_routed_experts"), fields.integer("num_experts_per_tok")
    groups, kept = fields.integer("n_group"), fields.integer("topk_group")
    for name in ("num_experts", "num_local_experts"):
        fields.refuse_unless_equal(name, experts, "n_routed_experts")
    if experts % groups:
        raise ConfigError(f"n_routed_experts={experts} must be divisible by n_group={groups}")
    if kept > groups:
        raise ConfigError(f"topk_group={kept} must not exceed n_group={groups}")
    if groups > 1 and experts // groups < 2:
        raise ConfigError(f"n_group={groups} leaves n_routed_experts={experts} less than 2 experts in a group")
    if chosen > kept * (experts // groups):
        raise ConfigError(
            f"num_experts_per_tok={chosen} exceeds the {kept * (experts // groups)} experts that "
            f"topk_group={kept} of n_group={groups} groups leave of n_routed_experts={experts}"
        )
