"""Headers of a safetensors checkpoint: what a folder claims to hold, checked before any weight is read.

The format: 8 bytes of header length (little endian), a JSON object of `{name: {dtype, shape, data_offsets}}`, then the
tensors' bytes without gaps. https://huggingface.co/docs/safetensors
"""

import collections
import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SUFFIX = ".safetensors"

# Bits an element takes, for every dtype the format knows; most of them are only counted, never loaded.
DTYPE_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "U16": 16,
    "I16": 16,
    "U32": 32,
    "I32": 32,
    "U64": 64,
    "I64": 64,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F16": 16,
    "BF16": 16,
    "F32": 32,
    "F64": 64,
    "C64": 64,
}

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # The limit of the format's own reader.
_MAX_RANK = 32
_SHOWN_PROBLEMS = 4


class CheckpointError(ValueError):
    """A checkpoint that is damaged, or that does not fit the model."""


@dataclasses.dataclass(frozen=True)
class TensorHeader:
    """One tensor of a checkpoint.

    Attributes:
      name: Name in the checkpoint.
      file: File that holds it.
      dtype: dtype as the format spells it, such as "BF16" or "F8_E4M3".
      shape: Shape in the file.
      start: Position of its first byte in the file.
      nbytes: Bytes it takes.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


def raise_problems(where: Path, problems: Sequence[str]) -> None:
    """Raise one CheckpointError of one line that shows the first few problems and counts the others."""
    if not problems:
        return
    shown = "; ".join(problems[:_SHOWN_PROBLEMS])
    hidden = len(problems) - _SHOWN_PROBLEMS
    more = f"; and {hidden} more ({len(problems)} problems in all)" if hidden > 0 else ""
    raise CheckpointError(f"checkpoint {where}: {shown}{more}")


def read_headers(folder: Path | str) -> dict[str, TensorHeader]:
    """Read and check the headers of a checkpoint folder, of one file or of several with an index.

    Links are followed wherever they point, since the Hub's cache is made of them; names in the index are not: each must
    be the name of a file in the folder.

    Args:
      folder: Folder with `model.safetensors`, with `model.safetensors.index.json` and the files it names, or with
        `.safetensors` files of any name.

    Returns:
      The tensors by name, in the order of files and of bytes in a file.

    Raises:
      CheckpointError: The folder or a file is missing or unreadable, a header is malformed, tensors overlap or leave
        gaps, a file is shorter or longer than its header says, a name appears twice, or the index disagrees with the
        files.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"checkpoint {folder}: no such folder")
    files, weight_map = _tensor_files(folder)
    problems: list[str] = []
    headers: dict[str, TensorHeader] = {}
    for file in files:
        try:
            tensors = _read_file(file)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        for tensor in tensors:
            other = headers.setdefault(tensor.name, tensor)
            if other is not tensor:
                problems.append(f"tensor {tensor.name!r} is in both {other.file.name} and {file.name}")
    if not problems and weight_map is not None:
        problems = _index_problems(weight_map, headers)
    raise_problems(folder, problems)
    return headers


def _tensor_files(folder: Path) -> tuple[list[Path], dict[str, str] | None]:
    """Files of the checkpoint, and its index's map from tensors to file names if it has an index."""
    index, single = folder / INDEX_FILE, folder / SINGLE_FILE
    if not index.exists():
        files = [single] if single.exists() else sorted(folder.glob(f"*{SUFFIX}"))
        if not files:
            raise CheckpointError(f"checkpoint {folder}: it holds neither {INDEX_FILE} nor any {SUFFIX} file")
        return files, None
    weight_map = _read_index(index)
    names = sorted(set(weight_map.values()))
    problems = []
    for name in names:
        # Backslashes separate folders elsewhere; an index that travels must mean the same everywhere.
        if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
            problems.append(f"{INDEX_FILE} names {name!r}, which is not a file name inside the folder")
        elif not (folder / name).is_file():
            users = [tensor for tensor, file in weight_map.items() if file == name]
            problems.append(f"{INDEX_FILE} names {name!r} for {len(users)} tensors ({users[0]!r}), no such file")
    if single.exists() and SINGLE_FILE not in names:
        problems.append(f"both {INDEX_FILE} and a {SINGLE_FILE} that it does not name are present; remove one")
    raise_problems(folder, problems)
    return [folder / name for name in names], weight_map


