"""Loading checkpoints of the Hugging Face layout straight into sharded parameters."""

import collections
import fnmatch
import hashlib
import logging
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
from jax.sharding import Mesh

from dsa_jax.checkpoint_report import Description, describe, find_nonfinite
from dsa_jax.checkpoint_tied import check_tied_head
from dsa_jax.filling import Reader, StoredTensor, batches, fill, progress_bar, source_bytes
from dsa_jax.native_checkpoint import (
    DEFAULT_BYTES_IN_FLIGHT,
    Piece,
    cut,
    is_native,
    load_native,
    pieces_of,
    read_native_headers,
    save_native,
    save_parts,
)
from dsa_jax.params import ParamSpec, Source
from dsa_jax.quantization import SCALE_SUFFIX, scale_shape
from dsa_jax.safetensors_headers import CheckpointError, TensorHeader, raise_problems, read_headers
from sharding.mesh import check_mesh

__all__ = [
    "CheckpointError",
    "Description",
    "check_tied_head",
    "convert",
    "describe",
    "find_nonfinite",
    "fp8_tensors",
    "is_native",
    "load_native",
    "load_safetensors",
    "native_fp8",
    "save_native",
    "tensor_names",
]

_LOGGER = logging.getLogger(__name__)

# Tensors that may be present and are not read: a predicate of the name, or shell patterns (a string is one pattern).
Ignored = Callable[[str], bool] | Sequence[str]

# dtypes whose values a parameter can take; FP8 only with its scales.
_DTYPES = {"F32": jnp.float32, "BF16": jnp.bfloat16, "F16": jnp.float16, "F8_E4M3": jnp.float8_e4m3fn}
_QUANTIZED = "F8_E4M3"
# One request to the disk: large enough to be fast, small enough that several run at a time.
_READ_CHUNK_BYTES = 32 * 1024**2


def load_safetensors(
    folder: Path | str,
    specs: Mapping[str, ParamSpec],
    mesh: Mesh,
    dtype: jax.typing.DTypeLike,
    *,
    ignored: Ignored = (),
    block_size: tuple[int, int] | None = None,
    progress: bool = True,
    max_bytes_in_flight: int = DEFAULT_BYTES_IN_FLIGHT,
) -> dict[str, jax.Array]:
    """Load a checkpoint of safetensors files into arrays that are split over a mesh.

    All headers are checked against the parameters before a weight is read. Orbax then reads the bytes that each device
    needs, in the stored dtype and in batches of bounded size; programs on the devices cast, dequantize and put them
    where they belong. A tensor that a mesh splits by columns, or whose split dimension is padded, goes whole to every
    rank and is cut there.

    Args:
      folder: Folder with one `model.safetensors`, or several files and their index.
      specs: Parameters by name.
      mesh: Mesh with the axes ("data", "qsplit", "dcp").
      dtype: dtype of the parameters that declare none.
      ignored: Tensors that may be present and are not read (multi-token prediction layers, rotary tables): a predicate
        of the name, or shell patterns such as `"model.layers.78.*"`.
      block_size: Rows and columns of a quantization block, or None if the configuration declares no quantization. An
        FP8 tensor `X` is multiplied by the float32 scales `X_scale_inv`.
      progress: Show a bar on stderr.
      max_bytes_in_flight: Host memory that reading may take beyond the parameters themselves. What is placed together
        is read together even if it takes more: the largest tensor or, of split experts, one of each rank.

    Returns:
      The parameters by name, in the order of `specs`; padding is 0.

    Raises:
      CheckpointError: The folder is damaged or does not fit the parameters; the message names tensors, files, shapes.
      ValueError: `specs` does not fit the mesh.
    """
    check_mesh(mesh)
    headers = read_headers(folder)
    stored = _check(Path(folder), headers, specs, ignored, block_size)
    reader = _reader(Path(folder), headers, max_bytes_in_flight)
    limit = _batch_bytes(max_bytes_in_flight)
    with progress_bar(source_bytes(specs.values(), stored), "loading", progress) as bar:
        return fill(
            specs,
            stored,
            mesh,
            dtype,
            reader,
            max_batch_bytes=limit,
            rows_only=True,
            block_size=block_size,
            advance=bar.update,
        )


