"""Comparing the headers of a safetensors checkpoint with a model's parameters, before any weight is read."""

import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from dsa_jax.filling import StoredTensor
from dsa_jax.params import ParamSpec, Source
from dsa_jax.quantization import (
    FP4_GLOBAL_SUFFIX,
    FP4_GROUP,
    FP4_SCALE_SUFFIX,
    SCALE_SUFFIX,
    BlockFp8,
    Coding,
    Nvfp4,
    Nvfp4BlockScales,
    Nvfp4ToFp8,
    activation_scale,
    scale_shape,
)
from dsa_jax.safetensors_headers import TensorHeader, raise_problems

# Tensors that may be present and are not read: a predicate of the name, or shell patterns (a string is one pattern).
Ignored = Callable[[str], bool] | Sequence[str]

# dtypes whose values a parameter can take; FP8 only with its scales.
DTYPES = {"F32": jnp.float32, "BF16": jnp.bfloat16, "F16": jnp.float16, "F8_E4M3": jnp.float8_e4m3fn}
FP8, FP4_PAIRS = "F8_E4M3", "U8"


def is_fp8(name: str, headers: Mapping[str, TensorHeader]) -> bool:
    """Whether a tensor is block-scaled FP8."""
    return headers[name].dtype == FP8 and name + SCALE_SUFFIX in headers


def is_nvfp4(name: str, headers: Mapping[str, TensorHeader]) -> bool:
    """Whether a tensor is NVFP4: pairs of e2m1 values with scales."""
    return headers[name].dtype == FP4_PAIRS and name + FP4_SCALE_SUFFIX in headers


def check_tensors(
    folder: Path,
    headers: Mapping[str, TensorHeader],
    specs: Mapping[str, ParamSpec],
    ignored: Ignored,
    block_size: tuple[int, int] | None,
    nvfp4: bool,
) -> dict[str, StoredTensor]:
    """Compare the headers with the parameters.

    Args:
      folder: The checkpoint, for messages.
      headers: Its tensors by name.
      specs: Parameters by name.
      ignored: Tensors that may be present and are not read.
      block_size: Rows and columns of a block of FP8 weights, stored or to be made from NVFP4.
      nvfp4: Whether the configuration declares NVFP4.

    Returns:
      What to read, by the names of the parameters' sources, and the scales by their own.

    Raises:
      CheckpointError: A tensor is missing, unknown, has another shape or dtype, or lacks its scales.
    """
    is_ignored = ignored if callable(ignored) else _matcher([ignored] if isinstance(ignored, str) else ignored)
    problems: list[str] = []
    missing: list[str] = []
    expected: set[str] = set()
    stored: dict[str, StoredTensor] = {}
    for source, dtype in ((source, spec.dtype) for spec in specs.values() for source in spec.sources):
        keeps_fp8 = dtype is not None and dtype == DTYPES[FP8]
        expected.add(source.name)
        header = headers.get(source.name)
        if header is not None:
            scales, coding, found = _read_as(source, header, headers, block_size, nvfp4, keeps_fp8)
            problems += found
            stored[source.name] = _stored(header, coding, scales)
        elif (weight := _fp4_behind(source, headers)) is not None and nvfp4 and block_size is not None:
            # The weight itself is another parameter's source, which is where its problems are told.
            header, scales = headers[weight + FP4_SCALE_SUFFIX], (weight + FP4_GLOBAL_SUFFIX,)
            stored[source.name] = _stored(header, Nvfp4BlockScales(block_size), scales, header.name)
        else:
            missing.append(f"tensor {source.name!r} is missing, the model expects {source.shape}")
            continue
        expected |= {*scales, activation_scale(source.name)} if nvfp4 else set(scales)
        stored |= {scale: _stored(headers[scale]) for scale in scales if scale in headers}
    extra = [
        f"tensor {h.name!r} in {h.file.name}, {h.dtype} {h.shape}, is no part of the model"
        for h in headers.values()
        if h.name not in expected and not is_ignored(h.name)
    ]
    raise_problems(folder, [*problems, *missing, *extra])
    return stored


