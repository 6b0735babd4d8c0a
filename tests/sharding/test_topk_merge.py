"""Merging candidates of several ranks: the set that one device would select."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sharding.topk_merge import merge_candidates, pack, unpack

merge = jax.jit(merge_candidates, static_argnames="k")


def best(scores, k):
    """Ids of the k best of one row by (score descending, id ascending), NaN last."""
    order = sorted(range(len(scores)), key=lambda j: (np.isnan(scores[j]), -np.nan_to_num(scores[j], nan=0.0), j))
    return set(order[:k])


def candidates(rng, rows, keys, ranks, k, draw):
    """Scores of all keys, and of each rank's k best in any order with -1 behind them."""
    scores = draw((rows, keys)).astype(np.float32)
    ids = np.full((rows, ranks, k), -1, np.int32)
    values = rng.standard_normal((rows, ranks, k)).astype(np.float32)  # junk where there is no id
    for t in range(rows):
        for rank in range(ranks):
            mine = np.arange(rank, keys, ranks)
            chosen = mine[list(best(scores[t, mine], k))]
            ids[t, rank, : len(chosen)] = rng.permutation(chosen)
            values[t, rank, : len(chosen)] = scores[t, ids[t, rank, : len(chosen)]]
    return scores, jnp.asarray(ids.reshape(rows, -1)), jnp.asarray(values.reshape(rows, -1))


DRAWS = {
    "distinct": lambda rng: lambda shape: rng.standard_normal(shape),
    "ties": lambda rng: lambda shape: rng.integers(-2, 3, shape),
    "all equal": lambda rng: lambda shape: np.ones(shape),
    "zeros of both signs": lambda rng: lambda shape: rng.choice([0.0, -0.0], shape),
    "nan and infinities": lambda rng: lambda shape: rng.choice([np.nan, np.inf, -np.inf, -70000.0, 1e-42], shape),
    "all nan": lambda rng: lambda shape: np.full(shape, np.nan),
}


@pytest.mark.parametrize("name", DRAWS)
def test_equals_one_device(name):
    rng = np.random.default_rng(4)
    for ranks in (1, 4):
        scores, ids, values = candidates(rng, 6, 61, ranks, 8, DRAWS[name](rng))
        merged = np.asarray(merge(ids, values, jnp.full(6, 61, jnp.int32), k=8))
        for t in range(6):
            assert set(merged[t].tolist()) == best(scores[t], 8)


def test_short_rows_take_all_they_see():
    rng = np.random.default_rng(5)
    for keys in (0, 1, 3, 8):
        _, ids, values = candidates(rng, 2, keys, 4, 8, rng.standard_normal)
        merged = np.asarray(merge(ids, values, jnp.full(2, keys, jnp.int32), k=8))
        assert merged.tolist() == [[*range(keys), *[-1] * (8 - keys)]] * 2


def test_ids_beyond_the_integers_of_float32_stay_exact():
    # All tie at 2**24 and above, where neighbouring ids round to one float.
    ids = np.array([[2**30 + 5, 2**24 + 3, 2**24 + 1, 2**24 + 2, 7, 0]], np.int32)
    merged = merge(jnp.asarray(ids), jnp.ones((1, 6)), jnp.array([2**30 + 6], jnp.int32), k=4)
    assert set(np.asarray(merged)[0].tolist()) == {0, 7, 2**24 + 1, 2**24 + 2}


def test_packing_keeps_every_bit():
    ids = jnp.array([[2**24 + 1, -1], [3, 2**30]], jnp.int32)
    scores = jnp.array([[-0.0, jnp.nan], [1e-42, -jnp.inf]], jnp.float32)
    packed = pack(ids, scores)
    assert packed.dtype == jnp.int32
    back_ids, back_scores = unpack(jnp.stack([packed, packed]))
    np.testing.assert_array_equal(back_ids, np.tile(ids, (1, 2)))
    np.testing.assert_array_equal(
        np.asarray(back_scores).view(np.int32), np.tile(np.asarray(scores).view(np.int32), (1, 2))
    )
