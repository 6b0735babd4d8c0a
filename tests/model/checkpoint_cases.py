"""Checkpoints for the tests of loading: an independent reader and writer of the format, and parameters to load into."""

import json
import re
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import PartitionSpec

from dsa_jax.params import RULES, ParamSpec, Source, round_up

ORACLE = Path(__file__).parents[1] / "fixtures" / "oracle"
BLOCK = (128, 128)
# Tensors of these checkpoints that no model reads: the layer of multi-token prediction.
MTP = {"glm52": ["model.layers.6.*"]}

DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "I32": np.dtype(np.int32),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a folder."""
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        data = file.read_bytes()
        length = int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8 : 8 + length]).items():
            if name != "__metadata__":
                begin, end = (8 + length + offset for offset in entry["data_offsets"])
                tensors[name] = np.frombuffer(data[begin:end], DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return tensors


def header_of(tensors: dict[str, np.ndarray]) -> dict[str, dict]:
    """Header that describes the tensors one after the other."""
    header, offset = {}, 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    return header


def write_file(file: Path, tensors: dict[str, np.ndarray], header: dict | bytes | None = None) -> None:
    """Write a file with the true header, or with another one."""
    header = header_of(tensors) if header is None else header
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            stream.write(tensor.tobytes())


def write_sharded(folder: Path, files: dict[str, dict[str, np.ndarray]], weight_map: dict | None = None) -> None:
    """Write several files and their index, the true one or another."""
    for name, tensors in files.items():
        write_file(folder / name, tensors)
    true_map = {tensor: name for name, tensors in files.items() for tensor in tensors}
    index = {"metadata": {}, "weight_map": true_map if weight_map is None else weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


# Logical axes by the end of the name, and dtype; all else is not split.
AXES = {
    "embed_tokens.weight": ("vocab", None),
    "lm_head.weight": ("vocab", None),
    "q_b_proj.weight": ("heads", None),
    "kv_b_proj.weight": ("heads", None),
    "o_proj.weight": (None, "heads"),
    "gate_proj.weight": ("mlp", None),
    "up_proj.weight": ("mlp", None),
    "down_proj.weight": (None, "mlp"),
}


def specs_for(tensors: dict[str, np.ndarray], tp: int, layers: int) -> dict[str, ParamSpec]:
    """Parameters that hold the tensors of a model: stacked over layers and experts, padded for `tp` ranks."""
    groups: dict[tuple[str, int], list[tuple[tuple[int, ...], str]]] = {}
    for name in tensors:
        layer = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name)
        if name.endswith("_scale_inv") or (layer and int(layer[1]) >= layers):
            continue
        expert = re.fullmatch(r"(mlp\.experts)\.(\d+)\.(.*)", layer[2]) if layer else None
        if layer is None:
            groups[name, 0] = [((), name)]
        elif expert is None:
            groups.setdefault((layer[2], 1), []).append(((int(layer[1]),), name))
        else:
            index = (int(layer[1]), int(expert[2]))
            groups.setdefault((f"{expert[1]}.{expert[3]}", 2), []).append((index, name))
    return {name: _spec(name, lead, members, tensors, tp) for (name, lead), members in groups.items()}


def _spec(name, lead, members, tensors, tp) -> ParamSpec:
    shape = tensors[members[0][1]].shape
    axes = next((axes for end, axes in AXES.items() if name.endswith(end)), (None,) * len(shape))
    if lead == 2:
        axes = (None, "experts", None, None)
    elif lead == 1:
        axes = (None, *axes)
    layer_numbers = sorted({index[0] for index, _ in members if index})
    sources = tuple(
        Source(tensor, shape, (layer_numbers.index(index[0]), *index[1:]) if index else ()) for index, tensor in members
    )
    sizes = (*(max(s.index[d] for s in sources) + 1 for d in range(lead)), *shape)
    sizes = tuple(round_up(size, tp) if axis else size for size, axis in zip(sizes, axes, strict=True))
    dtype = jnp.dtype(jnp.float32) if name.endswith("e_score_correction_bias") else None
    return ParamSpec(sizes, dtype, PartitionSpec(*(RULES[axis] for axis in axes)), sources)


def dequantize(weight: np.ndarray, scale: np.ndarray, block: tuple[int, int] = BLOCK) -> np.ndarray:
    """float32 values of an FP8 weight, block by block."""
    result = np.empty(weight.shape, np.float32)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            part = np.s_[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
            result[part] = weight[part].astype(np.float32) * scale[i, j]
    return result


def expected(spec: ParamSpec, tensors: dict[str, np.ndarray], dtype) -> np.ndarray:
    """What a parameter must hold, bit for bit."""
    result = np.zeros(spec.shape, dtype if spec.dtype is None else spec.dtype)
    for source in spec.sources:
        value = tensors[source.name]
        if value.dtype == DTYPES["F8_E4M3"]:
            value = dequantize(value, tensors[source.name + "_scale_inv"])
        result[(*source.index, *(slice(0, size) for size in value.shape))] = value.astype(result.dtype)
    return result


def bits(array) -> np.ndarray:
    """Bit patterns, so that equality tells NaN and signed zeros apart."""
    array = np.asarray(array)
    return array.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[array.dtype.itemsize])
