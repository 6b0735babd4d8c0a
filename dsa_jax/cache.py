"""The paged cache: compressed KV of every layer and index keys of the full layers."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dsa_jax.config import ModelConfig
from pallas_kernels.ckv_records import RecordFormat, ckv_format, index_key_format
from pallas_kernels.ckv_records.api import MAX_SLOTS
from sharding.mesh import DATA, DCP
from sharding.ownership import check_ownership

DEFAULT_PAGE_SIZE = 64


@dataclasses.dataclass(frozen=True)
class CacheGeometry:
    """How tokens become bytes of the cache; static.

    A page stands for `page_size * dcp` tokens of a request, dealt to the ranks of a DCP group in runs of `interleave`.

    Attributes:
      ckv: Format of the compressed KV.
      index_keys: Format of the index keys.
      page_size: Tokens of a page that each DCP rank holds.
      dcp: Size of the DCP group.
      interleave: Tokens in a run.
      index_replicas: How often a DCP group holds the index keys; divides `dcp`.
    """

    ckv: RecordFormat
    index_keys: RecordFormat
    page_size: int = DEFAULT_PAGE_SIZE
    dcp: int = 1
    interleave: int = 1
    index_replicas: int = 1

    def __post_init__(self):
        """Check that the sizes fit each other."""
        for name in ("page_size", "interleave", "index_replicas"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {name}={getattr(self, name)}")
        if self.dcp % self.index_replicas:
            raise ValueError(f"index_replicas={self.index_replicas} must divide dcp={self.dcp}")
        check_ownership(ranks=self.dcp, interleave=self.interleave, page_size=self.page_size)

    @classmethod
    def for_model(
        cls,
        config: ModelConfig,
        mesh: Mesh,
        dtype: jax.typing.DTypeLike,
        *,
        kv_format: str = "auto",
        index_format: str = "auto",
        **sizes: int,
    ) -> "CacheGeometry":
        """Geometry for a model on a mesh.

        Args:
          config: The model's widths.
          mesh: Its mesh.
          dtype: The model's dtype, which the format "auto" takes.
          kv_format: "auto", "float32", "bf16", "fp8_ds_mla" or "nvfp4_ds_mla".
          index_format: "auto", "float32", "bf16" or "fp8".
          **sizes: `page_size`, `interleave`, `index_replicas`.

        Raises:
          ValueError: A format needs a width that the model does not have, or the sizes do not fit each other.
        """
        ckv = ckv_format(
            kv_format,
            kv_lora_rank=config.kv_lora_rank,
            qk_rope_head_dim=config.qk_rope_head_dim,
            model_dtype=dtype,
        )
        index_keys = index_key_format(index_format, index_head_dim=config.indexer.head_dim, model_dtype=dtype)
        return cls(ckv, index_keys, dcp=mesh.shape[DCP], **sizes)

    @property
    def tokens_per_page(self) -> int:
        """Tokens that a page stands for over all ranks."""
        return self.page_size * self.dcp

    @property
    def index_shards(self) -> int:
        """Ranks that the index keys are dealt to."""
        return self.dcp // self.index_replicas

    @property
    def index_page_size(self) -> int:
        """Index keys of a page that each rank holds."""
        return self.page_size * self.index_replicas

    def bytes_per_token(self, config: ModelConfig) -> int:
        """Bytes of one token in all layers, over the whole DCP group."""
        full = config.indexer_types.count("full")
        index = full * self.index_keys.bytes_per_token * self.index_replicas
        return config.num_layers * self.ckv.bytes_per_token + index


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedCache:
    """Pages of every layer; donated to the step that writes them.

    Attributes:
      ckv: [layers, pages, page_size * dcp, record] split over "data" by pages and over "dcp" inside a page; on a rank
        [layers, pages, *geometry.ckv.page_shape(page_size)].
      index_keys: The same for the full layers, with the index keys' format; a planar format has flat pages.
      geometry: What the bytes mean.
    """

    ckv: jax.Array
    index_keys: jax.Array
    geometry: CacheGeometry = dataclasses.field(metadata={"static": True})

    @property
    def pages(self) -> int:
        """Pages of all data groups together."""
        return self.ckv.shape[1]


def cache_specs(geometry: CacheGeometry) -> PagedCache:
    """Mesh axes of a cache."""
    spec: Any = PartitionSpec(None, DATA, DCP)
    return PagedCache(spec, spec, geometry)


def cache_shapes(config: ModelConfig, geometry: CacheGeometry, pages: int, mesh: Mesh) -> PagedCache:
    """Shapes, dtypes and shardings of a cache with `pages` pages for each data group.

    Raises:
      ValueError: `pages` is not positive or too large for int32 slots, or the geometry is for another mesh.
    """
    if pages <= 0:
        raise ValueError(f"pages must be positive, got {pages=}")
    if pages * geometry.index_page_size > MAX_SLOTS:
        raise ValueError(f"{pages=} of {geometry.index_page_size} index keys are more than int32 slots can name")
    if geometry.dcp != mesh.shape[DCP]:
        raise ValueError(f"the geometry is for dcp={geometry.dcp}, the mesh has dcp={mesh.shape[DCP]}")
    sharding = NamedSharding(mesh, PartitionSpec(None, DATA, DCP))

    def leaf(layers: int, fmt: RecordFormat, page_size: int) -> Any:
        first, *rest = fmt.page_shape(page_size)
        shape = (layers, pages * mesh.shape[DATA], first * geometry.dcp, *rest)
        return jax.ShapeDtypeStruct(shape, fmt.dtype, sharding=sharding)

    full_layers = config.indexer_types.count("full")
    return PagedCache(
        ckv=leaf(config.num_layers, geometry.ckv, geometry.page_size),
        index_keys=leaf(full_layers, geometry.index_keys, geometry.index_page_size),
        geometry=geometry,
    )


def init_cache(config: ModelConfig, geometry: CacheGeometry, pages: int, mesh: Mesh) -> PagedCache:
    """An empty cache with `pages` pages for each data group, created in its sharding."""
    shapes = cache_shapes(config, geometry, pages, mesh)
    shardings = jax.tree.map(lambda s: s.sharding, shapes)
    return jax.jit(lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes), out_shardings=shardings)()
