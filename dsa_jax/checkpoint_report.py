"""What a checkpoint holds: counts by dtype from its headers alone, and the tensors with values that are not finite."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from dsa_jax.filling import batches, progress_bar
from dsa_jax.native_checkpoint import is_native, native_reader, read_native_headers
from dsa_jax.quantization import FP4_GLOBAL_SUFFIX, FP4_SCALE_SUFFIX, SCALE_SUFFIX, activation_scale
from dsa_jax.safetensors_headers import DTYPE_BITS, CheckpointError, TensorHeader, read_headers

# dtype -> (unsigned integer of its width, mask, limit): a value is NaN or infinite iff (bits & mask) >= limit.
# E4M3 and E8M0 have no infinity, and one NaN.
_NONFINITE = {
    "F64": (np.uint64, 0x7FFF_FFFF_FFFF_FFFF, 0x7FF0_0000_0000_0000),
    "F32": (np.uint32, 0x7FFF_FFFF, 0x7F80_0000),
    "C64": (np.uint32, 0x7FFF_FFFF, 0x7F80_0000),
    "F16": (np.uint16, 0x7FFF, 0x7C00),
    "BF16": (np.uint16, 0x7FFF, 0x7F80),
    "F8_E5M2": (np.uint8, 0x7F, 0x7C),
    "F8_E4M3": (np.uint8, 0x7F, 0x7F),
    "F8_E8M0": (np.uint8, 0xFF, 0xFF),
}
# Native arrays name their dtypes as NumPy does.
_FORMAT_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


@dataclasses.dataclass(frozen=True)
class DtypeCount:
    """Tensors of one dtype.

    Attributes:
      tensors: How many.
      elements: Their elements.
      nbytes: Their bytes.
    """

    tensors: int = 0
    elements: int = 0
    nbytes: int = 0

    def plus(self, elements: int, nbytes: int) -> "DtypeCount":
        """The counts with one more tensor."""
        return DtypeCount(self.tensors + 1, self.elements + elements, self.nbytes + nbytes)


@dataclasses.dataclass(frozen=True)
class Description:
    """What a checkpoint folder holds.

    Attributes:
      layout: "safetensors" or "native".
      files: Files with weights, 0 for a native checkpoint.
      tensors: Number of tensors, scales included.
      parameters: Elements of all tensors but the scales of quantized ones; a byte of NVFP4 counts two.
      nbytes: Bytes of all tensors.
      by_dtype: Counts by dtype ("BF16", "F8_E4M3") as stored, the largest first.
    """

    layout: str
    files: int
    tensors: int
    parameters: int
    nbytes: int
    by_dtype: dict[str, DtypeCount]


def describe(folder: Path | str) -> Description:
    """Count what a checkpoint holds, from its headers only.

    Args:
      folder: Folder of safetensors files, or a native checkpoint.

    Raises:
      CheckpointError: The folder is neither, or is damaged.
    """
    if is_native(folder):
        layout, files = "native", 0
        tensors = [
            (name, _FORMAT_NAMES.get(str(t.dtype), str(t.dtype)), t.nbytes // t.dtype.itemsize, t.nbytes)
            for name, t in read_native_headers(folder).items()
        ]
    else:
        headers = read_headers(folder).values()
        layout, files = "safetensors", len({h.file for h in headers})
        tensors = [(h.name, h.dtype, h.nbytes * 8 // DTYPE_BITS[h.dtype], h.nbytes) for h in headers]
    counts: dict[str, DtypeCount] = {}
    for _, dtype, elements, nbytes in tensors:
        counts[dtype] = counts.get(dtype, DtypeCount()).plus(elements, nbytes)
    by_dtype = dict(sorted(counts.items(), key=lambda item: -item[1].nbytes))
    nbytes = sum(nbytes for *_, nbytes in tensors)
    return Description(layout, files, len(tensors), _parameters({n: e for n, _, e, _ in tensors}), nbytes, by_dtype)


def _parameters(elements: dict[str, int]) -> int:
    """Elements of all tensors but scales; two for each byte of a tensor that has the scales of NVFP4."""
    pairs = {name for name in elements if name + FP4_GLOBAL_SUFFIX in elements}
    scales = {name + suffix for name in pairs for suffix in (FP4_SCALE_SUFFIX, FP4_GLOBAL_SUFFIX)}
    scales |= {activation_scale(name) for name in pairs}
    counted = (name for name in elements if name not in scales and not name.endswith(SCALE_SUFFIX))
    return sum(elements[name] * (2 if name in pairs else 1) for name in counted)


def find_nonfinite(folder: Path | str, *, progress: bool = False, chunk_bytes: int = 64 * 1024**2) -> dict[str, int]:
    """Find the tensors that hold NaN or infinity, reading every weight once in chunks.

    Args:
      folder: Folder of safetensors files, or a native checkpoint.
      progress: Show a bar on stderr.
      chunk_bytes: Bytes in memory at a time; of a native checkpoint, one array if that takes more.

    Returns:
      Number of such values by name, only for the tensors that hold any.

    Raises:
      CheckpointError: The folder is neither, or is damaged.
    """
    blocks = _native_blocks if is_native(folder) else _file_blocks
    counts: dict[str, int] = {}
    with progress_bar(describe(folder).nbytes, "checking", progress) as bar:
        for name, dtype, data in blocks(Path(folder), chunk_bytes):
            bar.update(data.nbytes)
            if dtype not in _NONFINITE:
                continue
            uint, mask, limit = _NONFINITE[dtype]
            count = int(np.count_nonzero((data.view(uint) & uint(mask)) >= uint(limit)))
            if count:
                counts[name] = counts.get(name, 0) + count
    return counts


def _file_blocks(folder: Path, chunk_bytes: int) -> Iterator[tuple[str, str, np.ndarray]]:
    """Name, dtype and bytes of chunks of the tensors of safetensors files."""
    chunk_bytes = max(8, chunk_bytes // 8 * 8)  # A value must not be cut in two.
    by_file: dict[Path, list[TensorHeader]] = {}
    for header in read_headers(folder).values():
        by_file.setdefault(header.file, []).append(header)
    for file, headers in by_file.items():
        with file.open("rb") as stream:
            for header in headers:
                stream.seek(header.start)
                for begin in range(0, header.nbytes, chunk_bytes):
                    data = np.fromfile(stream, np.uint8, min(chunk_bytes, header.nbytes - begin))
                    if data.size < min(chunk_bytes, header.nbytes - begin):
                        raise CheckpointError(f"checkpoint {folder}: {file.name} ended while it was read")
                    yield header.name, header.dtype, data


def _native_blocks(folder: Path, chunk_bytes: int) -> Iterator[tuple[str, str, np.ndarray]]:
    """Name, dtype and bytes of the arrays of a native checkpoint."""
    stored = read_native_headers(folder)
    read = native_reader(folder)
    sharding = SingleDeviceSharding(jax.local_devices()[0])
    for names in batches(stored, lambda name: stored[name].nbytes, chunk_bytes):
        wanted = {n: jax.ShapeDtypeStruct(stored[n].shape, stored[n].dtype, sharding=sharding) for n in names}
        for name, array in read(wanted)().items():
            dtype = str(stored[name].dtype)
            yield name, _FORMAT_NAMES.get(dtype, dtype), np.asarray(array).reshape(-1).view(np.uint8)
