"""The paged cache: compressed KV of every layer and index keys of the full layers."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dsa_jax.config import ModelConfig
from sharding.mesh import DATA

DEFAULT_PAGE_SIZE = 64


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedCache:
    """Pages of every layer; donated to the step that writes them.

    Attributes:
      ckv: [layers, pages, page_size, kv_lora_rank + rope].
      index_keys: [full layers, pages, page_size, index head dim].
    """

    ckv: jax.Array
    index_keys: jax.Array

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return self.ckv.shape[2]

    @property
    def pages(self) -> int:
        """Pages of all data groups together."""
        return self.ckv.shape[1]


_PAGES_BY_GROUP: Any = PartitionSpec(None, DATA)
CACHE_SPEC = PagedCache(ckv=_PAGES_BY_GROUP, index_keys=_PAGES_BY_GROUP)


def cache_shapes(
    config: ModelConfig, pages: int, page_size: int, dtype: jax.typing.DTypeLike, mesh: Mesh
) -> PagedCache:
    """Shapes, dtypes and shardings of a cache with `pages` pages for each data group."""
    full_layers = config.indexer_types.count("full")
    total = pages * mesh.shape[DATA]

    def leaf(layers: int, width: int, spec: Any) -> Any:
        return jax.ShapeDtypeStruct(
            (layers, total, page_size, width), jnp.dtype(dtype), sharding=NamedSharding(mesh, spec)
        )

    return PagedCache(
        ckv=leaf(config.num_layers, config.kv_lora_rank + config.qk_rope_head_dim, CACHE_SPEC.ckv),
        index_keys=leaf(full_layers, config.indexer.head_dim, CACHE_SPEC.index_keys),
    )


def init_cache(config: ModelConfig, pages: int, page_size: int, dtype: jax.typing.DTypeLike, mesh: Mesh) -> PagedCache:
    """An empty cache, created in its sharding."""
    for name, value in (("pages", pages), ("page_size", page_size)):
        if value <= 0:
            raise ValueError(f"{name} must be positive, got {name}={value}")
    shapes = cache_shapes(config, pages, page_size, dtype, mesh)
    shardings = jax.tree.map(lambda s: s.sharding, shapes)
    return jax.jit(lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes), out_shardings=shardings)()
