"""NVFP4 in NumPy, apart from what is tested: a quantiser, what its codes mean, and block FP8 made of them."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np

from tests.model.checkpoint_cases import read_tensors, write_file

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
E4M3 = ml_dtypes.float8_e4m3fn
GROUP, FP8_BLOCK = 16, 128


def quantize(weight: np.ndarray) -> dict[str, np.ndarray]:
    """Codes and scales of a matrix, by the endings of their names, as ModelOpt chooses them."""
    rows, columns = weight.shape
    groups = weight.astype(np.float32).reshape(rows, -1, GROUP)
    whole = np.float32(np.abs(groups).max() / (6 * 448))
    scale = (np.abs(groups).max(axis=2) / 6 / whole).astype(E4M3)
    safe = np.where(scale.astype(np.float32) == 0, 1, scale.astype(np.float32)) * whole
    distance = np.abs((groups / safe[:, :, None])[..., None] - E2M1)
    codes = distance.argmin(axis=3).astype(np.uint8).reshape(rows, columns)
    return {
        "": codes[:, ::2] | codes[:, 1::2] << 4,
        "_scale": scale,
        "_scale_2": whole.reshape(()),
    }


def products(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Values times the scales of their groups, element by element [rows, columns] float64."""
    codes = np.empty((packed.shape[0], 2 * packed.shape[1]), np.int64)
    codes[:, ::2], codes[:, 1::2] = packed % 16, packed // 16
    return E2M1[codes].astype(np.float64) * np.repeat(scale.astype(np.float64), GROUP, axis=1)


def dequantize(packed: np.ndarray, scale: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """float32 values, rounded once."""
    return (products(packed, scale) * np.float64(whole)).astype(np.float32)


def to_fp8(packed: np.ndarray, scale: np.ndarray, whole: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """e4m3 values and the scales of blocks of 128 x 128: the whole's scale times a power of two."""
    exact = products(packed, scale)
    rows, columns = exact.shape
    values = np.empty(exact.shape, E4M3)
    scales = np.empty((-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)), np.float32)
    for i, j in np.ndindex(scales.shape):
        part = np.s_[i * FP8_BLOCK : (i + 1) * FP8_BLOCK, j * FP8_BLOCK : (j + 1) * FP8_BLOCK]
        groups = np.s_[i * FP8_BLOCK : (i + 1) * FP8_BLOCK, j * FP8_BLOCK // GROUP : (j + 1) * FP8_BLOCK // GROUP]
        power = 2.0**-9
        while 6 * scale[groups].astype(np.float64).max() > 448 * power:
            power *= 2
        while 0 < 6 * scale[groups].astype(np.float64).max() <= 448 * power / 2:
            power /= 2
        values[part] = (exact[part] / power).astype(E4M3)
        scales[i, j] = np.float32(whole) * np.float32(power)
    return values, scales


def write_nvfp4(source: Path, out: Path, quantized) -> dict[str, tuple[np.ndarray, ...]]:
    """Write a BF16 checkpoint again with NVFP4 weights where `quantized(name)`; returns codes and scales by name.

    Inputs have scales too, and the cache, and there is a layer of multi-token prediction: what a reader must pass over.
    """
    out.mkdir()
    raw = json.loads((source / "config.json").read_text())
    tensors, codes = {}, {}
    for name, tensor in read_tensors(source).items():
        if not quantized(name):
            tensors[name] = tensor
            continue
        parts = quantize(tensor)
        tensors |= {name + ending: part for ending, part in parts.items()}
        tensors[name.removesuffix(".weight") + ".input_scale"] = np.float32(0.5).reshape(())
        codes[name] = tuple(parts.values())
    tensors["model.layers.0.self_attn.k_proj.k_scale"] = np.float32(1).reshape(())
    tensors[f"model.layers.{raw['num_hidden_layers']}.enorm.weight"] = np.ones(4, np.float32)
    write_file(out / "model.safetensors", tensors)
    raw["num_nextn_predict_layers"] = 1
    raw["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    (out / "config.json").write_text(json.dumps(raw))
    return codes
