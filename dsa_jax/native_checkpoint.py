"""Native checkpoints: an Orbax checkpoint of a model's parameters, with the model's small files beside it.

Stacked layers are stored one by one and padding is left out: the folder does not depend on the mesh that wrote it, and
only a few layers need to be in host memory at a time.
"""

import dataclasses
import functools
import json
import math
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dsa_jax.checkpoint_folder import new_folder
from dsa_jax.filling import Reader, StoredTensor, batches, fill, progress_bar, source_bytes
from dsa_jax.params import ParamSpec, Source
from dsa_jax.placement import split_axes
from dsa_jax.safetensors_headers import CheckpointError, raise_problems
from sharding.mesh import check_mesh

PARAMS_FOLDER = "params"
# Written last: names, shapes and dtypes of the arrays and the sizes of the files, so that damage shows before reading.
MANIFEST_FILE = "native_checkpoint.json"
# What an interrupted conversion has saved so far.
_PROGRESS_FILE = "progress.json"
_FORMAT = {"format": "dsa_jax", "version": 1}
DEFAULT_BYTES_IN_FLIGHT = 2 * 1024**3


@dataclasses.dataclass(frozen=True)
class Piece:
    """A stored array: one layer of a stacked parameter, or a whole parameter.

    Attributes:
      name: Name in the checkpoint.
      parameter: Name of the parameter.
      layer: Index in the parameter's leading axis, or None for the whole parameter.
      shape: Shape as stored: what the sources fill, without padding.
      spec: Declaration of the piece as a parameter of its own.
    """

    name: str
    parameter: str
    layer: int | None
    shape: tuple[int, ...]
    spec: ParamSpec


def pieces_of(specs: Mapping[str, ParamSpec]) -> list[Piece]:
    """Pieces that parameters are stored as; they do not depend on the mesh."""
    pieces = [piece for name, spec in specs.items() for piece in _split(name, spec)]
    if len({piece.name for piece in pieces}) != len(pieces):
        raise ValueError("a parameter has the name of another one's layer")
    return pieces


def _split(name: str, spec: ParamSpec) -> Iterator[Piece]:
    if not spec.sources[0].index or split_axes(spec.spec, len(spec.shape))[0]:
        yield Piece(name, name, None, _filled(spec.sources), spec)
        return
    layers: dict[int, list[Source]] = {}
    for source in spec.sources:
        layers.setdefault(source.index[0], []).append(dataclasses.replace(source, index=source.index[1:]))
    for layer, sources in sorted(layers.items()):
        part = ParamSpec(spec.shape[1:], spec.dtype, PartitionSpec(*spec.spec[1:]), tuple(sources))
        yield Piece(f"{name}.{layer}", name, layer, _filled(sources), part)


def _filled(sources: Sequence[Source]) -> tuple[int, ...]:
    """Extent of the part of a parameter that its sources fill."""
    ends = [(*(i + 1 for i in source.index), *source.shape) for source in sources]
    return tuple(max(sizes) for sizes in zip(*ends, strict=True))


def is_native(folder: Path | str) -> bool:
    """Whether a folder holds a complete native checkpoint."""
    return (Path(folder) / MANIFEST_FILE).is_file()


