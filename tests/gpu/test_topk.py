"""The top-k on a real GPU against a stable sort: sets and order of every kind of row, twice the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch
from pallas_kernels.topk import mosaic_hopper, topk
from pallas_kernels.topk.arg_specs import KINDS, expected_ids, score_row

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        dispatch.needs_compute_capability(9)() is not None, reason="the kernel needs a GPU of compute capability 9"
    ),
]


def check(scores, k, start, end, **options):
    """Compare ids and scores of every row, and a second call bit for bit."""
    arguments = jnp.asarray(scores), k, jnp.asarray(start, jnp.int32), jnp.asarray(end, jnp.int32)
    ids, best = map(np.asarray, topk(*arguments, return_scores=True, implementation="mosaic_hopper", **options))
    again = np.asarray(topk(*arguments, implementation="mosaic_hopper", **options))
    np.testing.assert_array_equal(ids, again)
    for r, (first, last) in enumerate(zip(start, end, strict=True)):
        want = expected_ids(scores[r], k, first, last)
        np.testing.assert_array_equal(ids[r], want, err_msg=f"row {r}")
        found = want[want >= 0]
        np.testing.assert_array_equal(best[r, : found.size], scores[r][found + first])
        assert np.all(best[r, found.size :] == -np.inf)


@pytest.mark.parametrize("k", [1, 64, 2048])
@pytest.mark.parametrize("columns", [131072, 40001, 9000])
def test_every_kind_of_row(columns, k):
    rng = np.random.default_rng([columns, k])
    scores = np.stack([score_row(rng, kind, columns) for kind in KINDS for _ in range(9)])  # more rows than SMs
    check(scores, k, np.zeros(len(scores), int), np.full(len(scores), columns))


@pytest.mark.parametrize("kind", KINDS)
def test_few_long_rows(kind):
    rng = np.random.default_rng(1)
    scores = np.stack([score_row(rng, kind, 1 << 20) for _ in range(2)])
    check(scores, 2048, [0, 12345], [1 << 20, (1 << 20) - 1])


def test_lengths_and_ranges():
    rng = np.random.default_rng(2)
    lengths = [0, 1, 2047, 2048, 2049, 2051, 8191, 8192, 8193, 10240, 10241, 16385, -7, 60000] * 12
    start = rng.integers(0, 30000, len(lengths))
    scores = np.stack([score_row(rng, "ties", 100003) for _ in lengths])
    check(scores, 2048, start, start + np.asarray(lengths))


def test_causal_rows_over_garbage():
    rng = np.random.default_rng(3)
    columns = 20000
    end = np.arange(1000, 1000 + 300 * 50, 50)
    scores = rng.standard_normal((300, columns)).astype(np.float32)
    scores[np.arange(columns)[None, :] >= end[:, None]] = np.nan
    scores[::2][np.arange(columns)[None, :] >= end[::2, None]] = np.inf
    check(scores, 2048, np.zeros(300, int), end)


def test_more_than_two_to_the_31_elements():
    rows, columns = 2304, 1 << 20
    scores = jax.jit(lambda: jax.random.normal(jax.random.key(0), (rows, columns)))()
    ids = np.asarray(topk(scores, 2048, implementation="mosaic_hopper"))
    for row in (0, 2047, 2048, rows - 1):
        np.testing.assert_array_equal(ids[row], expected_ids(np.asarray(scores[row]), 2048, 0, columns))


def test_gate_too_high_and_no_gate():
    rng = np.random.default_rng(4)
    scores = np.stack([score_row(rng, kind, 60000) for kind in KINDS])
    bounds = jnp.zeros(len(scores), jnp.int32), jnp.full(len(scores), 60000, jnp.int32)
    want = np.stack([expected_ids(row, 2048, 0, 60000) for row in scores])
    for change in ({"target_share": 1e-6}, {"sample_vectors": 0}, {"places": 2}, {"warpgroups": 2}):
        config = mosaic_hopper.TopkConfig(**change, blocks=8)
        ids = mosaic_hopper.topk(jnp.asarray(scores), 2048, *bounds, config=config)
        np.testing.assert_array_equal(ids, want, err_msg=str(change))


def test_inside_shard_map():
    mesh = jax.sharding.Mesh(jax.devices(), ("x",))
    rows = jax.sharding.PartitionSpec("x")
    scores = np.random.default_rng(5).standard_normal((8 * len(jax.devices()), 20000)).astype(np.float32)
    call = jax.shard_map(
        lambda x: topk(x, 100, implementation="mosaic_hopper"),
        mesh=mesh,
        in_specs=rows,
        out_specs=rows,
        check_vma=False,
    )
    np.testing.assert_array_equal(call(scores), [expected_ids(row, 100, 0, 20000) for row in scores])
