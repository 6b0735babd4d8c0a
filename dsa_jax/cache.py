"""The cache: pages of compressed KV and index keys, and what layers keep of each request besides."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dsa_jax.config import ModelConfig
from pallas_kernels.ckv_records import RecordFormat, ckv_format, index_key_format
from pallas_kernels.ckv_records.api import MAX_SLOTS
from sharding.mesh import DATA, DCP, TP_AXES
from sharding.ownership import check_ownership

DEFAULT_PAGE_SIZE = 64
_FLOAT32 = np.dtype(np.float32)


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
      kpool: Tokens of an index key; with several ranks a run must hold whole pools.
      state_dtype: dtype of what is kept of a request's last tokens.
    """

    ckv: RecordFormat
    index_keys: RecordFormat
    page_size: int = DEFAULT_PAGE_SIZE
    dcp: int = 1
    interleave: int = 1
    index_replicas: int = 1
    kpool: int = 1
    state_dtype: np.dtype = _FLOAT32

    def __post_init__(self):
        """Check that the sizes fit each other."""
        for name in ("page_size", "interleave", "index_replicas"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {name}={getattr(self, name)}")
        if self.dcp % self.index_replicas:
            raise ValueError(f"index_replicas={self.index_replicas} must divide dcp={self.dcp}")
        check_ownership(ranks=self.dcp, interleave=self.interleave, page_size=self.page_size, kpool=self.kpool)

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
        dcp = mesh.shape[DCP]
        return cls(ckv, index_keys, dcp=dcp, kpool=config.index_kpool, state_dtype=np.dtype(dtype), **sizes)

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
        return self.page_size * self.index_replicas // self.kpool

    def bytes_per_token(self, config: ModelConfig) -> int:
        """Bytes of one token in the pages of all layers, over the whole DCP group, rounded up."""
        full = config.indexer_types.count("full")
        index = full * self.index_keys.bytes_per_token * self.index_replicas
        return len(config.sparse_layers) * self.ckv.bytes_per_token - (-index // self.kpool)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RequestState:
    """What layers keep of each request besides pages; each is None where no layer of the model does.

    A request has one slot. What a slot holds when a request gets it is not read.

    Attributes:
      kda: States of the linear attention [linear layers, slots, heads, K, V] float32, split over "data" by slots and
        over TP by heads.
      conv: Queries, keys and values of the last tokens before their convolution [linear layers, slots, heads,
        taps - 1, 3, D], split likewise.
      ring: Index key and gate of the tokens of the open pool [full layers, slots, 2, kpool - 1, D], split over "data".
    """

    kda: jax.Array | None = None
    conv: jax.Array | None = None
    ring: jax.Array | None = None

    def read(self, name: str, layer: jax.Array, slots: jax.Array) -> jax.Array | None:
        """One layer's part for the requests in `slots` [R, ...]; any values where the slot is -1."""
        array = getattr(self, name)
        return None if array is None else array[layer, jnp.maximum(slots, 0)]

    def write(self, layer: jax.Array, slots: jax.Array, **new: jax.Array | None) -> "RequestState":
        """The state with `new` [R, ...] of one layer for the requests in `slots`; those with slot -1 are dropped."""

        def put(array: jax.Array | None, values: jax.Array | None) -> jax.Array | None:
            if array is None or values is None:
                return array
            # Dropped ones get places of their own beyond the end, so that all are unique.
            place = jnp.where(slots < 0, array.shape[1] + jnp.arange(slots.shape[0], dtype=slots.dtype), slots)
            return array.at[layer, place].set(values, mode="drop", wrap_negative_indices=False, unique_indices=True)

        return dataclasses.replace(self, **{name: put(getattr(self, name), values) for name, values in new.items()})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedCache:
    """Pages of every layer and the state of each request; donated to the step that writes them.

    Attributes:
      ckv: [sparse layers, pages, page_size * dcp, record] split over "data" by pages and over "dcp" inside a page; on a
        rank [layers, pages, *geometry.ckv.page_shape(page_size)].
      index_keys: The same for the full layers, with the index keys' format; a planar format has flat pages.
      state: What is kept of each request besides.
      geometry: What the bytes mean.
    """

    ckv: jax.Array
    index_keys: jax.Array
    state: RequestState
    geometry: CacheGeometry = dataclasses.field(metadata={"static": True})

    @property
    def pages(self) -> int:
        """Pages of all data groups together."""
        return self.ckv.shape[1]

    @property
    def slots(self) -> int | None:
        """Requests of all data groups together that the cache can keep a state of; None if it keeps none."""
        sizes = [leaf.shape[1] for leaf in jax.tree.leaves(self.state)]
        return sizes[0] if sizes else None


_PAGES = PartitionSpec(None, DATA, DCP)
_STATE = {
    "kda": PartitionSpec(None, DATA, TP_AXES),
    "conv": PartitionSpec(None, DATA, TP_AXES),
    "ring": PartitionSpec(None, DATA),
}


def cache_specs(cache: PagedCache) -> PagedCache:
    """Mesh axes of a cache."""
    state: Any = {name: None if getattr(cache.state, name) is None else spec for name, spec in _STATE.items()}
    pages: Any = _PAGES
    return PagedCache(pages, pages, RequestState(**state), cache.geometry)


def _state_shapes(config: ModelConfig, geometry: CacheGeometry, slots: int, mesh: Mesh) -> RequestState:
    """Shapes of the state of `slots` requests over all data groups."""

    def leaf(name: str, layers: int, *shape: int, dtype: np.dtype = geometry.state_dtype) -> Any:
        return jax.ShapeDtypeStruct((layers, slots, *shape), dtype, sharding=NamedSharding(mesh, _STATE[name]))

    leaves, kda = {}, config.kda
    if kda is not None:
        layers, size = config.num_layers - len(config.sparse_layers), kda.head_dim
        leaves["kda"] = leaf("kda", layers, kda.num_heads, size, size, dtype=_FLOAT32)
        leaves["conv"] = leaf("conv", layers, kda.num_heads, kda.conv_size - 1, 3, size)
    if config.index_kpool > 1:
        full = config.indexer_types.count("full")
        leaves["ring"] = leaf("ring", full, 2, config.index_kpool - 1, config.indexer.head_dim)
    return RequestState(**leaves)


def cache_shapes(
    config: ModelConfig, geometry: CacheGeometry, pages: int, mesh: Mesh, *, requests: int = 1
) -> PagedCache:
    """Shapes, dtypes and shardings of a cache.

    Args:
      config: The model's sizes.
      geometry: What the bytes mean.
      pages: Pages of each data group.
      mesh: The mesh.
      requests: Requests of each data group that may run at once; matters to models that keep a state of each.

    Raises:
      ValueError: `pages` or `requests` is not positive, the pages are too many for int32 slots, or the geometry is for
        another mesh.
    """
    if pages <= 0 or requests <= 0:
        raise ValueError(f"pages and requests must be positive, got {pages=}, {requests=}")
    most = max(geometry.page_size, geometry.index_page_size)
    if pages * most > MAX_SLOTS:
        raise ValueError(f"{pages=} of {most} records or index keys are more than int32 slots can name")
    if geometry.dcp != mesh.shape[DCP]:
        raise ValueError(f"the geometry is for dcp={geometry.dcp}, the mesh has dcp={mesh.shape[DCP]}")
    sharding = NamedSharding(mesh, _PAGES)

    def leaf(layers: int, fmt: RecordFormat, page_size: int) -> Any:
        first, *rest = fmt.page_shape(page_size)
        shape = (layers, pages * mesh.shape[DATA], first * geometry.dcp, *rest)
        return jax.ShapeDtypeStruct(shape, fmt.dtype, sharding=sharding)

    full_layers = config.indexer_types.count("full")
    return PagedCache(
        ckv=leaf(len(config.sparse_layers), geometry.ckv, geometry.page_size),
        index_keys=leaf(full_layers, geometry.index_keys, geometry.index_page_size),
        state=_state_shapes(config, geometry, requests * mesh.shape[DATA], mesh),
        geometry=geometry,
    )


def init_cache(
    config: ModelConfig, geometry: CacheGeometry, pages: int, mesh: Mesh, *, requests: int = 1
) -> PagedCache:
    """An empty cache, created in its sharding; see `cache_shapes`."""
    shapes = cache_shapes(config, geometry, pages, mesh, requests=requests)
    shardings = jax.tree.map(lambda s: s.sharding, shapes)
    return jax.jit(lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes), out_shardings=shardings)()