def convert(
    folder: Path | str,
    out_folder: Path | str,
    specs: Mapping[str, ParamSpec],
    mesh: Mesh,
    dtype: jax.typing.DTypeLike,
    *,
    extra_files: Iterable[Path | str] = (),
    ignored: Ignored = (),
    block_size: tuple[int, int] | None = None,
    progress: bool = True,
    max_bytes_in_flight: int = DEFAULT_BYTES_IN_FLIGHT,
) -> None:
    """Rewrite a checkpoint of safetensors files as a native one, without ever holding the whole of it.

    Layers are loaded and saved a few at a time, so that neither the host nor the devices need room for the model. After
    an interruption the same call goes on where it was: what is saved lies in a hidden folder beside `out_folder`.

    Args:
      folder: As in `load_safetensors`.
      out_folder: Folder to make; it must not exist or be empty.
      specs: Parameters by name.
      mesh: Mesh that the weights pass through; the result does not depend on it.
      dtype: dtype to store, for parameters that declare none; FP8 weights are dequantized to it.
      extra_files: Files to copy beside the weights (config.json, tokenizer.json).
      ignored: As in `load_safetensors`.
      block_size: As in `load_safetensors`.
      progress: Show a bar on stderr.
      max_bytes_in_flight: As in `load_safetensors`, for the layers loaded and saved together.

    Raises:
      CheckpointError: As in `load_safetensors`; or `out_folder` holds something, or a file to copy is missing.
    """
    check_mesh(mesh)
    headers = read_headers(folder)
    stored = _check(Path(folder), headers, specs, ignored, block_size)
    pieces = pieces_of(specs)
    reader = _reader(Path(folder), headers, max_bytes_in_flight)
    limit = _batch_bytes(max_bytes_in_flight)

    def nbytes(piece: Piece) -> int:
        converted = jnp.dtype(dtype if piece.spec.dtype is None else piece.spec.dtype)
        return max(source_bytes([piece.spec], stored), math.prod(piece.shape) * converted.itemsize)

    with progress_bar(source_bytes(specs.values(), stored), "converting", progress) as bar:

        def parts(saved: Collection[str]) -> Iterator[dict[str, jax.Array]]:
            bar.update(source_bytes([piece.spec for piece in pieces if piece.name in saved], stored))
            for batch in batches([piece for piece in pieces if piece.name not in saved], nbytes, limit):
                part = {piece.name: piece.spec for piece in batch}
                arrays = fill(
                    part,
                    stored,
                    mesh,
                    dtype,
                    reader,
                    max_batch_bytes=limit,
                    rows_only=True,
                    block_size=block_size,
                    advance=bar.update,
                )
                yield {piece.name: cut(arrays[piece.name], None, piece.shape) for piece in batch}

        save_parts(out_folder, extra_files, parts, resume_key=_fingerprint(headers, pieces, dtype, block_size))


def _fingerprint(
    headers: Mapping[str, TensorHeader],
    pieces: Sequence[Piece],
    dtype: jax.typing.DTypeLike,
    block_size: tuple[int, int] | None,
) -> str:
    """Stands for a conversion: the files with their sizes and times, where tensors lie, and what is made of them."""
    files = sorted({header.file for header in headers.values()})
    stats = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    tensors = sorted((h.name, h.dtype, h.shape, h.file.name, h.start) for h in headers.values())
    made = [(piece.name, piece.shape, str(piece.spec.dtype), piece.spec.sources) for piece in pieces]
    text = repr((stats, tensors, made, jnp.dtype(dtype).name, block_size))
    return hashlib.sha256(text.encode()).hexdigest()


def tensor_names(folder: Path | str) -> list[str]:
    """Names of the tensors of a safetensors checkpoint."""
    return list(read_headers(folder))


def fp8_tensors(folder: Path | str) -> frozenset[str]:
    """Names of the tensors of a safetensors checkpoint that are block-scaled FP8."""
    headers = read_headers(folder)
    return frozenset(n for n, h in headers.items() if h.dtype == _QUANTIZED and n + SCALE_SUFFIX in headers)


def native_fp8(folder: Path | str, parameters: Iterable[str]) -> frozenset[str]:
    """Those of the parameters that a native checkpoint keeps in FP8 with scales."""
    pieces = read_native_headers(folder)
    return frozenset(name for name in parameters if any(piece.startswith(name + SCALE_SUFFIX) for piece in pieces))


