"""Pooled index keys: which tokens make a pool, what a row selects, and where a ragged step finds them."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsa_jax.batch import Request, build_step
from dsa_jax.cache import CacheGeometry
from dsa_jax.layers.kpool import expand_pools, hadamard, pool_keys
from dsa_jax.layers.mhc import ROUNDS_IN_KERNEL, doubly_stochastic, sinkhorn_rounds
from dsa_jax.layers.mlp import swiglu
from dsa_jax.layers.ragged import pool_rows, state_rows
from pallas_kernels.ckv_records import ckv_format, index_key_format
from tests.support import FIXTURES

P = 4
CASES = json.loads((FIXTURES / "vectors" / "kpool.json").read_text())["cases"]


def expanded(pools, visible, width=None):
    """Live ids of one row."""
    row = [*pools, *[-1] * ((width or len(pools)) - len(pools))]
    return np.asarray(expand_pools(jnp.array([row], jnp.int32), jnp.array([visible], jnp.int32), P))[0].tolist()


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["position"]))
def test_complete_pools_and_tail(case):
    """The tail is always there, right behind the pools; dropping its newest token would change the list."""
    t = case["position"]
    pools = list(range(case["complete_pools"]))[::-1]
    assert (t + 1) // P == len(pools)
    want = [P * pool + i for pool in pools for i in range(P)] + case["tail"]
    got = expanded(pools, t + 1, width=8)
    assert got == want + [-1] * (8 * P + P - 1 - len(want))
    # With fewer pools kept than there are, the budget bounds the pools and the tail comes on top.
    if len(pools) > 2:
        got = expanded(pools[:2], t + 1)
        assert len(got) == 11 and [x for x in got if x >= 0] == want[: 2 * P] + case["tail"]


def test_published_width():
    """512 pools and 3 tokens are 2051 columns, the last of them in use."""
    row = expanded(range(512), 4 * 700 + 3)
    assert len(row) == 2051 and row[2048:] == [2800, 2801, 2802]


def test_rows_keep_their_own_history():
    """Two rows of different lengths and pools differ."""
    got = np.asarray(expand_pools(jnp.array([[1, -1], [0, 2]], jnp.int32), jnp.array([9, 12], jnp.int32), P))
    np.testing.assert_array_equal(got, [[4, 5, 6, 7, 8, *[-1] * 6], [0, 1, 2, 3, 8, 9, 10, 11, *[-1] * 3]])


def test_pool_keys():
    """A softmax of each channel over the pool's tokens, in float32 whatever the dtype; large gates stay finite."""
    rng = np.random.default_rng(0)
    k, gate = rng.standard_normal((2, 5, P, 8))
    bias = rng.standard_normal((P, 8))
    gate[0] *= 1e4
    logits = gate + bias
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    want = (weights / weights.sum(axis=1, keepdims=True) * k).sum(axis=1)
    got = pool_keys(*(jnp.asarray(x, jnp.float32) for x in (k, gate, bias)))
    np.testing.assert_allclose(got[1:], want[1:], rtol=0, atol=1e-5)
    # Sums of large gates and small biases are rounded; the weights are 0 and 1 but for that.
    np.testing.assert_allclose(got[0], want[0], rtol=0, atol=1e-2)
    assert (
        pool_keys(jnp.asarray(k, jnp.bfloat16), jnp.asarray(gate, jnp.bfloat16), jnp.asarray(bias)).dtype == "bfloat16"
    )


def test_hadamard_keeps_products():
    """A rotation: products of rotated vectors are those of the vectors; other widths are refused."""
    a, b = np.random.default_rng(1).standard_normal((2, 3, 128)).astype(np.float32)
    np.testing.assert_allclose(
        np.sum(hadamard(jnp.asarray(a)) * hadamard(jnp.asarray(b)), -1), np.sum(a * b, -1), atol=1e-4
    )
    with pytest.raises(ValueError, match="got 24"):
        hadamard(jnp.zeros((1, 24)))


def random_step(seed):
    """Lengths of a ragged step: fresh requests, ones that go on inside a pool, ones without rows, and padding."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 11, 5) if seed else np.array([0, 1, 3, 8, 1])
    before = np.where(rng.random(5) < 0.3, 0, rng.integers(0, 14, 5))
    start = np.concatenate([[0], np.cumsum(rows)]).astype(np.int32)
    return start, (before + rows).astype(np.int32), before, 64


def buffer(start, before, kept, total, last):
    """(request, position) of each entry of the buffer: the step's rows, then what the cache keeps of each request."""
    entries = [None] * total
    for r, first in enumerate(before):
        for i in range(start[r + 1] - start[r]):
            entries[start[r] + i] = (r, first + i)
    for r, first in enumerate(before):
        for i in range(kept):
            position = first - kept + i if last else first // P * P + i
            entries.append((r, position) if 0 <= position < first else None)
    return entries


