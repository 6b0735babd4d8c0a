"""Loading a model, the entry point of the library."""

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dsa_jax import checkpoint
from dsa_jax.config import ModelConfig
from dsa_jax.fp8_weights import fp8_candidates, fp8_parameters
from dsa_jax.model import Model, abstract_model, fill_parameters, parameter_specs
from sharding.mesh import make_mesh

_log = logging.getLogger(__name__)

Weights = Literal["auto", "fp8", "dequantized"]
WEIGHTS: tuple[Weights, ...] = get_args(Weights)
COPIED_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def default_tp(config: ModelConfig, devices: int) -> int:
    """Most devices, out of `devices`, that divide the model's heads."""
    heads = config.num_heads if config.kda is None else math.gcd(config.num_heads, config.kda.num_heads)
    return max((tp for tp in range(1, devices + 1) if heads % tp == 0), default=1)


def from_pretrained(
    path: str | Path,
    mesh: Mesh | None = None,
    dtype: jax.typing.DTypeLike | None = None,
    *,
    weights: Weights = "auto",
    fp8_matmul: str | None = None,
    latent_norm_eps: float | None = None,
    progress: bool = False,
) -> Model:
    """Load a model straight into sharded arrays.

    Args:
      path: A Hugging Face folder (config.json, *.safetensors, BF16, block FP8 or NVFP4), or one that `dsa-jax convert`
        wrote.
      mesh: Mesh with axes ("data", "qsplit", "dcp"), see `sharding.mesh.make_mesh`; None takes the most local devices
        that divide the heads, all for TP.
      dtype: bfloat16 or float32; None means bfloat16.
      weights: "fp8" keeps the block FP8 weights of a checkpoint as they are in device memory, and dequantises them
        where they are multiplied; "dequantized" does so once, while loading; "auto" keeps them unless dtype is float32.
        NVFP4 weights become block FP8 with "fp8", which rounds them once more, and are dequantised otherwise. A native
        checkpoint decided when it was converted.
      fp8_matmul: How weights that are kept in FP8 are multiplied. None dequantises them; "mosaic_hopper" (a kernel that
        has not run on a GPU yet) and "reference" quantise the activations to e4m3, see `pallas_kernels.scaled_matmul`.
      latent_norm_eps: eps of the norms behind q_a_proj and kv_a_proj; see `dsa_jax.config.ModelConfig`.
      progress: Whether to show a progress bar on stderr.

    Returns:
      The model.

    Raises:
      ValueError: The config is unsupported or contradictory, a tensor is missing, misshapen or truncated, the heads do
        not divide by TP, the dtype is none of the two, `weights` asks for what the checkpoint does not hold,
        `fp8_matmul` cannot multiply a rank's share of a weight, or the config ties the embeddings and the checkpoint
        stores another `lm_head.weight` (which transformers 5 would use).
    """
    dtype = jnp.dtype(jnp.bfloat16 if dtype is None else dtype)
    if dtype not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)):
        raise ValueError(f"dtype must be bfloat16 or float32, got {dtype.name}")
    config = ModelConfig.from_folder(path, latent_norm_eps=latent_norm_eps)
    if mesh is None:
        mesh = make_mesh(tp=default_tp(config, len(jax.devices())))
    kept = _fp8_parameters(path, config, mesh, dtype, weights)
    if fp8_matmul is not None and not kept:
        raise ValueError(f"{fp8_matmul=} multiplies weights in FP8, and none is kept: {weights=}, dtype={dtype.name}")
    model = abstract_model(config, mesh, kept, fp8_matmul=fp8_matmul)
    specs = parameter_specs(model)
    if checkpoint.is_native(path):
        return fill_parameters(model, checkpoint.load_native(path, specs, mesh, dtype, progress=progress))
    _check_unread(path, config)
    arrays = checkpoint.load_safetensors(
        path, specs, mesh, dtype, ignored=ignored_tensors(config), progress=progress, **stored_as(config)
    )
    return fill_parameters(model, arrays)


def _fp8_parameters(
    path: str | Path, config: ModelConfig, mesh: Mesh, dtype: jnp.dtype, weights: Weights
) -> frozenset[str]:
    """Parameters that are kept in FP8.

    Raises:
      ValueError: `weights` is no choice, or asks for what the checkpoint does not hold.
    """
    if weights not in WEIGHTS:
        raise ValueError(f"weights must be one of {WEIGHTS}, got {weights!r}")
    native = checkpoint.is_native(path)
    if not native and (weights == "dequantized" or (weights == "auto" and dtype == jnp.float32)):
        return frozenset()
    model = abstract_model(config, mesh)
    candidates, specs = fp8_candidates(model), parameter_specs(model)
    if native:
        kept = checkpoint.native_fp8(path, candidates)
    else:
        quantized = checkpoint.fp8_tensors(path)
        if weights == "fp8" and is_nvfp4(config):
            quantized |= checkpoint.nvfp4_tensors(path)
        kept = fp8_parameters(candidates, specs, quantized.__contains__)
    if weights == "fp8" and not kept:
        raise ValueError(f"weights='fp8': {path} holds no FP8 or NVFP4 weights")
    if weights == "dequantized" and kept:
        raise ValueError(f"weights='dequantized': {path} was converted with FP8 weights; convert it again without")
    return kept


