"""Filling a model's parameters from stored tensors in batches of bounded bytes."""

import collections
import contextlib
import dataclasses
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from tqdm import tqdm

from dsa_jax.params import ParamSpec
from dsa_jax.placement import Column, Placement, axes_size, plan, write
from dsa_jax.quantization import Coding
from dsa_jax.safetensors_headers import CheckpointError

# Columns in one program: enough to hide the cost of a call, few enough to compile quickly.
_MAX_COLUMNS = 16
# Batches that are read at a time: one reaches the devices while the next is read.
_BATCHES_IN_FLIGHT = 2


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A stored tensor as the reader finds it.

    Attributes:
      shape: Shape as stored.
      dtype: dtype as stored.
      position: Sort key; tensors are read in its order.
      coding: What its bytes mean; None for plain values.
      scales: Names of the tensors that the coding needs besides.
      file_name: Name that the reader knows it by, where a source is made from a tensor of another name.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    position: tuple[str, int]
    coding: Coding | None = None
    scales: tuple[str, ...] = ()
    file_name: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes it takes in its file."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class Reader(Protocol):
    """Starts to read the tensors of a batch; the result waits for them."""

    def __call__(self, wanted: dict[str, jax.ShapeDtypeStruct], /) -> Callable[[], Mapping[str, jax.Array]]: ...


@dataclasses.dataclass(frozen=True)
class _Write:
    """One call of a writer: `columns`, the last of them repeated up to `count`."""

    placement: Placement
    columns: tuple[Column, ...]
    count: int
    nbytes: int
    device_bytes: int
    position: tuple[str, int]

    def names(self) -> Iterator[tuple[int, str]]:
        """Rank and name of each source."""
        for column in self.columns:
            for rank, source in enumerate(column.sources):
                if source is not None:
                    yield rank, source.name


def fill(
    specs: Mapping[str, ParamSpec],
    stored: Mapping[str, StoredTensor],
    mesh: Mesh,
    dtype: jax.typing.DTypeLike,
    read: Reader,
    *,
    max_batch_bytes: int,
    rows_only: bool,
    advance: Callable[[int], object] = lambda nbytes: None,
) -> dict[str, jax.Array]:
    """Read every source of the parameters and place it.

    Args:
      specs: Parameters by name.
      stored: Stored tensors by name; all sources and their scales are there with the right shapes.
      mesh: Mesh that holds the parameters.
      dtype: dtype of the parameters that declare none.
      read: Starts to read a batch.
      max_batch_bytes: Bytes of a batch, all copies on the devices counted; one column of sources is read whole even if
        it takes more.
      rows_only: Whether `read` is slow for parts of tensors that are not contiguous, as in `plan`.
      advance: Told the bytes placed, as they are placed; `source_bytes` is their sum.

    Returns:
      The parameters by name, in the order of `specs`.

    Raises:
      ValueError: The declarations contradict themselves or the mesh, or `dtype` is not one of floating point.
      CheckpointError: Sources that are placed together differ in shape or dtype.
    """
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"dtype must be a floating point type, got {dtype}")
    _check_unique(specs)
    writes = [
        w for name, spec in specs.items() for w in _writes(plan(name, spec, mesh, rows_only), stored, max_batch_bytes)
    ]
    writes.sort(key=lambda w: w.position)
    buffers: dict[str, jax.Array] = {}
    waiting: collections.deque[tuple[list[_Write], Callable[[], Mapping[str, jax.Array]]]] = collections.deque()

    def finish() -> None:
        batch, wait = waiting.popleft()
        arrays = wait()
        touched = {w.placement.name for w in batch}
        for w in batch:
            _apply(w, buffers, arrays, stored, dtype)
            advance(w.nbytes)
        del arrays
        # Only then may the arrays of the batch be freed, and the next one begin.
        jax.block_until_ready([buffers[name] for name in touched])

    with contextlib.ExitStack() as stack:
        stack.callback(_drain, waiting)
        for batch in batches(writes, lambda w: w.device_bytes, max_batch_bytes):
            waiting.append((batch, read(_wanted(batch, stored))))
            if len(waiting) == _BATCHES_IN_FLIGHT:
                finish()
        while waiting:
            finish()
    return {name: buffers[name] for name in specs}


def source_bytes(specs: Iterable[ParamSpec], stored: Mapping[str, StoredTensor]) -> int:
    """Bytes of all sources of the parameters, their scales included."""
    return sum(_nbytes(source.name, stored) for spec in specs for source in spec.sources)


def progress_bar(total: int, title: str, shown: bool) -> tqdm:
    """A bar of bytes on stderr."""
    return tqdm(
        total=total, desc=title, unit="B", unit_scale=True, unit_divisor=1024, file=sys.stderr, disable=not shown
    )


