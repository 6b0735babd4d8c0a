"""Loading checkpoints of the Hugging Face layout straight into sharded parameters."""

import collections
import hashlib
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import orbax.checkpoint.experimental.v1 as ocp
from jax.sharding import Mesh

from dsa_jax.checkpoint_check import Ignored, check_tensors, is_fp8, is_nvfp4
from dsa_jax.checkpoint_report import Description, describe, find_nonfinite
from dsa_jax.checkpoint_tied import check_tied_head
from dsa_jax.filling import Reader, batches, fill, progress_bar, source_bytes
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
from dsa_jax.params import ParamSpec
from dsa_jax.quantization import SCALE_SUFFIX
from dsa_jax.safetensors_headers import CheckpointError, TensorHeader, read_headers
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
    "nvfp4_tensors",
    "save_native",
    "tensor_names",
]

# One request to the disk: large enough to be fast, small enough that several run at a time.
_READ_CHUNK_BYTES = 32 * 1024**2
_LOADS = itertools.count()


def load_safetensors(
    folder: Path | str,
    specs: Mapping[str, ParamSpec],
    mesh: Mesh,
    dtype: jax.typing.DTypeLike,
    *,
    ignored: Ignored = (),
    block_size: tuple[int, int] | None = None,
    nvfp4: bool = False,
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
        FP8 tensor `X` is multiplied by the float32 scales `X_scale_inv`. With `nvfp4`, of the blocks to be made.
      nvfp4: Whether the configuration declares NVFP4: a U8 tensor `X` holds pairs of e2m1 values with the scales
        `X_scale` and `X_scale_2`. A parameter in e4m3 takes them as block FP8, any other as real values.
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
    stored = check_tensors(Path(folder), headers, specs, ignored, block_size, nvfp4)
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
    nvfp4: bool = False,
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
      nvfp4: As in `load_safetensors`.
      progress: Show a bar on stderr.
      max_bytes_in_flight: As in `load_safetensors`, for the layers loaded and saved together.

    Raises:
      CheckpointError: As in `load_safetensors`; or `out_folder` holds something, or a file to copy is missing.
    """
    check_mesh(mesh)
    headers = read_headers(folder)
    stored = check_tensors(Path(folder), headers, specs, ignored, block_size, nvfp4)
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
    return frozenset(name for name in headers if is_fp8(name, headers))


def nvfp4_tensors(folder: Path | str) -> frozenset[str]:
    """Names of the tensors of a safetensors checkpoint that are NVFP4."""
    headers = read_headers(folder)
    return frozenset(name for name in headers if is_nvfp4(name, headers))


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

        def context() -> ocp.Context:
            made = ocp.Context()
            made.checkpoint_layout = ocp.options.CheckpointLayout.SAFETENSORS
            made.memory.read_concurrent_bytes = chunk_bytes
            made.safetensors.read_chunk_bytes = min(_READ_CHUNK_BYTES, chunk_bytes)
            # Each process reads its own bytes. Orbax would wait for the others behind every load, which takes loads
            # that do not overlap: a load waits for its own process alone, under a name of its own.
            alone = jax.process_index()
            made.multiprocessing.primary_host = alone
            made.multiprocessing.active_processes = {alone}
            made.multiprocessing.barrier_sync_key_prefix = f"process_{alone}_load_{next(_LOADS)}"
            return made

        def failed(file: Path, error: Exception) -> CheckpointError:
            return CheckpointError(f"checkpoint {folder}: reading {file.name} failed: {' '.join(str(error).split())}")

        responses = {}
        for file, leaves in by_file.items():
            try:
                with context():
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
