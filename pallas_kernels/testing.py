"""Inputs shared by tests and benchmarks of the kernels."""

import numpy as np

SHARED_GROUP_ROWS = 16
SHARED_FRACTION = 0.8  # 1638 of 2048


def random_ids(rng: np.random.Generator, rows: int, keys: int, k: int) -> np.ndarray:
    """`k` distinct ids below `keys` for each row, unordered [rows, k] int32."""
    return np.stack([rng.choice(keys, k, replace=False, shuffle=True) for _ in range(rows)]).astype(np.int32)


def window_ids(rng: np.random.Generator, rows: int, keys: int, k: int, window: int = 8192) -> np.ndarray:
    """`k` distinct ids of each row inside a window that slides with the row [rows, k] int32."""
    starts = np.linspace(0, keys - window, rows).astype(np.int64)
    return (random_ids(rng, rows, window, k) + starts[:, None]).astype(np.int32)


def shared_ids(rng: np.random.Generator, rows: int, keys: int, k: int) -> np.ndarray:
    """Ids where every 16 neighbouring rows share 80% of theirs and draw the rest on their own [rows, k] int32."""
    common = int(k * SHARED_FRACTION)
    out = np.empty((rows, k), np.int32)
    for first in range(0, rows, SHARED_GROUP_ROWS):
        shuffled = rng.permutation(keys)
        own = shuffled[common:]
        for row in range(first, min(first + SHARED_GROUP_ROWS, rows)):
            ids = np.concatenate([shuffled[:common], rng.choice(own, k - common, replace=False, shuffle=False)])
            out[row] = rng.permutation(ids)
    return out
