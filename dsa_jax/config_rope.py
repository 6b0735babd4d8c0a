"""The rotary position embedding in a config.json."""

import dataclasses
import math

from dsa_jax.config_validation import ConfigError, Fields

_ROPE_KEYS = frozenset({"rope_theta", "rope_type", "type"})
_YARN_KEYS = _ROPE_KEYS | {
    "factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
}


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


@dataclasses.dataclass(frozen=True)
class YarnConfig:
    """YaRN context extension (arXiv:2309.00071) with the two mscale factors of DeepSeek-V2.

    Attributes:
      factor: How much longer than the original context the extended one is.
      original_max_position_embeddings: Positions before the extension.
      beta_fast: Rotations within the original context above which a frequency stays as it is.
      beta_slow: Rotations below which a frequency is divided by `factor`.
      mscale: Numerator of the factor on cos and sin; 1 where config.json has none.
      mscale_all_dim: Denominator of that factor, and the one that scales the softmax; 0 where config.json has none.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float

    @property
    def cos_sin_scale(self) -> float:
        """Factor on cos and sin; 1 for the published checkpoints, whose two mscale are equal."""
        return _yarn_mscale(self.factor, self.mscale) / _yarn_mscale(self.factor, self.mscale_all_dim)

    @property
    def softmax_factor(self) -> float:
        """Factor on the softmax scale, for short prompts too."""
        return _yarn_mscale(self.factor, self.mscale_all_dim) ** 2


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding, the same frequencies for the attention and the indexer."""

    theta: float
    yarn: YarnConfig | None


def read_rope(fields: Fields) -> RopeConfig:
    """RoPE as `rope_parameters`, or as `rope_theta` with `rope_scaling`; where both exist they must agree."""
    parameters, scaling = fields.section("rope_parameters"), fields.section("rope_scaling")
    if parameters is None:
        theta = fields.positive("rope_theta")
        return RopeConfig(theta, None) if scaling is None else _rope_section(scaling, theta, fields)
    found = _rope_section(parameters, parameters.positive("rope_theta", fields.get("rope_theta")), fields)
    if fields.has("rope_theta") and fields.positive("rope_theta") != found.theta:
        raise ConfigError(f"rope_theta={fields.get('rope_theta')} contradicts rope_parameters.rope_theta={found.theta}")
    if scaling is not None:
        old = _rope_section(scaling, found.theta, fields)
        if old != found:
            raise ConfigError(f"rope_scaling, read as {old}, contradicts rope_parameters, read as {found}")
    return found


def _rope_section(section: Fields, theta: float, fields: Fields) -> RopeConfig:
    kind = section.get("rope_type", section.get("type", "default"))
    label = section.label("rope_type")
    if section.get("type", kind) != kind:
        raise ConfigError(f"{label}={kind!r} contradicts type={section.get('type')!r}")
    if kind not in ("default", "yarn"):
        raise ConfigError(f"{label}={kind!r} is not supported; supported: 'default' or 'yarn'")
    unknown = sorted(set(section.names()) - (_YARN_KEYS if kind == "yarn" else _ROPE_KEYS))
    if unknown:
        values = ", ".join(f"{section.label(name)}={section.get(name)!r}" for name in unknown)
        raise ConfigError(f"{values} is not supported for {label}={kind!r}")
    section.refuse_unless_equal("rope_theta", theta, "rope_theta")
    return RopeConfig(theta, _yarn(section, fields) if kind == "yarn" else None)


def _yarn(section: Fields, fields: Fields) -> YarnConfig:
    if section.has("mscale") != section.has("mscale_all_dim"):
        # Readers disagree on what one without the other means.
        got = f"mscale={section.get('mscale')}, mscale_all_dim={section.get('mscale_all_dim')}"
        raise ConfigError(f"{section.label('mscale')} and mscale_all_dim must be given together, got {got}")
    factor = section.positive("factor")
    original = section.integer("original_max_position_embeddings")
    positions = fields.integer("max_position_embeddings")
    if factor < 1:
        raise ConfigError(f"{section.label('factor')}={factor} must be at least 1")
    if positions > factor * original:
        raise ConfigError(
            f"max_position_embeddings={positions} exceeds {section.label('factor')}={factor} x "
            f"original_max_position_embeddings={original}"
        )
    given = section.has("mscale")
    return YarnConfig(
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=section.positive("beta_fast", 32.0),
        beta_slow=section.positive("beta_slow", 1.0),
        mscale=section.positive("mscale") if given else 1.0,
        mscale_all_dim=section.positive("mscale_all_dim") if given else 0.0,
    )
