"""Write a checkpoint of real shapes without real weights, to try loading at size.

    python scripts/make_synthetic_checkpoint.py config.json OUT --layers 4

Tensors, names, dtypes and files are those of a published checkpoint of the configuration: BF16, block FP8 or NVFP4
with scales. By default the files are sparse: they hold zeros and take no room. With `--fill` every tensor repeats a
block of random values, so that a disk has something to read. `--layers` keeps the first layers only.
"""

import argparse
import dataclasses
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from dsa_jax.config import ModelConfig
from dsa_jax.fp8_weights import FP8, declared_quantized, fp8_candidates, fp8_parameters
from dsa_jax.model import abstract_model, parameter_specs
from dsa_jax.params import ParamSpec
from dsa_jax.quantization import (
    FP4_GLOBAL_SUFFIX,
    FP4_GROUP,
    FP4_SCALE_SUFFIX,
    SCALE_SUFFIX,
    activation_scale,
)
from sharding.mesh import planning_mesh

NAMES = {"bfloat16": "BF16", "float32": "F32", "float8_e4m3fn": "F8_E4M3", "uint8": "U8"}
# Sizes of random values by the end of the name: quantised values fill their range, and the scales bring them back to
# the size that models are initialised with.
SIZES = {SCALE_SUFFIX: 2e-4, FP4_GLOBAL_SUFFIX: 6e-5, FP4_SCALE_SUFFIX: 100.0}
BLOCK_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor to write."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def first_layers(raw: dict[str, Any], layers: int | None) -> dict[str, Any]:
    """The configuration of the first layers alone, without multi-token prediction."""
    if layers is None:
        return raw
    if not 0 < layers <= raw["num_hidden_layers"]:
        raise ValueError(f"layers must be from 1 to {raw['num_hidden_layers']}, got {layers}")
    cut = {**raw, "num_hidden_layers": layers, "num_nextn_predict_layers": 0}
    for name in ("indexer_types", "mlp_layer_types", "layer_types"):
        if cut.get(name) is not None:
            cut[name] = cut[name][:layers]
    return cut


def tensors_of(config: ModelConfig) -> list[Tensor]:
    """Tensors of a checkpoint, in the order of the layers."""
    mesh = planning_mesh()
    model = abstract_model(config, mesh)
    nvfp4 = config.quantization is not None and config.quantization.method == "nvfp4"
    if config.quantization is not None:
        quantized = declared_quantized(config.quantization)
        kept = fp8_parameters(fp8_candidates(model), parameter_specs(model), quantized)
        model = abstract_model(config, mesh, kept)
    found = [tensor for spec in parameter_specs(model).values() for tensor in _stored(spec, nvfp4)]

    def order(tensor: Tensor) -> tuple[int, str]:
        parts = tensor.name.split(".")
        return (int(parts[2]) if parts[:2] == ["model", "layers"] else -1, tensor.name)

    return sorted(found, key=order)


def _stored(spec: ParamSpec, nvfp4: bool) -> Iterator[Tensor]:
    """What a checkpoint holds for a parameter; with NVFP4 for one that is declared as block FP8."""
    bf16, float32 = jnp.dtype(jnp.bfloat16), np.dtype(np.float32)
    for source in spec.sources:
        if not nvfp4 or spec.dtype != FP8:
            if not (nvfp4 and source.name.endswith(SCALE_SUFFIX)):
                yield Tensor(source.name, source.shape, bf16 if spec.dtype is None else spec.dtype)
            continue
        rows, columns = source.shape
        yield Tensor(source.name, (rows, columns // 2), np.dtype(np.uint8))
        yield Tensor(source.name + FP4_SCALE_SUFFIX, (rows, columns // FP4_GROUP), FP8)
        yield Tensor(source.name + FP4_GLOBAL_SUFFIX, (), float32)
        yield Tensor(activation_scale(source.name), (), float32)


def files_of(tensors: list[Tensor], file_bytes: int) -> Iterator[list[Tensor]]:
    """Cut tensors into files of at most `file_bytes`, or of one tensor."""
    batch: list[Tensor] = []
    for tensor in tensors:
        if batch and sum(t.nbytes for t in batch) + tensor.nbytes > file_bytes:
            yield batch
            batch = []
        batch.append(tensor)
    yield batch


def write_file(path: Path, tensors: list[Tensor], fill: bool) -> None:
    """A safetensors file: the header, then zeros that are not there, or repeated blocks."""
    header, offset = {}, 0
    for tensor in tensors:
        ends = [offset, offset + tensor.nbytes]
        header[tensor.name] = {"dtype": NAMES[tensor.dtype.name], "shape": list(tensor.shape), "data_offsets": ends}
        offset = ends[1]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        if fill:
            for tensor in tensors:
                _write_blocks(file, tensor)
        file.truncate(8 + len(text) + offset)


def _write_blocks(file, tensor: Tensor) -> None:
    rng = np.random.default_rng(len(tensor.name))
    count = min(BLOCK_BYTES // tensor.dtype.itemsize, math.prod(tensor.shape))
    if tensor.dtype == np.uint8:
        block = rng.bytes(count)
    else:
        # A scale of few values must not come out near 0.
        values = rng.uniform(0.5, 1.5, count) if tensor.name.endswith(tuple(SIZES)) else rng.standard_normal(count)
        size = next((size for end, size in SIZES.items() if tensor.name.endswith(end)), 0.02)
        block = ((100.0 if tensor.dtype == FP8 else size) * values).astype(tensor.dtype).tobytes()
    for start in range(0, tensor.nbytes, len(block)):
        file.write(block[: tensor.nbytes - start])


def write_synthetic(
    raw: dict[str, Any], out: Path, *, layers: int | None = None, fill: bool = False, file_bytes: int = 5 * 10**9
) -> int:
    """Write a checkpoint; returns the bytes of its tensors.

    Args:
      raw: The parsed config.json.
      out: Folder to make.
      layers: Keep the first layers only; None keeps all.
      fill: Repeat blocks of random values instead of leaving holes.
      file_bytes: Most bytes of a file.
    """
    raw = first_layers(raw, layers)
    tensors = tensors_of(ModelConfig.from_dict(raw))
    out.mkdir(parents=True)
    (out / "config.json").write_text(json.dumps(raw, indent=1))
    files = list(files_of(tensors, file_bytes))
    weight_map = {}
    for i, batch in enumerate(files):
        name = f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        write_file(out / name, batch, fill)
        weight_map |= {tensor.name: name for tensor in batch}
    total = sum(tensor.nbytes for tensor in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def main() -> None:
    """Write what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="config.json of the model")
    parser.add_argument("out", type=Path, help="folder to make")
    parser.add_argument("--layers", type=int, help="keep the first layers only")
    parser.add_argument("--fill", action="store_true", help="write repeated random blocks instead of holes")
    args = parser.parse_args()
    total = write_synthetic(json.loads(args.config.read_text()), args.out, layers=args.layers, fill=args.fill)
    taken = sum(os.stat(file).st_blocks * 512 for file in args.out.iterdir())
    print(f"{args.out}: {total / 1e9:.2f} GB of tensors, {taken / 1e9:.2f} GB on disk")


if __name__ == "__main__":
    main()
