"""Loading a model, the entry point of the library."""

import math
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dsa_jax import checkpoint
from dsa_jax.config import ModelConfig
from dsa_jax.model import Model, abstract_model, fill_parameters, parameter_specs
from sharding.mesh import make_mesh

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
    latent_norm_eps: float | None = None,
    progress: bool = False,
) -> Model:
    """Load a model straight into sharded arrays.

    Args:
      path: A Hugging Face folder (config.json, *.safetensors, BF16 or block FP8), or one that `dsa-jax convert` wrote.
      mesh: Mesh with axes ("data", "qsplit", "dcp"), see `sharding.mesh.make_mesh`; None takes the most local devices
        that divide the heads, all for TP.
      dtype: bfloat16 or float32; None means bfloat16.
      latent_norm_eps: eps of the norms behind q_a_proj and kv_a_proj; see `dsa_jax.config.ModelConfig`.
      progress: Whether to show a progress bar on stderr.

    Returns:
      The model.

    Raises:
      ValueError: The config is unsupported or contradictory, a tensor is missing, misshapen or truncated, the heads do
        not divide by TP, or the dtype is none of the two.
    """
    dtype = jnp.dtype(jnp.bfloat16 if dtype is None else dtype)
    if dtype not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)):
        raise ValueError(f"dtype must be bfloat16 or float32, got {dtype.name}")
    config = ModelConfig.from_folder(path, latent_norm_eps=latent_norm_eps)
    if mesh is None:
        mesh = make_mesh(tp=default_tp(config, len(jax.devices())))
    model = abstract_model(config, mesh)
    specs = parameter_specs(model)
    if checkpoint.is_native(path):
        return fill_parameters(model, checkpoint.load_native(path, specs, mesh, dtype, progress=progress))
    arrays = checkpoint.load_safetensors(
        path, specs, mesh, dtype, ignored=ignored_tensors(config), block_size=block_size(config), progress=progress
    )
    return fill_parameters(model, arrays)


def ignored_tensors(config: ModelConfig) -> Callable[[str], bool]:
    """Predicate of the tensors that a checkpoint may hold and the model does not use.

    These are the multi-token-prediction layers behind the last layer, the rotary tables of old exports, a copy of tied
    embeddings, and the vision tower of a model of text and images.
    """
    mtp = tuple(f"{config.tensor_prefix}layers.{config.num_layers + i}." for i in range(config.num_mtp_layers))
    vision = config.model_type == "glm5_next"

    def ignored(name: str) -> bool:
        tied = config.tie_word_embeddings and name == "lm_head.weight"
        if tied or name.endswith("rotary_emb.inv_freq") or (vision and name.startswith("model.visual.")):
            return True
        return bool(mtp) and name.startswith(mtp)

    return ignored


def block_size(config: ModelConfig) -> tuple[int, int] | None:
    """Rows and columns of a quantisation block, or None for a checkpoint that is not quantised."""
    return None if config.quantization is None else config.quantization.block


def convert(
    source: str | Path, target: str | Path, dtype: jax.typing.DTypeLike | None = None, *, progress: bool = False
) -> None:
    """Rewrite a Hugging Face checkpoint as a native Orbax one, which loads onto any mesh without dequantisation.

    Args:
      source: A Hugging Face folder.
      target: Folder to make; it must not exist or be empty.
      dtype: dtype to store, bfloat16 or float32; None means bfloat16.
      progress: Whether to show a progress bar on stderr.

    Raises:
      ValueError: As in `from_pretrained`; or `target` holds something.
    """
    config = ModelConfig.from_folder(source)
    mesh = make_mesh()
    extra = [Path(source) / name for name in COPIED_FILES if (Path(source) / name).is_file()]
    checkpoint.convert(
        source,
        target,
        parameter_specs(abstract_model(config, mesh)),
        mesh,
        jnp.dtype(jnp.bfloat16 if dtype is None else dtype),
        extra_files=extra,
        ignored=ignored_tensors(config),
        block_size=block_size(config),
        progress=progress,
    )