def save_native(
    out_folder: Path | str,
    params: Mapping[str, jax.Array],
    specs: Mapping[str, ParamSpec],
    *,
    extra_files: Iterable[Path | str] = (),
    progress: bool = False,
    max_bytes_in_flight: int = DEFAULT_BYTES_IN_FLIGHT,
) -> None:
    """Save a model's parameters as a native checkpoint, in the dtypes they have.

    The folder appears whole or not at all: it is written beside its place and moved there when it is complete.

    Args:
      out_folder: Folder to make; it must not exist or be empty.
      params: Parameters by name, each with a NamedSharding.
      specs: Declarations of the same parameters.
      extra_files: Files to copy beside the weights (config.json, tokenizer.json).
      progress: Show a bar on stderr.
      max_bytes_in_flight: Bytes that are in host memory at a time, or the largest layer if that takes more.

    Raises:
      CheckpointError: `out_folder` holds something already, or a file to copy is missing.
      ValueError: `params` and `specs` differ.
    """
    if params.keys() != specs.keys():
        raise ValueError(
            f"params and specs must have the same names, got {sorted(params.keys() ^ specs.keys())[:4]} once"
        )
    for name, spec in specs.items():
        if params[name].shape != spec.shape or not isinstance(params[name].sharding, NamedSharding):
            raise ValueError(f"{name}: expected {spec.shape} with a NamedSharding, got {params[name].aval} {spec.spec}")

    def nbytes(piece: Piece) -> int:
        return math.prod(piece.shape) * params[piece.parameter].dtype.itemsize

    pieces = pieces_of(specs)
    with progress_bar(sum(map(nbytes, pieces)), "saving", progress) as bar:

        def parts(_: Collection[str]) -> Iterator[dict[str, jax.Array]]:
            for batch in batches(pieces, nbytes, max_bytes_in_flight // 2):
                yield {piece.name: cut(params[piece.parameter], piece.layer, piece.shape) for piece in batch}
                bar.update(sum(map(nbytes, batch)))

        save_parts(out_folder, extra_files, parts)


def save_parts(
    out_folder: Path | str,
    extra_files: Iterable[Path | str],
    parts: Callable[[Collection[str]], Iterable[Mapping[str, jax.Array]]],
    *,
    resume_key: str | None = None,
) -> None:
    """Make a native checkpoint of pieces that come a part at a time; the folder appears whole or not at all.

    Args:
      out_folder: Folder to make; it must not exist or be empty.
      extra_files: Files to copy beside the weights.
      parts: Called with the names of the pieces that are saved already; gives the others.
      resume_key: Stands for everything that the pieces depend on. What an interrupted call with the same key has saved
        is kept for the next one, which goes on behind it. None keeps nothing.
    """
    kept = None if resume_key is None else lambda unfinished: bool(_read_progress(unfinished, resume_key))
    with new_folder(out_folder, extra_files, kept) as unfinished:
        path = str(unfinished / PARAMS_FOLDER)
        described = _read_progress(unfinished, resume_key)
        _drop_unnoted(unfinished)
        context = ocp.Context()
        context.array.saving.use_compression = False  # Weights hardly compress, and it is slower than the disk.
        with context:
            for arrays in parts(described.keys()):
                ocp.partial.save(path, dict(arrays))
                described |= {n: {"shape": list(a.shape), "dtype": str(a.dtype)} for n, a in arrays.items()}
                if resume_key is not None:
                    _write_progress(unfinished, resume_key, described)
            ocp.partial.finalize(path)
        (unfinished / _PROGRESS_FILE).unlink(missing_ok=True)
        manifest = {**_FORMAT, "arrays": described, "files": _file_sizes(unfinished)}
        (unfinished / MANIFEST_FILE).write_text(json.dumps(manifest, indent=1) + "\n")


def _read_progress(unfinished: Path, resume_key: str | None) -> dict[str, dict[str, Any]]:
    """Pieces that an interrupted call with this key has saved: name to shape and dtype."""
    try:
        progress = json.loads((unfinished / _PROGRESS_FILE).read_bytes())
        return progress["arrays"] if progress["key"] == resume_key else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _write_progress(unfinished: Path, resume_key: str, described: Mapping[str, Any]) -> None:
    """Note what is saved, in one step, so that an interruption leaves the note before or the one after."""
    new = unfinished / f"{_PROGRESS_FILE}.new"
    parts = [part.relative_to(unfinished).as_posix() for part in _saved_parts(unfinished)]
    new.write_text(json.dumps({"key": resume_key, "arrays": described, "parts": parts}))
    os.replace(new, unfinished / _PROGRESS_FILE)


def _saved_parts(unfinished: Path) -> list[Path]:
    """What Orbax keeps of each partial save until all are joined: one folder each."""
    return sorted(unfinished.glob(f"{PARAMS_FOLDER}*/*"))


def _drop_unnoted(unfinished: Path) -> None:
    """Remove parts that were not yet noted when an earlier call was interrupted: they are saved again."""
    try:
        noted = json.loads((unfinished / _PROGRESS_FILE).read_bytes())["parts"]
    except FileNotFoundError:
        return
    for part in _saved_parts(unfinished):
        if part.relative_to(unfinished).as_posix() not in noted:
            shutil.rmtree(part)


def _file_sizes(folder: Path) -> dict[str, int]:
    """Bytes of every file with weights, by its path in the folder."""
    files = [file for file in (folder / PARAMS_FOLDER).rglob("*") if file.is_file()]
    return {file.relative_to(folder).as_posix(): file.stat().st_size for file in sorted(files)}


def cut(array: jax.Array, layer: int | None, shape: tuple[int, ...]) -> jax.Array:
    """One layer of a parameter, or all of it, without padding.

    Args:
      array: [layers, ...] or [...]; padded to what its mesh needs.
      layer: Index in the leading axis, or None if there is no such axis to cut.
      shape: Shape to keep.

    Returns:
      `shape`, split as the array is, but whole on every rank in dimensions that were padded.
    """
    sharding = array.sharding
    assert isinstance(sharding, NamedSharding)
    program = _cutter(sharding.mesh, sharding.spec, array.ndim, layer is not None, shape)
    return program(array, np.int32(0 if layer is None else layer))


@functools.lru_cache(maxsize=256)
def _cutter(
    mesh: Mesh, spec: PartitionSpec, rank: int, stacked: bool, shape: tuple[int, ...]
) -> Callable[[jax.Array, np.int32], jax.Array]:
    axes = split_axes(spec, rank)[stacked:]
    sizes = [math.prod(mesh.shape[axis] for axis in a) for a in axes]

    def cut_local(array: jax.Array, layer: jax.Array) -> jax.Array:
        if stacked:
            array = jax.lax.dynamic_index_in_dim(array, layer, keepdims=False)
        for dim, (a, parts, size) in enumerate(zip(axes, sizes, shape, strict=True)):
            if array.shape[dim] * parts != size:
                array = jax.lax.all_gather(array, a, axis=dim, tiled=True) if a else array
                array = jax.lax.slice_in_dim(array, 0, size, axis=dim)
        return array

    def kept(padded: tuple[int, ...]) -> PartitionSpec:
        return PartitionSpec(*(a if a and n == m else None for a, n, m in zip(axes, padded, shape, strict=True)))

    def program(array: jax.Array, layer: jax.Array) -> jax.Array:
        out_specs = kept(array.shape[stacked:])
        return jax.shard_map(
            cut_local, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=out_specs, check_vma=False
        )(array, layer)

    return jax.jit(program)


def load_native(
    folder: Path | str,
    specs: Mapping[str, ParamSpec],
    mesh: Mesh,
    dtype: jax.typing.DTypeLike,
    *,
    progress: bool = True,
    max_bytes_in_flight: int = DEFAULT_BYTES_IN_FLIGHT,
) -> dict[str, jax.Array]:
    """Load a native checkpoint into arrays that are split over a mesh, which need not be the one that saved it.

    Args:
      folder: Folder made by `save_native` or `convert`.
      specs: Parameters by name.
      mesh: Mesh with the axes ("data", "qsplit", "dcp").
      dtype: dtype of the parameters that declare none.
      progress: Show a bar on stderr.
      max_bytes_in_flight: Bytes read at a time, or the largest layer if that takes more.

    Returns:
      The parameters by name, in the order of `specs`; padding is 0.

    Raises:
      CheckpointError: The folder is no native checkpoint, is damaged, or does not fit the parameters.
    """
    check_mesh(mesh)
    stored = read_native_headers(folder)
    pieces = pieces_of(specs)
    _check(Path(folder), stored, pieces)
    sources: dict[str, list[Source]] = {name: [] for name in specs}
    for piece in pieces:
        index = () if piece.layer is None else (piece.layer,)
        sources[piece.parameter].append(Source(piece.name, piece.shape, index))
    specs = {name: dataclasses.replace(spec, sources=tuple(sources[name])) for name, spec in specs.items()}

    with progress_bar(source_bytes(specs.values(), stored), "loading", progress) as bar:
        limit = max_bytes_in_flight // 2
        return fill(
            specs,
            stored,
            mesh,
            dtype,
            native_reader(folder),
            max_batch_bytes=limit,
            rows_only=False,
            advance=bar.update,
        )


def native_reader(folder: Path | str) -> Reader:
    """Reads arrays of a native checkpoint, each device its own part."""
    params_folder = str(Path(folder).absolute() / PARAMS_FOLDER)

    def read(wanted: dict[str, jax.ShapeDtypeStruct]) -> Callable[[], Mapping[str, jax.Array]]:
        def wait() -> Mapping[str, jax.Array]:
            context = ocp.Context()
            context.pytree.loading.partial_load = True
            try:
                with context:
                    return ocp.load(params_folder, wanted)
            except jax.errors.JaxRuntimeError:  # The devices' memory, not the folder.
                raise
            except Exception as error:  # Orbax raises nothing narrower where the bytes of an array are damaged.
                raise CheckpointError(
                    f"checkpoint {folder}: reading {next(iter(wanted))!r}... failed: {_one_line(_root(error))}"
                ) from error

        return wait

    return read


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _root(error: BaseException) -> BaseException:
    """The error that started it: those above tell of Orbax's own state."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def read_native_headers(folder: Path | str) -> dict[str, StoredTensor]:
    """Shapes and dtypes of a native checkpoint's arrays by name, once its files are all there in full.

    Raises:
      CheckpointError: The folder is no native checkpoint or is damaged.
    """
    folder = Path(folder)
    if not is_native(folder):
        raise CheckpointError(
            f"checkpoint {folder}: it is no complete native checkpoint, for it has no {MANIFEST_FILE}"
        )
    try:
        manifest = json.loads((folder / MANIFEST_FILE).read_bytes())
        found = {key: manifest[key] for key in _FORMAT}
        if found != _FORMAT:
            raise ValueError(f"it says {found}, expected {_FORMAT}")
        arrays = manifest["arrays"].items()
        stored = {n: StoredTensor(tuple(map(int, a["shape"])), jnp.dtype(a["dtype"]), (n, 0)) for n, a in arrays}
        files = {str(name): int(size) for name, size in manifest["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"checkpoint {folder}: {MANIFEST_FILE} cannot be read ({_one_line(error)})") from error
    sizes = _file_sizes(folder)
    problems = [
        f"{name} has {sizes[name]} bytes, {MANIFEST_FILE} says {size}" if name in sizes else f"{name} is missing"
        for name, size in files.items()
        if sizes.get(name) != size
    ]
    raise_problems(folder, problems)
    return stored


def _check(folder: Path, stored: Mapping[str, StoredTensor], pieces: Sequence[Piece]) -> None:
    """Raise CheckpointError unless the stored arrays are the pieces of the model."""
    problems = []
    for piece in pieces:
        tensor = stored.get(piece.name)
        if tensor is None:
            problems.append(f"array {piece.name!r} is missing, the model expects {piece.shape}")
        elif tensor.shape != piece.shape:
            problems.append(f"array {piece.name!r} has shape {tensor.shape}, the model expects {piece.shape}")
    names = {piece.name for piece in pieces}
    problems += [f"array {n!r}, {t.shape}, is no part of the model" for n, t in stored.items() if n not in names]
    raise_problems(folder, problems)