def _nbytes(name: str, stored: Mapping[str, StoredTensor]) -> int:
    tensor = stored[name]
    return tensor.nbytes + sum(stored[scale].nbytes for scale in tensor.scales)


def _drain(waiting: collections.deque) -> None:
    """Wait for reads that nobody wants any more after an error, so that no thread outlives the call."""
    for _, wait in waiting:
        with contextlib.suppress(Exception):
            wait()


def _writes(placement: Placement, stored: Mapping[str, StoredTensor], max_batch_bytes: int) -> Iterator[_Write]:
    """Cut a parameter's columns into calls of equal numbers of columns, so that one compiled program serves them."""

    def kind(column: Column) -> tuple[tuple[int, ...], str, str]:
        kinds = {(s.shape, str(stored[s.name].dtype), str(stored[s.name].coding)) for s in column.sources if s}
        if len(kinds) > 1:
            names = [source.name for source in column.sources if source]
            raise CheckpointError(f"tensors {names} must have one shape and dtype, got {kinds}")
        return kinds.pop()

    def position(column: Column) -> tuple[str, int]:
        return min(stored[source.name].position for source in column.sources if source)

    def nbytes(column: Column) -> int:
        return sum(_nbytes(source.name, stored) for source in column.sources if source)

    def device_bytes(column: Column) -> int:
        source = next(source for source in column.sources if source)
        split = math.prod(axes_size(placement.mesh, a) for a in placement.source_axes(source.shape))
        copies = placement.mesh.size // (axes_size(placement.mesh, placement.lead_axes) * split)
        return nbytes(column) * copies

    columns = sorted(placement.columns, key=lambda column: (kind(column), position(column)))
    for _, group in itertools.groupby(columns, key=kind):
        group = list(group)
        count = max(1, min(_MAX_COLUMNS, len(group), max_batch_bytes // max(1, device_bytes(group[0]))))
        for chosen in itertools.batched(group, count):
            total, copied = sum(map(nbytes, chosen)), sum(map(device_bytes, chosen))
            yield _Write(placement, chosen, count, total, copied, position(chosen[0]))


def _wanted(batch: Sequence[_Write], stored: Mapping[str, StoredTensor]) -> dict[str, jax.ShapeDtypeStruct]:
    """What to read for a batch, and to which devices."""
    wanted = {}
    for w in batch:
        for rank, name in w.names():
            tensor = stored[name]
            sharding = w.placement.source_sharding(rank, w.placement.source_axes(tensor.shape))
            wanted[tensor.file_name or name] = jax.ShapeDtypeStruct(tensor.shape, tensor.dtype, sharding=sharding)
            for scale_name in tensor.scales:
                scale = stored[scale_name]
                sharding = w.placement.source_sharding(rank, tuple(() for _ in scale.shape))
                wanted[scale_name] = jax.ShapeDtypeStruct(scale.shape, scale.dtype, sharding=sharding)
    return wanted


def _apply(
    w: _Write,
    buffers: dict[str, jax.Array],
    arrays: Mapping[str, jax.Array],
    stored: Mapping[str, StoredTensor],
    dtype: jax.typing.DTypeLike,
) -> None:
    """Write the arrays of one call into its parameter, which is made when it is first needed."""
    name, spec, mesh = w.placement.name, w.placement.spec, w.placement.mesh
    if name not in buffers:
        sharding = NamedSharding(mesh, spec.spec)
        buffers[name] = jnp.zeros(spec.shape, dtype if spec.dtype is None else spec.dtype, device=sharding)
    # Writing the last column again is cheaper than compiling another program for a shorter call.
    columns = (*w.columns, *itertools.repeat(w.columns[-1], w.count - len(w.columns)))
    sources = [source for _, source in w.names()]
    pieces = {source: arrays[stored[source].file_name or source] for source in sources}
    scales = {source: tuple(arrays[scale] for scale in stored[source].scales) for source in sources}
    buffers[name] = write(w.placement, buffers[name], columns, pieces, scales, stored[sources[0]].coding)


def _check_unique(specs: Mapping[str, ParamSpec]) -> None:
    counts = collections.Counter(source.name for spec in specs.values() for source in spec.sources)
    repeated = [name for name, count in counts.items() if count > 1]
    if repeated:
        raise ValueError(f"sources must fill one place each, got {repeated[:4]} more than once")


def batches[Item](items: Iterable[Item], nbytes: Callable[[Item], int], max_bytes: int) -> Iterator[list[Item]]:
    """Cut items into lists of at most `max_bytes`, or of a single item that takes more."""
    batch: list[Item] = []
    size = 0
    for item in items:
        if batch and size + nbytes(item) > max_bytes:
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += nbytes(item)
    if batch:
        yield batch