def _read_index(index: Path) -> dict[str, str]:
    """`weight_map` of an index file."""
    try:
        weight_map = json.loads(index.read_bytes(), object_pairs_hook=_object)["weight_map"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise CheckpointError(f"checkpoint {index.parent}: {index.name} is not a readable index ({error!r})") from error
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"checkpoint {index.parent}: weight_map of {index.name} must map names to file names")
    if not weight_map:
        raise CheckpointError(f"checkpoint {index.parent}: weight_map of {index.name} is empty")
    return weight_map


def _index_problems(weight_map: dict[str, str], headers: dict[str, TensorHeader]) -> list[str]:
    problems = []
    for name, file in weight_map.items():
        tensor = headers.get(name)
        if tensor is None:
            problems.append(f"tensor {name!r} is not in {file}, where {INDEX_FILE} puts it")
        elif tensor.file.name != file:
            problems.append(f"tensor {name!r} is in {tensor.file.name}, but {INDEX_FILE} puts it in {file}")
    for name, tensor in headers.items():
        if name not in weight_map:
            problems.append(f"tensor {name!r} of {tensor.file.name} is not listed in {INDEX_FILE}")
    return problems


def _read_file(file: Path) -> list[TensorHeader]:
    """Tensors of one file in the order of their bytes. Raises CheckpointError with the file's name."""
    if not file.is_file():  # A pipe or a device would block or never end.
        raise CheckpointError(f"{file.name} is not a regular file")
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            if size < _LENGTH_BYTES or length > min(size - _LENGTH_BYTES, _MAX_HEADER_BYTES):
                raise CheckpointError(
                    f"{file.name} is truncated or no safetensors file: {size} bytes, header length {length}"
                )
            text = stream.read(length)
    except OSError as error:
        raise CheckpointError(f"{file.name} cannot be read ({error})") from error
    try:
        header = json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file.name} has a header that is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{file.name} has a header that is not a JSON object")
    start = _LENGTH_BYTES + length
    tensors = [_parse(file, name, entry, start) for name, entry in header.items() if name != "__metadata__"]
    tensors.sort(key=lambda tensor: (tensor.start, tensor.nbytes))
    _check_coverage(file, tensors, start, size)
    return tensors


def _object(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """JSON object whose names are all different; `json` itself keeps the last of equal ones without a word."""
    pairs = list(pairs)
    result = dict(pairs)
    if len(result) != len(pairs):
        name, _ = collections.Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the name {name!r} appears twice")
    return result


def _parse(file: Path, name: str, entry: Any, data_start: int) -> TensorHeader:
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise CheckpointError(f"tensor {name!r} in {file.name} lacks one of dtype, shape, data_offsets: {entry!r:.100}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise CheckpointError(f"tensor {name!r} in {file.name} has the unknown dtype {dtype!r:.100}")
    if not _is_sizes(shape):
        raise CheckpointError(f"tensor {name!r} in {file.name} has the malformed shape {shape!r:.100}")
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"tensor {name!r} in {file.name} has the malformed data_offsets {offsets!r:.100}")
    bits, nbytes = math.prod(shape) * DTYPE_BITS[dtype], offsets[1] - offsets[0]
    if bits != nbytes * 8:
        raise CheckpointError(
            f"tensor {name!r} in {file.name} has {nbytes} bytes, but {dtype} {tuple(shape)} takes {-(-bits // 8)}"
        )
    return TensorHeader(name, file, dtype, tuple(shape), data_start + offsets[0], nbytes)


def _is_sizes(value: Any) -> bool:
    if not isinstance(value, list) or len(value) > _MAX_RANK:
        return False
    return all(type(size) is int and 0 <= size < 2**63 for size in value)


def _check_coverage(file: Path, tensors: Sequence[TensorHeader], start: int, size: int) -> None:
    """Tensors must fill the file from `start` to its end, each where the one before ends."""
    lost = [tensor for tensor in tensors if tensor.start + tensor.nbytes > size]
    if lost:
        raise CheckpointError(
            f"{file.name} is truncated: its tensors end at byte {max(t.start + t.nbytes for t in lost)}, the file has "
            f"{size}; the first one lost is {lost[0].name!r}, {lost[0].dtype} {lost[0].shape}"
        )
    end, before = start, "the header"
    for tensor in tensors:
        if tensor.start != end:
            what = "overlaps" if tensor.start < end else f"leaves a gap of {tensor.start - end} bytes after"
            raise CheckpointError(f"tensor {tensor.name!r} in {file.name} {what} {before}")
        end, before = end + tensor.nbytes, repr(tensor.name)
    if end != size:
        raise CheckpointError(f"{file.name} has {size - end} bytes that belong to no tensor after {before}")
