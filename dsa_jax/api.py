"""Loading a model, the entry point of the library."""

from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dsa_jax import checkpoint
from dsa_jax.config import ModelConfig
from dsa_jax.model import Model, abstract_model, fill_parameters, parameter_specs
from sharding.mesh import make_mesh


def default_tp(config: ModelConfig, devices: int) -> int:
    """Most devices, out of `devices`, that divide the model's heads."""
    return max((tp for tp in range(1, devices + 1) if config.num_heads % tp == 0), default=1)


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
    return fill_parameters(model, checkpoint.load(path, specs, mesh, dtype, config=config, progress=progress))
