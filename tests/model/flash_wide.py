"""A random GLM-5.3-Flash of two layers with the widths that records need: 512 values, no rope, index keys of 128."""

import dataclasses
import functools

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from dsa_jax.cache import CacheGeometry
from dsa_jax.config import ModelConfig
from dsa_jax.model import Model, abstract_model, fill_parameters, parameter_specs
from tests.support import ORACLE

LENGTH, PAGE_SIZE = 90, 16


@functools.cache
def wide_config() -> ModelConfig:
    """A linear and a sparse layer, without experts."""
    config = ModelConfig.from_folder(ORACLE / "flash_tp8" / "single")
    return dataclasses.replace(
        config,
        num_layers=2,
        indexer_types=("none", "full"),
        mlp_types=("dense", "dense"),
        moe=None,
        kv_lora_rank=512,
        indexer=dataclasses.replace(config.indexer, head_dim=128, topk=24),
    )


@functools.lru_cache(maxsize=4)
def wide_model(mesh: Mesh) -> Model:
    """The same float32 weights on any mesh."""
    model, rng = abstract_model(wide_config(), mesh), np.random.default_rng(0)

    def values(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if "norm" in name and name.endswith("weight"):
            return np.ones(shape, np.float32)
        return rng.normal(0, shape[-1] ** -0.5, shape).astype(np.float32)

    specs = parameter_specs(model)
    arrays = {n: jax.device_put(values(n, s.shape), NamedSharding(mesh, s.spec)) for n, s in sorted(specs.items())}
    return fill_parameters(model, arrays)


def wide_prompt() -> list[int]:
    """Token ids."""
    return np.random.default_rng(1).integers(0, wide_config().vocab_size, LENGTH).tolist()


def wide_geometry(model: Model, ckv: str, index_keys: str, **sizes: int) -> CacheGeometry:
    """Pages in two formats."""
    sizes = {"page_size": PAGE_SIZE, **sizes}
    return CacheGeometry.for_model(
        model.config, model.mesh, model.dtype, kv_format=ckv, index_format=index_keys, **sizes
    )
