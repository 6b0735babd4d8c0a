"""Placing the tensors of a checkpoint in parameters that are split over a mesh.

Every device is sent exactly what it holds: a tensor that one rank owns (an expert) is read to that rank's devices
alone, and the tensors that the ranks own at the same local index are then written together by one program, without any
communication.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dsa_jax.params import ParamSpec, Source
from dsa_jax.quantization import Coding

Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Column:
    """Sources that are written together: at most one for each rank, all at the same local index.

    Attributes:
      index: Where each rank writes its source in its part of the leading axes.
      sources: The source of each rank; None where a rank holds padding there.
    """

    index: tuple[int, ...]
    sources: tuple[Source | None, ...]


@dataclasses.dataclass(frozen=True)
class Placement:
    """How the sources of one parameter reach the devices.

    Attributes:
      name: Name of the parameter.
      spec: Its declaration.
      mesh: Mesh that holds it.
      lead: How many leading axes of the parameter an index fills.
      columns: Its sources.
      rows_only: Split sources by their first dimension at most, and send them whole otherwise.
    """

    name: str
    spec: ParamSpec
    mesh: Mesh
    lead: int
    columns: tuple[Column, ...]
    rows_only: bool

    @property
    def lead_axes(self) -> Axes:
        """Mesh axes that split the leading axes: their ranks own different sources."""
        return sum(split_axes(self.spec.spec, len(self.spec.shape))[: self.lead], ())

    def source_axes(self, shape: tuple[int, ...]) -> tuple[Axes, ...]:
        """Mesh axes that split each dimension of a source; not of a padded one, whose parts would not match."""
        axes = split_axes(self.spec.spec, len(self.spec.shape))[self.lead :]
        wanted = enumerate(zip(axes, shape, self.spec.shape[self.lead :], strict=True))
        return tuple(a if s == t and not (self.rows_only and dim) else () for dim, (a, s, t) in wanted)

    def source_sharding(self, rank: int, axes: Sequence[Axes]) -> NamedSharding:
        """Devices that a source of rank `rank` is read to, each dimension split over `axes`."""
        if not self.lead_axes:
            return NamedSharding(self.mesh, _partition(axes))
        return NamedSharding(_rank_meshes(self.mesh, self.lead_axes)[rank], _partition(axes))


@functools.lru_cache(maxsize=1024)
def split_axes(spec: PartitionSpec, rank: int) -> tuple[Axes, ...]:
    """Mesh axes that split each of `rank` dimensions."""
    entries = (*spec, *(None for _ in range(rank - len(spec))))
    return tuple(() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries)


def _partition(axes: Sequence[Axes]) -> PartitionSpec:
    return PartitionSpec(*(a or None for a in axes))


def axes_size(mesh: Mesh, axes: Axes) -> int:
    """Number of parts that `axes` split a dimension into."""
    return math.prod(mesh.shape[axis] for axis in axes)


@functools.lru_cache(maxsize=64)
def _rank_meshes(mesh: Mesh, axes: Axes) -> tuple[Mesh, ...]:
    """The devices of each rank over `axes`, as meshes of the other axes."""
    others = tuple(axis for axis in mesh.axis_names if axis not in axes)
    order = [mesh.axis_names.index(axis) for axis in (*axes, *others)]
    grid = mesh.devices.transpose(order).reshape(-1, *(mesh.shape[axis] for axis in others))
    if not others:
        grid, others = grid[:, None], ("rank",)
    return tuple(Mesh(devices, others) for devices in grid)


def plan(name: str, spec: ParamSpec, mesh: Mesh, rows_only: bool) -> Placement:
    """Pair the sources of a parameter over the ranks that own them.

    Args:
      name: Name of the parameter.
      spec: Its declaration.
      mesh: Mesh that holds it.
      rows_only: Split sources by their first dimension at most. Parts by another one are many short runs of bytes in a
        file; to send the whole tensor to the devices and cut it there is faster.

    Raises:
      ValueError: The declaration contradicts itself or does not fit the mesh.
    """
    shape, axes = spec.shape, split_axes(spec.spec, len(spec.shape))
    sizes = tuple(axes_size(mesh, a) for a in axes)
    if any(size % parts for size, parts in zip(shape, sizes, strict=True)):
        raise ValueError(f"parameter {name}: {shape=} is not divisible by the parts {sizes} of {spec.spec}")
    if not spec.sources:
        raise ValueError(f"parameter {name} has no source")
    lead = len(spec.sources[0].index)
    local = tuple(size // parts for size, parts in zip(shape[:lead], sizes[:lead], strict=True))
    ranks = math.prod(sizes[:lead])
    if ranks > 1 and lead == len(shape):
        raise ValueError(f"parameter {name}: scalar sources cannot be split over {spec.spec}")
    columns: dict[tuple[int, ...], list[Source | None]] = {}
    for source in spec.sources:
        bounds = (*(i + 1 for i in source.index), *source.shape)
        fits = len(source.index) == lead and len(bounds) == len(shape)
        if not fits or any(bound > size for bound, size in zip(bounds, shape, strict=True)):
            raise ValueError(f"parameter {name}: {source} does not fit {shape=}")
        parts = tuple(i // n for i, n in zip(source.index, local, strict=True))
        rank = int(np.ravel_multi_index(parts, sizes[:lead])) if lead else 0
        index = tuple(i % n for i, n in zip(source.index, local, strict=True))
        column = columns.setdefault(index, [None] * ranks)
        if column[rank] is not None:
            raise ValueError(f"parameter {name}: {source} and {column[rank]} fill the same part")
        column[rank] = source
    return Placement(name, spec, mesh, lead, tuple(Column(i, tuple(s)) for i, s in columns.items()), rows_only)


def write(
    placement: Placement,
    buffer: jax.Array,
    columns: Sequence[Column],
    arrays: Mapping[str, jax.Array],
    scales: Mapping[str, tuple[jax.Array, ...]],
    coding: Coding | None,
) -> jax.Array:
    """Write columns into a parameter: decoded, cast, zero where a rank has no source.

    Args:
      placement: The parameter's plan.
      buffer: The parameter; donated.
      columns: Columns to write, of sources of one shape, one dtype and one coding.
      arrays: Sources by name, each with the sharding of `Placement.source_sharding`.
      scales: What the coding needs besides, by the name of the source; each replicated over the devices of its source.
      coding: What the sources' bytes mean, or None for plain values.

    Returns:
      The parameter with the columns in place.
    """
    first = next(source for source in columns[0].sources if source is not None)
    axes = placement.source_axes(first.shape)
    pieces = tuple(_gather_ranks(placement, column, arrays, axes) for column in columns)
    factors, ranks = [], []
    for number in range(len(scales[first.name])):
        part = {name: _as_vector(of_source[number]) for name, of_source in scales.items()}
        ranks.append(part[first.name].ndim)
        unsplit = ((),) * ranks[-1]
        factors.append(tuple(_gather_ranks(placement, column, part, unsplit) for column in columns))
    starts = np.array([column.index for column in columns], np.int32).reshape(len(columns), placement.lead)
    shape, spec = placement.spec.shape, placement.spec.spec
    writer = _writer(placement.mesh, shape, spec, placement.lead, axes, coding, tuple(ranks))
    return writer(buffer, pieces, tuple(factors), starts)


def _as_vector(x: jax.Array) -> jax.Array:
    """A scalar as [1], so that those of several ranks can be joined; through the host, whatever mesh is in context."""
    if x.ndim:
        return x
    parts = [jax.device_put(np.asarray(shard.data).reshape(1), shard.device) for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays((1,), x.sharding, parts)


def _gather_ranks(
    placement: Placement, column: Column, arrays: Mapping[str, jax.Array], axes: Sequence[Axes]
) -> jax.Array:
    """The ranks' sources as one array of the whole mesh, concatenated over its first dimension; nothing moves."""
    lead_axes = placement.lead_axes
    present = next(arrays[source.name] for source in column.sources if source is not None)
    if not lead_axes:
        return present
    parts = []
    for rank, source in enumerate(column.sources):
        if source is None:
            sharding = placement.source_sharding(rank, axes)
            part = jnp.zeros(present.shape, present.dtype, device=sharding)
        else:
            part = arrays[source.name]
        parts.extend(shard.data for shard in part.addressable_shards)
    sharding = NamedSharding(placement.mesh, _partition(((*lead_axes, *axes[0]), *axes[1:])))
    shape = (present.shape[0] * len(column.sources), *present.shape[1:])
    return jax.make_array_from_single_device_arrays(shape, sharding, parts, dtype=present.dtype)