def _batch_bytes(max_bytes_in_flight: int) -> int:
    """Bytes of one batch: two are in memory at a time, and the chunks being read take the rest."""
    return max(1, max_bytes_in_flight * 3 // 8)


def _reader(folder: Path, headers: Mapping[str, TensorHeader], max_bytes_in_flight: int) -> Reader:
    """Reads tensors with Orbax, in the stored dtype, each device its own bytes."""
    chunk_bytes = max(1, max_bytes_in_flight // 8)

    def read(wanted: dict[str, jax.ShapeDtypeStruct]) -> Callable[[], dict[str, jax.Array]]:
        by_file: dict[Path, dict[str, jax.ShapeDtypeStruct]] = collections.defaultdict(dict)
        for name, leaf in wanted.items():
            by_file[headers[name].file][name] = leaf
        context = ocp.Context()
        context.checkpoint_layout = ocp.options.CheckpointLayout.SAFETENSORS
        context.memory.read_concurrent_bytes = chunk_bytes
        context.safetensors.read_chunk_bytes = min(_READ_CHUNK_BYTES, chunk_bytes)

        def failed(file: Path, error: Exception) -> CheckpointError:
            return CheckpointError(f"checkpoint {folder}: reading {file.name} failed: {' '.join(str(error).split())}")

        responses = {}
        with context:
            for file, leaves in by_file.items():
                try:
                    responses[file] = ocp.load_async(str(file.absolute()), leaves)
                except (OSError, ValueError, KeyError) as error:
                    raise failed(file, error) from error

        def wait() -> dict[str, jax.Array]:
            arrays: dict[str, jax.Array] = {}
            errors: list[CheckpointError] = []
            for file, response in responses.items():  # All are waited for, whichever fails.
                try:
                    arrays.update(response.result())
                except (OSError, ValueError, KeyError) as error:
                    errors.append(failed(file, error))
            if errors:
                raise errors[0]
            return arrays

        return wait

    return read


def _check(
    folder: Path,
    headers: Mapping[str, TensorHeader],
    specs: Mapping[str, ParamSpec],
    ignored: Ignored,
    block_size: tuple[int, int] | None,
) -> dict[str, StoredTensor]:
    """Compare the headers with the parameters; the tensors to read, by name.

    Raises:
      CheckpointError: A tensor is missing, unknown, has another shape or dtype, or lacks its scales.
    """
    is_ignored = ignored if callable(ignored) else _matcher([ignored] if isinstance(ignored, str) else ignored)
    problems: list[str] = []
    missing: list[str] = []
    expected: set[str] = set()
    stored: dict[str, StoredTensor] = {}
    for source, dtype in ((source, spec.dtype) for spec in specs.values() for source in spec.sources):
        expected.add(source.name)
        header = headers.get(source.name)
        if header is None:
            missing.append(f"tensor {source.name!r} is missing, the model expects {source.shape}")
            continue
        problems += _source_problems(source, header, block_size)
        scale = None
        keeps_fp8 = dtype is not None and dtype == _DTYPES[_QUANTIZED]
        if keeps_fp8 and header.dtype != _QUANTIZED:
            problems.append(f"tensor {header.name!r} has dtype {header.dtype}, the model keeps {_QUANTIZED}")
        if header.dtype == _QUANTIZED and block_size is not None and not keeps_fp8:
            scale = source.name + SCALE_SUFFIX
            expected.add(scale)
            problems += _scale_problems(scale, header, headers.get(scale), block_size)
            if scale in headers:
                stored[scale] = _stored(headers[scale], None)
        stored[source.name] = _stored(header, scale)
    extra = [
        f"tensor {h.name!r} in {h.file.name}, {h.dtype} {h.shape}, is no part of the model"
        for h in headers.values()
        if h.name not in expected and not is_ignored(h.name)
    ]
    raise_problems(folder, [*problems, *missing, *extra])
    if skipped := sorted(name for name in headers if name not in expected):
        _LOGGER.info(
            "%s: %d tensors that the model does not use are skipped, %s first", folder, len(skipped), skipped[0]
        )
    return stored


def _stored(header: TensorHeader, scale: str | None) -> StoredTensor:
    dtype = np.dtype(_DTYPES.get(header.dtype, np.uint8))
    return StoredTensor(header.shape, dtype, (header.file.name, header.start), scale)


def _matcher(patterns: Sequence[str]) -> Callable[[str], bool]:
    match = re.compile("|".join(map(fnmatch.translate, patterns)) or r"(?!)").match
    return lambda name: match(name) is not None


def _source_problems(source: Source, header: TensorHeader, block_size: tuple[int, int] | None) -> Iterator[str]:
    what = f"tensor {header.name!r} in {header.file.name}"
    if header.shape != source.shape:
        yield f"{what} has shape {header.shape}, the model expects {source.shape}"
    if header.dtype not in _DTYPES:
        yield f"{what} has dtype {header.dtype}, which is none of {', '.join(_DTYPES)}"
    if header.dtype == _QUANTIZED and block_size is None:
        yield f"{what} has dtype {header.dtype}, but the configuration declares no block quantization"
    if header.dtype == _QUANTIZED and len(header.shape) != 2:
        yield f"{what} has dtype {header.dtype} and shape {header.shape}, blocks need 2 dimensions"


def _scale_problems(
    name: str, weight: TensorHeader, scale: TensorHeader | None, block_size: tuple[int, int]
) -> Iterator[str]:
    shape = scale_shape(weight.shape, block_size) if len(weight.shape) == 2 else None
    of = f"tensor {weight.name!r} in {weight.file.name}, {weight.dtype} {weight.shape}"
    if scale is None:
        yield f"{of}, lacks its scales {name!r}, expected F32 {shape}"
    elif shape is not None and (scale.shape != shape or scale.dtype != "F32"):
        yield f"{of}, has scales {name!r} in {scale.file.name} of {scale.dtype} {scale.shape}, expected F32 {shape}"