def is_nvfp4(config: ModelConfig) -> bool:
    """Whether the checkpoint's configuration declares NVFP4."""
    return config.quantization is not None and config.quantization.method == "nvfp4"


def ignored_tensors(config: ModelConfig) -> Callable[[str], bool]:
    """Predicate of the tensors that a checkpoint may hold and the model does not use.

    These are the multi-token-prediction layers behind the last layer, the rotary tables of old exports, a copy of tied
    embeddings, the vision tower of a model of text and images, and the scales of a cache that NVFP4 checkpoints bring.
    """
    mtp, vision = _mtp_prefixes(config), _vision_prefix(config)
    cache_scales = (".k_scale", ".v_scale") if is_nvfp4(config) else ()

    def ignored(name: str) -> bool:
        tied = config.tie_word_embeddings and name == "lm_head.weight"
        return tied or name.endswith(("rotary_emb.inv_freq", *cache_scales)) or name.startswith((*mtp, *vision))

    return ignored


def _mtp_prefixes(config: ModelConfig) -> tuple[str, ...]:
    """Beginnings of the names of the multi-token-prediction layers' tensors."""
    return tuple(f"{config.tensor_prefix}layers.{config.num_layers + i}." for i in range(config.num_mtp_layers))


def _vision_prefix(config: ModelConfig) -> tuple[str, ...]:
    """Beginning of the names of the vision tower's tensors, for models that have one."""
    return ("model.visual.",) if config.model_type == "glm5_next" else ()


def _check_unread(path: str | Path, config: ModelConfig) -> None:
    """Say which tensors are left out: a line for multi-token prediction, for the vision tower, and for all others.

    Raises:
      CheckpointError: The embeddings are tied to a head that is stored and is another one.
    """
    if config.tie_word_embeddings:
        checkpoint.check_tied_head(path, f"{config.tensor_prefix}embed_tokens.weight")
    ignored, mtp, vision = ignored_tensors(config), _mtp_prefixes(config), _vision_prefix(config)
    names = sorted(filter(ignored, checkpoint.tensor_names(path)))
    if predicting := [name for name in names if name.startswith(mtp)]:
        layers = {name.removeprefix(config.tensor_prefix).split(".")[1] for name in predicting}
        listed = ", ".join(sorted(layers, key=int))
        _log.info("skipped %d tensors of multi-token prediction (layer %s)", len(predicting), listed)
    if seeing := [name for name in names if name.startswith(vision)]:
        _log.info("skipped %d tensors of the vision tower (%s*)", len(seeing), *vision)
    if others := [name for name in names if not name.startswith((*mtp, *vision))]:
        _log.info("skipped %d tensors that the model does not use, %s first", len(others), others[0])


def stored_as(config: ModelConfig) -> dict[str, Any]:
    """What the loader must know of a checkpoint's quantisation: `block_size` and `nvfp4` of `load_safetensors`."""
    block = None if config.quantization is None else config.quantization.block
    return {"block_size": block, "nvfp4": is_nvfp4(config)}


def convert(
    source: str | Path,
    target: str | Path,
    dtype: jax.typing.DTypeLike | None = None,
    *,
    weights: Weights = "dequantized",
    progress: bool = False,
) -> None:
    """Rewrite a Hugging Face checkpoint as a native Orbax one, which loads onto any mesh.

    Args:
      source: A Hugging Face folder.
      target: Folder to make; it must not exist or be empty.
      dtype: dtype to store, bfloat16 or float32; None means bfloat16.
      weights: "dequantized", or "fp8" to keep block FP8 weights as they are and to make such of NVFP4 ones; "auto" as
        in `from_pretrained`.
      progress: Whether to show a progress bar on stderr.

    Raises:
      ValueError: As in `from_pretrained`; or `source` is a native checkpoint, `target` holds something, or another
        process is converting to it.
    """
    if checkpoint.is_native(source):
        raise checkpoint.CheckpointError(
            f"checkpoint {source} is native already: it loads onto any mesh as it is; to change its dtype or weights,"
            " convert the Hugging Face folder that it came from again"
        )
    config = ModelConfig.from_folder(source)
    mesh = make_mesh()
    dtype = jnp.dtype(jnp.bfloat16 if dtype is None else dtype)
    kept = _fp8_parameters(source, config, mesh, dtype, weights)
    _check_unread(source, config)
    extra = [Path(source) / name for name in COPIED_FILES if (Path(source) / name).is_file()]
    checkpoint.convert(
        source,
        target,
        parameter_specs(abstract_model(config, mesh, kept)),
        mesh,
        dtype,
        extra_files=extra,
        ignored=ignored_tensors(config),
        progress=progress,
        **stored_as(config),
    )