@pytest.mark.parametrize("seed", range(6))
def test_pools_of_a_ragged_step(seed):
    """Members of every pool that the step completes, of the right request, and the tokens of the open ones."""
    start, after, before, total = random_step(seed)
    got = jax.tree.map(np.asarray, pool_rows(jnp.asarray(start), jnp.asarray(after), rows=total, kpool=P))
    entries = buffer(start, before, P - 1, total, last=False)
    found = {}
    for request, pool, members in zip(got.requests, got.pools, got.members, strict=True):
        if pool >= 0:
            found[int(request), int(pool)] = [entries[m] for m in members]
    wanted = {
        (r, pool): [(r, P * pool + i) for i in range(P)]
        for r in range(5)
        for pool in range(before[r] // P, after[r] // P)
    }
    assert found == wanted
    for r in range(5):
        opened = [entries[i] for i in got.open[r]][: after[r] % P]
        assert opened == [(r, after[r] // P * P + i) for i in range(after[r] % P)]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("block", [4, 64])
def test_blocks_of_a_ragged_step(seed, block):
    """Every row is in one block of its request, in order; its neighbours before it may be in the cache."""
    start, after, before, total = random_step(seed)
    rows = after - before
    single = bool(rows.max() <= 1)
    got = state_rows(jnp.asarray(start), jnp.asarray(after), rows=total, taps=4, single=single, block=block)
    got = jax.tree.map(np.asarray, got)
    entries = buffer(start, before, 3, total, last=True)
    np.testing.assert_array_equal(got.fresh, before == 0)
    for r in range(5):
        mine = got.blocks[got.sequence == r].ravel()
        assert mine[mine >= 0].tolist() == list(range(start[r], start[r + 1]))
        want = [(r, p) if p >= 0 else None for p in range(after[r] - 3, after[r])]
        assert [entries[i] for i in got.tail[r]] == want
        for row in range(start[r], start[r + 1]):
            position = before[r] + row - start[r]
            want = [(r, position - d) if position >= d else None for d in range(4)]
            assert [entries[i] for i in got.taps[row]] == want
            assert got.blocks.ravel()[got.place[row]] == row
    assert (got.sequence[np.cumsum(got.sequence == -1) > 0] == -1).all() or single


def test_doubly_stochastic():
    """Columns sum to 1 and rows nearly, for large logits too."""
    logits = jnp.asarray(np.random.default_rng(2).normal(0, 3, (6, 4, 4)), jnp.float32)
    got = np.asarray(doubly_stochastic(logits, iterations=20, eps=1e-6), np.float64)
    np.testing.assert_allclose(got.sum(axis=-2), 1, atol=1e-5)
    np.testing.assert_allclose(got.sum(axis=-1), 1, atol=0.1)
    assert (got > 0).all()


def test_rounds_of_one_kernel_are_the_rounds_of_a_loop():
    """However many rounds make one expression, and against NumPy in float64."""
    logits = np.random.default_rng(3).normal(0, 2, (5, 4, 4))
    matrix = np.exp(logits)
    matrix = matrix / matrix.sum(-1, keepdims=True) + 1e-6
    matrix = matrix / (matrix.sum(-2, keepdims=True) + 1e-6)
    entries = [[jnp.asarray(matrix[:, i, j], jnp.float32) for j in range(4)] for i in range(4)]
    for _ in range(19):
        matrix = matrix / (matrix.sum(-1, keepdims=True) + 1e-6)
        matrix = matrix / (matrix.sum(-2, keepdims=True) + 1e-6)
    for at_once in (1, ROUNDS_IN_KERNEL):
        got = np.array(sinkhorn_rounds(entries, rounds=19, eps=1e-6, at_once=at_once))
        np.testing.assert_allclose(np.moveaxis(got, 2, 0), matrix, rtol=0, atol=1e-6)
    got = doubly_stochastic(jnp.asarray(logits, jnp.float32), iterations=20, eps=1e-6)
    np.testing.assert_allclose(got, matrix, rtol=0, atol=1e-6)


def test_clamped_swiglu():
    """The gate is bounded from above alone, the other factor both ways."""
    gate, up = jnp.array([-20.0, 3.0, 20.0]), jnp.array([20.0, -20.0, 3.0])
    want = np.array([-20 / (1 + np.exp(20.0)) * 10, 3 / (1 + np.exp(-3.0)) * -10, 10 / (1 + np.exp(-10.0)) * 3])
    np.testing.assert_allclose(swiglu(gate, up, 10.0), want, rtol=1e-5)
    np.testing.assert_allclose(swiglu(gate, up, None)[2], 60, rtol=1e-5)


@pytest.mark.parametrize(("dcp", "interleave"), [(1, 1), (4, 4), (4, 16)])
def test_workspace_counts_pools(dcp, interleave):
    """The buffer of index keys has a row for every pool of a rank, not for every token (vLLM #55222)."""
    geometry = CacheGeometry(
        ckv_format("bf16", kv_lora_rank=512, qk_rope_head_dim=0, model_dtype=jnp.bfloat16),
        index_key_format("fp8", index_head_dim=128, model_dtype=jnp.bfloat16),
        dcp=dcp,
        interleave=interleave,
        kpool=P,
    )
    pages = 1 << 14 >> 6
    step = build_step([Request(np.zeros(1 << 14, np.int64), np.arange(pages))], geometry, groups=1, chunk_size=1 << 14)
    assert step is not None
    assert (step.ckv_rows, step.index_rows) == ((1 << 14) // dcp, (1 << 12) // dcp)
