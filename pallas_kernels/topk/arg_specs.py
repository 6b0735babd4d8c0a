"""Shapes and kinds of rows of the exact top-k, named once for tests and benchmarks."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class TopkSpec:
    """One call: `rows` rows of `columns` scores, the best `k` of each."""

    rows: int
    columns: int
    k: int


SPECS = {
    "glm_v32_128k": TopkSpec(4096, 131072, 2048),  # index_topk of GLM-5 and DeepSeek-V3.2, a chunk of a 128K prompt
    "tile_128k": TopkSpec(1024, 131072, 2048),  # the scores that fit a workspace of 512 MiB
    "tile_1m": TopkSpec(256, 1048576, 2048),  # 1 GiB of scores of a 1M prompt
    "decode_128k": TopkSpec(16, 131072, 2048),
    "decode_1m": TopkSpec(1, 1048576, 2048),
}

KINDS = (
    "normal",
    "uniform",
    "mixture",
    "ties",
    "relu",
    "narrow",
    "equal",
    "low_bits",
    "ascending",
    "descending",
    "recent",
    "denormal",
    "far_below",
    "infinite",
    "nan",
    "mostly_nan",
    "needle",
)


def score_row(rng: np.random.Generator, kind: str, n: int) -> np.ndarray:
    """One row of `n` scores that is hard in the way its kind says [n] float32."""
    x = rng.standard_normal(n).astype(np.float32)
    match kind:
        case "normal":
            return x
        case "uniform":
            return rng.random(n, np.float32)
        case "mixture":  # like logits of an indexer: most of them small, some clusters high
            return x * np.where(rng.random(n) < 0.02, 8.0, 0.5).astype(np.float32) + np.repeat(
                rng.standard_normal(n // 64 + 1), 64
            )[:n].astype(np.float32)
        case "ties":  # some 60 values
            return np.round(x * 8) / 8
        case "relu":  # mostly zeros of either sign
            return np.where(x > 2.5, x, np.where(x > 0, 0.0, -0.0)).astype(np.float32)
        case "narrow":
            return (1 + 0.01 * rng.random(n)).astype(np.float32)
        case "equal":
            return np.ones(n, np.float32)
        case "low_bits":  # the first 22 bits agree
            return (np.int32(0x3F9D3400) | rng.integers(0, 1024, n, dtype=np.int32)).view(np.float32)
        case "ascending":
            return np.sort(x)
        case "descending":
            return np.sort(x)[::-1].copy()
        case "recent":  # scores grow towards the end
            return x + np.linspace(0, 6, n, dtype=np.float32)
        case "denormal":
            return rng.integers(-(1 << 20), 1 << 20, n, dtype=np.int32).astype(np.float32) * np.float32(1e-45)
        case "far_below":
            return np.float32(-70000) - np.abs(x)
        case "infinite":
            return np.where(x > 2.3, np.inf, np.where(x < 0, -np.inf, x)).astype(np.float32)
        case "nan":
            return np.where(rng.random(n) < 0.1, np.nan, x).astype(np.float32)
        case "mostly_nan":  # fewer numbers than winners
            return np.where(rng.random(n) < 1000 / n, x, np.where(x > 0, np.nan, -np.nan)).astype(np.float32)
        case "needle":
            return np.concatenate([[100.0], x[1:]]).astype(np.float32)
    raise ValueError(f"{kind=} is not one of {KINDS}")


def expected_ids(scores: np.ndarray, k: int, start: int, end: int) -> np.ndarray:
    """Ascending ids of the best k columns of one row by a stable sort, relative to `start`, then -1 [k] int32."""
    x = scores[start:end]
    bits = np.where(x == 0, np.float32(0), x).view(np.int32).astype(np.int64)
    key = np.where(bits < 0, ~(bits & 0x7FFFFFFF), bits)
    key = np.where(np.isnan(x), np.int64(-1 << 40), key)
    best = np.sort(np.argsort(-key, kind="stable")[:k])
    return np.concatenate([best, np.full(k - best.size, -1)]).astype(np.int32)