def _read_as(
    source: Source,
    header: TensorHeader,
    headers: Mapping[str, TensorHeader],
    block_size: tuple[int, int] | None,
    nvfp4: bool,
    keeps_fp8: bool,
) -> tuple[tuple[str, ...], Coding | None, list[str]]:
    """Names of a tensor's scales, what its bytes mean, and what is wrong with it."""
    what = f"tensor {header.name!r} in {header.file.name}"
    if header.dtype == FP4_PAIRS and nvfp4:
        scales = (source.name + FP4_SCALE_SUFFIX, source.name + FP4_GLOBAL_SUFFIX)
        coding = Nvfp4ToFp8(block_size) if keeps_fp8 and block_size is not None else Nvfp4()
        return scales, coding, list(_fp4_problems(what, source, header, headers))
    problems = list(_plain_problems(what, source, header, block_size))
    if keeps_fp8 and header.dtype != FP8:
        problems.append(f"{what} has dtype {header.dtype}, the model keeps {FP8}")
    if header.dtype != FP8 or block_size is None or keeps_fp8:
        return (), None, problems
    scale = source.name + SCALE_SUFFIX
    wanted = scale_shape(header.shape, block_size) if len(header.shape) == 2 else None
    problems += _scale_problems(what, header, headers, {scale: ("F32", (wanted,))})
    return (scale,), BlockFp8(block_size), problems


def _fp4_behind(source: Source, headers: Mapping[str, TensorHeader]) -> str | None:
    """Name of the NVFP4 weight that FP8 scales of this name would be made from."""
    weight = source.name.removesuffix(SCALE_SUFFIX)
    return weight if weight != source.name and weight in headers and is_nvfp4(weight, headers) else None


def _stored(
    header: TensorHeader, coding: Coding | None = None, scales: tuple[str, ...] = (), file_name: str | None = None
) -> StoredTensor:
    dtype = np.dtype(DTYPES.get(header.dtype, np.uint8))
    return StoredTensor(header.shape, dtype, (header.file.name, header.start), coding, scales, file_name)


def _matcher(patterns: Sequence[str]) -> Callable[[str], bool]:
    match = re.compile("|".join(map(fnmatch.translate, patterns)) or r"(?!)").match
    return lambda name: match(name) is not None


def _plain_problems(
    what: str, source: Source, header: TensorHeader, block_size: tuple[int, int] | None
) -> Iterator[str]:
    if header.shape != source.shape:
        yield f"{what} has shape {header.shape}, the model expects {source.shape}"
    if header.dtype not in DTYPES:
        yield f"{what} has dtype {header.dtype}, which is none of {', '.join(DTYPES)}"
    if header.dtype == FP8 and block_size is None:
        yield f"{what} has dtype {header.dtype}, but the configuration declares no block quantization"
    if header.dtype == FP8 and len(header.shape) != 2:
        yield f"{what} has dtype {header.dtype} and shape {header.shape}, blocks need 2 dimensions"


def _fp4_problems(
    what: str, source: Source, header: TensorHeader, headers: Mapping[str, TensorHeader]
) -> Iterable[str]:
    """Problems of a weight with two values a byte."""
    if len(source.shape) != 2 or source.shape[1] % FP4_GROUP:
        return [f"{what} has dtype {header.dtype}: NVFP4 needs rows of a multiple of {FP4_GROUP}, got {source.shape}"]
    rows, columns = source.shape
    if header.shape != (rows, columns // 2):
        stored = f"{(rows, columns // 2)}, two values a byte"
        return [f"{what} has shape {header.shape}, the model expects {source.shape}: {stored}"]
    wanted = {
        source.name + FP4_SCALE_SUFFIX: (FP8, ((rows, columns // FP4_GROUP),)),
        source.name + FP4_GLOBAL_SUFFIX: ("F32", ((), (1,))),
    }
    return _scale_problems(what, header, headers, wanted)


def _scale_problems(
    what: str,
    weight: TensorHeader,
    headers: Mapping[str, TensorHeader],
    wanted: Mapping[str, tuple[str, tuple[tuple[int, ...] | None, ...]]],
) -> Iterator[str]:
    """Scales that are missing, or have another dtype or shape than one of those wanted."""
    of = f"{what}, {weight.dtype} {weight.shape},"
    for name, (dtype, shapes) in wanted.items():
        scale, first = headers.get(name), f"{dtype} {shapes[0]}"
        if scale is None:
            yield f"{of} lacks its scales {name!r}, expected {first}"
        elif None not in shapes and (scale.shape not in shapes or scale.dtype != dtype):
            yield f"{of} has scales {name!r} in {scale.file.name} of {scale.dtype} {scale.shape}, expected {first}"
