"""Inputs of block-scaled FP8 products, and what they must give, in float64 NumPy apart from what is tested."""

import dataclasses

import ml_dtypes
import numpy as np

E4M3 = ml_dtypes.float8_e4m3fn
BLOCK = 128


@dataclasses.dataclass(frozen=True)
class Product:
    """Arguments of `grouped_scaled_matmul`, as NumPy arrays."""

    x: np.ndarray
    x_scale: np.ndarray
    weights: np.ndarray
    weight_scales: np.ndarray
    group_sizes: np.ndarray

    def arrays(self) -> tuple[np.ndarray, ...]:
        """In the order of the arguments."""
        return self.x, self.x_scale, self.weights, self.weight_scales, self.group_sizes

    @property
    def real_rows(self) -> int:
        """Rows of all groups."""
        return int(self.group_sizes.sum())

    def expected(self) -> np.ndarray:
        """Products of the groups' rows [rows of all groups, N] float64, every value times its scale first."""
        x = self.x.astype(np.float64) * np.repeat(self.x_scale.T.astype(np.float64), BLOCK, axis=1)
        scales = np.repeat(np.repeat(self.weight_scales.astype(np.float64), BLOCK, axis=1), BLOCK, axis=2)
        weights = self.weights.astype(np.float64) * scales[:, : self.weights.shape[1]]
        parts, start = [], 0
        for weight, size in zip(weights, self.group_sizes, strict=True):
            parts.append(x[start : start + size] @ weight.T)
            start += size
        return np.concatenate(parts)

    def error(self, got) -> float:
        """Root mean square of the error of the groups' rows over that of the result."""
        want = self.expected()
        return float(np.linalg.norm(np.asarray(got, np.float64)[: len(want)] - want) / np.linalg.norm(want))


def make(sizes, columns: int, contracted: int, *, rows: int | None = None, seed: int = 0) -> Product:
    """Random values and scales of many sizes; rows behind the last group hold NaN."""
    rng = np.random.default_rng(seed)
    groups, blocks = len(sizes), contracted // BLOCK
    real = int(np.sum(sizes))
    rows = real if rows is None else rows
    codes = rng.integers(0, 256, (rows, contracted), dtype=np.uint8)
    weights = rng.integers(0, 256, (groups, columns, contracted), dtype=np.uint8)
    for array in (codes, weights):
        array[array & 0x7F == 0x7F] = 0
    codes[real:] = 0x7F
    return Product(
        codes.view(E4M3),
        (2.0 ** rng.uniform(-8, 8, (blocks, rows))).astype(np.float32),
        weights.view(E4M3),
        (2.0 ** rng.uniform(-8, 8, (groups, -(-columns // BLOCK), blocks))).astype(np.float32),
        np.asarray(sizes, np.int32),
    )
