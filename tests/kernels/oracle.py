"""The operations in float64 NumPy, written from their contract and not from the reference, and exact comparisons."""

import numpy as np


def index_scores(q, k, weights, key_start, key_end, k_scale=None) -> np.ndarray:
    """Scores [T, S] float64 of the lightning indexer, -inf outside a row's range."""
    q, k, weights = (np.asarray(x).astype(np.float64) for x in (q, k, weights))
    dots = np.einsum("thd,sd->ths", q, k)
    relu = np.where(dots > 0, dots, 0.0)
    scores = np.einsum("ths,th->ts", relu, weights)
    if k_scale is not None:
        scores = scores * np.asarray(k_scale, np.float64)
    return np.where(visible(scores.shape[1], key_start, key_end), scores, -np.inf)


def index_magnitude(q, k, weights, k_scale=None) -> np.ndarray:
    """Sum of the magnitudes of all products of a score [T, S] float64: what its rounding error scales with."""
    magnitude = index_scores(*(np.abs(np.asarray(x).astype(np.float64)) for x in (q, k, weights)), *all_keys(q, k))
    return magnitude if k_scale is None else magnitude * np.abs(np.asarray(k_scale, np.float64))


def all_keys(q, k) -> tuple[np.ndarray, np.ndarray]:
    """Ranges that show every key to every query row."""
    return np.zeros(len(q), np.int32), np.full(len(q), len(k), np.int32)


def visible(columns: int, key_start, key_end) -> np.ndarray:
    """Which columns are in the range of each row [T, columns] bool."""
    ids = np.arange(columns)
    return (ids >= np.asarray(key_start)[:, None]) & (ids < np.asarray(key_end)[:, None])


def topk(scores, k: int, key_start=None, key_end=None) -> list[list[int]]:
    """Ids of each row relative to `key_start`, best first, by sorting (NaN last, score descending, id ascending)."""
    scores = np.asarray(scores)
    rows, columns = scores.shape
    start = np.zeros(rows, int) if key_start is None else np.clip(np.asarray(key_start, np.int64), 0, columns)
    end = np.full(rows, columns) if key_end is None else np.clip(np.asarray(key_end, np.int64), 0, columns)
    out = []
    for row, lo, hi in zip(scores, start, end, strict=True):
        span = row[lo:hi]
        nan = np.isnan(span)
        order = np.lexsort((np.arange(len(span)), np.where(nan, 0.0, -span), nan))
        out.append([int(i) for i in order[:k]])
    return out


def sparse_mla(q, kv, ids, *, scale: float, rank: int, num_valid=None) -> tuple[np.ndarray, np.ndarray]:
    """Attention of each row over its listed rows of `kv`: output [T, H, rank] and natural lse [T, H], float64."""
    q, kv, ids = np.asarray(q).astype(np.float64), np.asarray(kv).astype(np.float64), np.asarray(ids)
    rows, heads, _ = q.shape
    out, lse = np.zeros((rows, heads, rank)), np.full((rows, heads), -np.inf)
    for t in range(rows):
        listed = ids[t] if num_valid is None else ids[t][: max(0, int(num_valid[t]))]
        chosen = kv[[i for i in listed if 0 <= i < len(kv)]]
        if len(chosen) == 0:
            continue
        logits = scale * q[t] @ chosen.T
        top = logits.max(axis=1, keepdims=True)
        p = np.exp(logits - top)
        out[t] = p @ chosen[:, :rank] / p.sum(axis=1, keepdims=True)
        lse[t] = top[:, 0] + np.log(p.sum(axis=1))
    return out, lse


def merge(out, lse) -> tuple[np.ndarray, np.ndarray]:
    """Attention over the union of disjoint parts, from outputs [R, ..., D] and lse [R, ...]."""
    out, lse = np.asarray(out).astype(np.float64), np.asarray(lse).astype(np.float64)
    merged, merged_lse = np.zeros(out.shape[1:]), np.full(lse.shape[1:], -np.inf)
    for where in np.ndindex(*lse.shape[1:]):
        parts = [r for r in range(len(lse)) if np.isfinite(lse[(r, *where)])]
        if parts:
            values = np.array([lse[(r, *where)] for r in parts])
            merged_lse[where] = values.max() + np.log(np.exp(values - values.max()).sum())
            weights = np.exp(values - merged_lse[where])
            merged[where] = sum(w * out[(r, *where)] for r, w in zip(parts, weights, strict=True))
    return merged, merged_lse


def assert_selection(ids, expected: list[list[int]], k: int) -> None:
    """Assert that every row lists exactly the expected ids, each once and in any order, and then -1."""
    ids = np.asarray(ids)
    assert ids.dtype == np.int32
    assert ids.shape == (len(expected), k)
    for t, (row, want) in enumerate(zip(ids, expected, strict=True)):
        valid, pad = row[: len(want)], row[len(want) :]
        assert sorted(valid.tolist()) == sorted(want), f"row {t}"
        assert (pad == -1).all(), f"row {t}: {pad}"


def assert_selection_within(ids, scores, k: int, key_start, key_end, margin) -> None:
    """Assert that every row is a top-k of `scores` [T, S] if each score may be off by `margin` [T, S]."""
    scores, margin, ids = np.asarray(scores), np.asarray(margin), np.asarray(ids)
    for t, (row, lo, hi) in enumerate(zip(ids, np.asarray(key_start), np.asarray(key_end), strict=True)):
        span, slack = scores[t, lo:hi], margin[t, lo:hi]
        chosen = np.zeros(len(span), bool)
        count = min(k, len(span))
        assert (row[count:] == -1).all(), f"row {t}"
        chosen[row[:count]] = True
        assert chosen.sum() == count, f"row {t} repeats an id"
        if count and count < len(span):
            worst = (span + slack)[chosen].min()
            best = (span - slack)[~chosen].max()
            assert worst >= best, f"row {t}: kept {worst}, left {best}"
