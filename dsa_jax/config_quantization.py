"""How a configuration declares quantised weights: block FP8, or NVFP4 as NVIDIA ModelOpt writes it."""

import dataclasses
import fnmatch
from collections.abc import Mapping
from typing import Any

from dsa_jax.config_validation import ConfigError, Fields
from dsa_jax.quantization import FP4_GROUP

# Blocks of the FP8 weights that NVFP4 ones may become: those of the published FP8 checkpoints.
_FP8_BLOCK = (128, 128)


@dataclasses.dataclass(frozen=True)
class QuantizationConfig:
    """How the checkpoint stores quantized weights.

    Which weights are quantized is told by the checkpoint's tensors; the lists in config.json name modules that do not
    exist.

    Attributes:
      method: "fp8": e4m3 weights with one float32 `weight_scale_inv` per block. "nvfp4": pairs of e2m1 values with one
        e4m3 `weight_scale` for 16 of them and one float32 `weight_scale_2`.
      block: Rows and columns of an FP8 block, stored or to be made from NVFP4; blocks at the edges may be partial.
      excluded: Shell patterns of modules that NVFP4 leaves out, for plans that are made without the tensors.
      power_of_two: Whether activations that meet FP8 weights are to have scales that are powers of two ("ue8m0").
    """

    method: str
    block: tuple[int, int]
    excluded: tuple[str, ...] = ()
    power_of_two: bool = False

    def excludes(self, tensor: str) -> bool:
        """Whether the configuration says that a tensor is not quantized."""
        module = tensor.removesuffix(".weight")
        return any(fnmatch.fnmatchcase(module, pattern) for pattern in self.excluded)


def read_quantization(fields: Fields) -> QuantizationConfig | None:
    """The section quantization_config of a config.json.

    Raises:
      ConfigError: The weights are quantized in a way that is not supported.
    """
    section = fields.section("quantization_config")
    if section is None:
        return None
    method, algorithm = section.get("quant_method"), section.get("quant_algo")
    if method == "fp8":
        return _block_fp8(section)
    if method in ("modelopt", "modelopt_fp4") and algorithm == "NVFP4":
        return _nvfp4(section)
    named = f" with quant_algo={algorithm!r}" if section.has("quant_algo") else ""
    raise ConfigError(
        f"unknown quantization: {section.label('quant_method')}={method!r}{named}; supported: 'fp8', and 'modelopt' "
        "with quant_algo='NVFP4'"
    )


def from_hf_quant_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What config.json would say, from the hf_quant_config.json that ModelOpt writes beside it."""
    found = raw.get("quantization")
    producer = raw.get("producer")
    method = producer.get("name") if isinstance(producer, Mapping) else None
    return {"quant_method": method or "modelopt", **(found if isinstance(found, Mapping) else {"quant_algo": found})}


def _block_fp8(section: Fields) -> QuantizationConfig:
    section.refuse_unless("fmt", "e4m3")
    section.refuse_unless("activation_scheme", "dynamic")
    section.refuse_unless("scale_fmt", "ue8m0")
    block = section.get("weight_block_size")
    if (
        not isinstance(block, list)
        or len(block) != 2
        or any(not isinstance(b, int) or isinstance(b, bool) or b < 1 for b in block)
    ):
        raise ConfigError(
            f"unknown quantization: {section.label('weight_block_size')}={block!r} must be two positive ints"
        )
    power_of_two = section.get("scale_fmt") == "ue8m0"
    return QuantizationConfig(method="fp8", block=(block[0], block[1]), power_of_two=power_of_two)


def _nvfp4(section: Fields) -> QuantizationConfig:
    section.refuse_unless("group_size", FP4_GROUP)
    groups = section.section("config_groups")
    for name in groups.names() if groups is not None else ():
        group = groups.section(name) if groups is not None else None
        weights = group.section("weights") if group is not None else None
        if weights is not None:
            weights.refuse_unless("num_bits", 4)
            weights.refuse_unless("type", "float")
            weights.refuse_unless("group_size", FP4_GROUP)
    excluded = section.get("exclude_modules", section.get("ignore", []))
    if not isinstance(excluded, list) or not all(isinstance(pattern, str) for pattern in excluded):
        raise ConfigError(f"{section.label('exclude_modules')}={excluded!r:.100} must be a list of names")
    return QuantizationConfig(method="nvfp4", block=_FP8_BLOCK, excluded=tuple(excluded))
