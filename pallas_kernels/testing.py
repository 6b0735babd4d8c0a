"""Inputs shared by tests and benchmarks of the kernels."""

import numpy as np

SHARED_GROUP_ROWS = 16
SHARED_FRACTION = 0.8  # 1638 of 2048


def random_ids(rng: np.random.Generator, rows: int, keys: int, k: int) -> np.ndarray:
    """`k` distinct ids below `keys` for each row, unordered [rows, k] int32."""
    _check_room("keys", keys, k)
    return np.stack([rng.choice(keys, k, replace=False, shuffle=True) for _ in range(rows)]).astype(np.int32)


def window_ids(rng: np.random.Generator, rows: int, keys: int, k: int, window: int = 8192) -> np.ndarray:
    """`k` distinct ids of each row inside a window that slides with the row [rows, k] int32."""
    _check_room("window", window, k)
    _check_room("keys", keys, window)
    starts = np.linspace(0, keys - window, rows).astype(np.int64)
    return (random_ids(rng, rows, window, k) + starts[:, None]).astype(np.int32)


def shared_ids(rng: np.random.Generator, rows: int, keys: int, k: int) -> np.ndarray:
    """Ids where every 16 neighbouring rows share 80% of theirs and have the rest on their own [rows, k] int32.

    For k = 2048 that is 1638 common ids and 410 of each row; the union of 16 rows is 8198 ids if there are as many.
    """
    _check_room("keys", keys, k)
    common = int(k * SHARED_FRACTION)
    own = k - common
    out = np.empty((rows, k), np.int32)
    for first in range(0, rows, SHARED_GROUP_ROWS):
        shuffled = rng.permutation(keys)
        rest = shuffled[common:]
        for row in range(first, min(first + SHARED_GROUP_ROWS, rows)):
            # Wraps around where the keys are too few for 16 disjoint parts.
            part = rest[(np.arange(own) + (row - first) * own) % len(rest)]
            out[row] = rng.permutation(np.concatenate([shuffled[:common], part]))
    return out


def _check_room(name: str, room: int, needed: int) -> None:
    if room < needed:
        raise ValueError(f"{name}={room} is too small for {needed} distinct ids")