def _as_bytes(x: jax.Array) -> jax.Array:
    """FP8 as bytes, other dtypes as they are: the CPU backend converts a whole FP8 buffer to write a part of it."""
    return jax.lax.bitcast_convert_type(x, jnp.uint8) if x.dtype.itemsize == 1 else x


@functools.lru_cache(maxsize=256)
def _writer(
    mesh: Mesh,
    shape: tuple[int, ...],
    spec: PartitionSpec,
    lead: int,
    axes: tuple[Axes, ...],
    coding: Coding | None,
    scale_ranks: tuple[int, ...],
) -> Callable[..., jax.Array]:
    """Program that writes columns into a parameter; jit keeps one for each shape and number of columns."""
    dims = split_axes(spec, len(shape))
    lead_axes = sum(dims[:lead], ())
    tail = tuple(zip(dims[lead:], axes, shape[lead:], strict=True))

    def value_of(piece: jax.Array, scales: tuple[jax.Array, ...]) -> jax.Array:
        if coding is not None:
            offset = tuple(jax.lax.axis_index(a) * n if a else 0 for a, n in zip(axes, piece.shape, strict=True))
            piece = coding.decode(piece, scales, offset)
        for dim, (wanted, split, size) in enumerate(tail):
            if wanted and not split:  # It came whole: pad it and take this rank's part.
                widths = [(0, size - n if d == dim else 0, 0) for d, n in enumerate(piece.shape)]
                padded = jax.lax.pad(piece, jnp.zeros((), piece.dtype), widths)
                part = size // axes_size(mesh, wanted)
                piece = jax.lax.dynamic_slice_in_dim(padded, jax.lax.axis_index(wanted) * part, part, dim)
        return piece

    def write_local(
        buffer: jax.Array, pieces: tuple[jax.Array, ...], scales: tuple[tuple[jax.Array, ...], ...], starts: jax.Array
    ) -> jax.Array:
        dtype = buffer.dtype
        buffer = _as_bytes(buffer)
        for i, piece in enumerate(pieces):
            value = _as_bytes(value_of(piece, tuple(of_columns[i] for of_columns in scales)).astype(dtype))
            value = value.reshape((1,) * lead + value.shape)
            begin = [*starts[i], *(jnp.zeros((), starts.dtype) for _ in tail)]
            buffer = jax.lax.dynamic_update_slice(buffer, value, begin)
        return jax.lax.bitcast_convert_type(buffer, dtype)

    def with_ranks(split: Sequence[Axes]) -> PartitionSpec:
        return _partition(((*lead_axes, *split[0]), *split[1:]) if split else ())

    scale_specs = tuple(with_ranks(((),) * rank) for rank in scale_ranks)
    in_specs = (spec, with_ranks(axes), scale_specs, PartitionSpec())
    program = jax.shard_map(write_local, mesh=mesh, in_specs=in_specs, out_specs=spec, check_vma=False)
    return jax.jit(program, donate_argnums=0)
