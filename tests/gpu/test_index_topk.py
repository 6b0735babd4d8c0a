"""The whole index_topk on a real GPU: exactly the best of the scores that the indexer's kernel gives."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch
from pallas_kernels.index_topk import index_topk, mosaic_hopper
from pallas_kernels.lightning_indexer import lightning_indexer
from pallas_kernels.topk.arg_specs import expected_ids

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        dispatch.needs_compute_capability(9)() is not None, reason="the kernels need a GPU of compute capability 9"
    ),
]


def check(rows, keys, heads, dtype, top_k, start, end, *, workspace_bytes=1 << 30, relu_zeros=False):
    """Compare ids and scores with a stable sort of the scores of all rows at once, and a second call."""
    rng = np.random.default_rng([rows, keys])
    q = rng.standard_normal((rows, heads, 128)).astype(np.float32)
    if relu_zeros:
        q = -np.abs(q)  # with positive keys most products vanish, and the weights' signs make -0.0
    k = rng.standard_normal((keys, 128)).astype(np.float32)
    k = np.where(rng.random((keys, 1)) < 0.98, np.abs(k), k) if relu_zeros else k
    arguments = [
        jnp.asarray(q, dtype),
        jnp.asarray(k, dtype),
        jnp.asarray(rng.standard_normal((rows, heads)), jnp.float32),
        jnp.asarray(start, jnp.int32),
        jnp.asarray(end, jnp.int32),
    ]
    scale = jnp.asarray(rng.uniform(0.5, 1.5, keys), jnp.float32)
    options = {"k_scale": scale, "implementation": "mosaic_hopper"}
    scores = np.asarray(lightning_indexer(*arguments, **options))
    tiled = {**options, "return_scores": True, "workspace_bytes": workspace_bytes}
    ids, best = map(np.asarray, index_topk(*arguments, top_k, **tiled))
    np.testing.assert_array_equal(ids, np.asarray(index_topk(*arguments, top_k, **tiled)[0]))
    for r in range(rows):
        want = expected_ids(scores[r], top_k, start[r], end[r])
        np.testing.assert_array_equal(ids[r], want, err_msg=f"row {r}")
        found = want[want >= 0]
        np.testing.assert_array_equal(best[r, : found.size], scores[r][found + start[r]])


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.bfloat16])
@pytest.mark.parametrize("keys", [65536, 50001])
@pytest.mark.parametrize("block_max_from", [0, 1 << 30])
def test_whole_rows(monkeypatch, dtype, keys, block_max_from):
    monkeypatch.setattr(mosaic_hopper, "BLOCK_MAX_FROM", block_max_from)
    check(200, keys, 32, dtype, 2048, [0] * 200, [keys] * 200)


@pytest.mark.parametrize("block_max_from", [0, 1 << 30])
def test_tiles_of_rows_and_ranges(monkeypatch, block_max_from):
    monkeypatch.setattr(mosaic_hopper, "BLOCK_MAX_FROM", block_max_from)
    rng = np.random.default_rng(0)
    start = rng.integers(0, 1000, 300)
    end = start + rng.integers(0, 40000, 300)
    end[:5] = np.add(start[:5], [0, 1, 2047, 2048, 2049])
    check(300, 41000, 64, jnp.float8_e4m3fn, 2048, start, end, workspace_bytes=100 * 41000 * 5)


@pytest.mark.parametrize("block_max_from", [0, 1 << 30])
def test_mostly_zero_scores(monkeypatch, block_max_from):
    monkeypatch.setattr(mosaic_hopper, "BLOCK_MAX_FROM", block_max_from)
    check(150, 65536, 32, jnp.float8_e4m3fn, 2048, [0] * 150, [65536] * 150, relu_zeros=True)
