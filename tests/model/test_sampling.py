"""Sampling against a NumPy oracle of the distributions, row by row and independent of the batch."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsa_jax.sampling import SamplingConfig, request_keys, sample

DRAWS, VOCAB = 4096, 40


def kept(logits, temperature, top_k, top_p):
    """Tokens that may be drawn and their probabilities, in float64; equal logits rank by id."""
    scaled = logits.astype(np.float64) / temperature
    order = np.lexsort((np.arange(len(logits)), -scaled))
    order = order[: top_k or len(order)]
    weights = np.exp(scaled[order] - scaled[order[0]])
    probs = weights / weights.sum()
    if top_p < 1:
        order = order[: 1 + np.sum(np.cumsum(probs) < top_p)]
    weights = weights[: len(order)]
    return order, weights / weights.sum()


def keys_of(count, seed=0):
    return request_keys(jnp.full((count,), seed, jnp.uint32), jnp.arange(count, dtype=jnp.int32))


def random_logits(rows, vocab, seed=0):
    return np.random.default_rng(seed).normal(0, 2, (rows, vocab)).astype(np.float32)


def draws(logits, temperature=1.0, top_k=0, top_p=1.0):
    """Many draws from one row; excluded tokens pad it, so that all tests share one compiled program."""
    padded = np.full((DRAWS, VOCAB), -np.inf, np.float32)
    padded[:, : len(logits)] = logits
    return np.asarray(sample(padded, keys_of(DRAWS), np.float32(temperature), np.int32(top_k), np.float32(top_p)))


# --------------------------------------------------------------------------------------------------------------- greedy


def test_greedy_takes_the_lowest_of_the_best():
    logits = np.array([[0, 3, 3, 1], [-1, -1, -1, -1], [5, 1, 2, 5], [-np.inf, -np.inf, -3, -np.inf]], np.float32)
    for top_k, top_p in ((0, 1.0), (2, 0.5)):
        out = sample(logits, keys_of(4), 0.0, top_k, top_p)
        assert out.dtype == jnp.int32 and out.tolist() == [1, 0, 0, 2]


def test_greedy_rows_among_sampled_ones():
    logits = random_logits(64, 50)
    temperature = np.where(np.arange(64) % 2, 1.0, 0.0).astype(np.float32)
    out = np.asarray(sample(logits, keys_of(64), temperature))
    best = logits.argmax(axis=1)
    assert (out[::2] == best[::2]).all()
    assert (out[1::2] != best[1::2]).any()


# -------------------------------------------------------------------------------------------------------- distributions


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [
        (1.0, 0, 1.0),
        (0.5, 0, 1.0),
        (2.0, 0, 1.0),
        (1.0, 5, 1.0),
        (1.0, 1, 1.0),
        (1.0, 1000, 1.0),
        (1.0, 0, 0.7),
        (1.3, 0, 0.05),
        (1.0, 8, 0.8),
        (0.7, 3, 0.999),
    ],
)
def test_frequencies(temperature, top_k, top_p):
    logits = random_logits(1, VOCAB, seed=3)[0]
    tokens, probs = kept(logits, temperature, top_k, top_p)
    counts = np.bincount(draws(logits, temperature, top_k, top_p), minlength=VOCAB)
    assert counts.sum() == counts[tokens].sum() == DRAWS
    # Five standard deviations of each count, and every token that should come 20 times does come.
    deviation = np.abs(counts[tokens] - DRAWS * probs)
    assert (deviation <= 5 * np.sqrt(DRAWS * probs * (1 - probs)) + 1).all()
    assert (counts[tokens][DRAWS * probs > 20] > 0).all()


def test_each_row_has_its_own_parameters():
    """Exact: the token is the best of logit / temperature plus the key's own noise, among those kept."""
    rows, vocab = 96, 200
    logits = random_logits(rows, vocab, seed=4)
    pick = np.random.default_rng(5)
    temperature = pick.choice([0.3, 0.8, 1.0, 1.7], rows).astype(np.float32)
    top_k = pick.choice([0, 1, 2, 17, 199, 200, 5000], rows).astype(np.int32)
    top_p = pick.choice([0.01, 0.33, 0.9, 1.0], rows).astype(np.float32)
    keys = keys_of(rows, seed=9)
    out = np.asarray(sample(logits, keys, temperature, top_k, top_p))
    noise = np.asarray(jax.vmap(lambda key: jax.random.gumbel(key, (vocab,), jnp.float32))(keys))
    for row in range(rows):
        tokens, _ = kept(logits[row], temperature[row], top_k[row], top_p[row])
        value = logits[row, tokens].astype(np.float64) / temperature[row] + noise[row, tokens]
        assert out[row] == tokens[value.argmax()], (row, temperature[row], top_k[row], top_p[row])


def test_nucleus_is_the_smallest_set_that_reaches_the_mass():
    logits = np.log(np.array([0.125, 0.5, 0.25, 0.125], np.float32))
    sets = {0.01: {1}, 0.49: {1}, 0.51: {1, 2}, 0.74: {1, 2}, 0.76: {0, 1, 2}, 0.9: {0, 1, 2, 3}}
    for top_p, expected in sets.items():
        assert set(draws(logits, top_p=top_p).tolist()) == expected, top_p


def test_ties_at_the_edge_keep_the_lower_ids():
    logits = np.array([1, 2, 1, 1, 2, 1], np.float32)
    for top_k, expected in ((1, {1}), (2, {1, 4}), (3, {0, 1, 4}), (4, {0, 1, 2, 4})):
        assert set(draws(logits, top_k=top_k).tolist()) == expected, top_k
    assert set(draws(np.zeros(10), top_p=0.35).tolist()) == {0, 1, 2, 3}
    equal = np.zeros((64, 5000), np.float32)
    assert np.asarray(sample(equal, keys_of(64), 1.0, top_k=50)).max() < 50


def test_top_p_works_on_what_top_k_leaves():
    # Of all tokens the best has 0.4 < 0.6; of the best two it has 0.4 / 0.6 > 0.6.
    logits = np.log(np.array([0.4, 0.2, 0.2, 0.1, 0.1], np.float32))
    assert set(draws(logits, top_k=2, top_p=0.6).tolist()) == {0}


def test_excluded_tokens_never_come():
    logits = np.full(VOCAB, -np.inf, np.float32)
    logits[[3, 11]] = 0
    for top_k, top_p in ((0, 1.0), (5, 1.0), (0, 0.99)):
        assert set(draws(logits, 5.0, top_k, top_p).tolist()) == {3, 11}


@pytest.mark.parametrize("temperature", [1e-37, 1e-6])
def test_tiny_temperature_is_greedy(temperature):
    logits = random_logits(1, VOCAB)[0] * 1e3
    assert set(draws(logits, temperature).tolist()) == {logits.argmax()}


# ------------------------------------------------------------------------------------------------ seeds and batch mates


def test_result_does_not_depend_on_batch_mates():
    rows, vocab = 12, 300
    logits = random_logits(rows, vocab, seed=6)
    seeds = jnp.arange(rows, dtype=jnp.uint32) * 7
    steps = jnp.arange(rows, dtype=jnp.int32) % 5
    temperature = np.linspace(0.5, 1.5, rows).astype(np.float32)
    # The first half needs no sort, so alone it takes another path than in the batch.
    top_k = np.where(np.arange(rows) < 6, 0, 30).astype(np.int32)
    top_p = np.where(np.arange(rows) < 9, 1.0, 0.8).astype(np.float32)

    def run(some):
        some = np.asarray(some)
        keys = request_keys(seeds[some], steps[some])
        return sample(logits[some], keys, temperature[some], top_k[some], top_p[some]).tolist()

    together = run(range(rows))
    assert [run([row])[0] for row in range(rows)] == together
    assert run(range(rows - 1, -1, -1)) == together[::-1]
    assert run(range(6)) == together[:6]


def test_seed_and_step_decide():
    logits = np.zeros((64, 10000), np.float32)

    def run(seed, first=0):
        steps = jnp.arange(first, first + 64, dtype=jnp.int32)
        return sample(logits, request_keys(jnp.full((64,), seed, jnp.uint32), steps), 1.0).tolist()

    assert run(1) == run(1)
    assert run(1)[32:] == run(1, first=32)[:32]
    assert sum(a == b for a, b in zip(run(1), run(2), strict=True)) < 4
    assert len(set(run(1))) > 60
    assert run(2**32 - 1) != run(0)


def test_seed_does_not_follow_the_default_generator():
    expected = jax.random.fold_in(jax.random.key(5, impl="threefry2x32"), 2)
    with jax.default_prng_impl("rbg"):
        keys = request_keys(jnp.array([1, 2, 5], jnp.uint32), jnp.array([0, 1, 2], jnp.int32))
    assert jax.random.key_data(keys)[2].tolist() == jax.random.key_data(expected).tolist()


def test_inside_another_jit():
    logits, keys = random_logits(4, 30), keys_of(4)
    step = jax.jit(lambda x, k, t: sample(x, k, t, top_k=3))
    assert step(logits, keys, 0.9).tolist() == sample(logits, keys, 0.9, 3).tolist()


# ------------------------------------------------------------------------------------------------------- bad arguments


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits": np.zeros((3,), np.float32)}, r"logits must have shape \[R, V\], got \[3\]"),
        ({"logits": jnp.zeros((3, 4), jnp.bfloat16)}, "logits must have dtype float32, got bfloat16"),
        ({"keys": np.zeros((3, 2), np.uint32)}, "keys must be typed keys"),
        ({"keys": keys_of(2)}, r"keys must have shape \[3\], got \[2\]"),
        ({"temperature": np.ones((2,), np.float32)}, r"temperature must be a scalar or have shape \[3\], got \[2\]"),
        ({"top_k": np.ones((3, 1), np.int32)}, r"top_k must be a scalar or have shape \[3\], got \[3, 1\]"),
        ({"top_k": 2.0}, "top_k must be of an integer dtype, got float32"),
        ({"top_p": np.ones((4,), np.float32)}, r"top_p must be a scalar or have shape \[3\], got \[4\]"),
    ],
)
def test_bad_arguments(changes, message):
    arguments = {"logits": np.zeros((3, 4), np.float32), "keys": keys_of(3), "temperature": 1.0} | changes
    with pytest.raises(ValueError, match=message):
        sample(**arguments)


def test_bad_keys():
    with pytest.raises(ValueError, match="seeds must have dtype uint32, got int32"):
        request_keys(jnp.zeros((2,), jnp.int32), jnp.zeros((2,), jnp.int32))
    with pytest.raises(ValueError, match=r"steps must have shape \[2\], got \[3\]"):
        request_keys(jnp.zeros((2,), jnp.uint32), jnp.zeros((3,), jnp.int32))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", 1e39),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", float("nan")),
        ("top_k", -1),
        ("top_k", 1.5),
        ("seed", -1),
        ("seed", 2**32),
        ("seed", True),
    ],
)
def test_bad_config(name, value):
    with pytest.raises(ValueError, match=rf"{name} must be .*got {re.escape(str(value))}"):
        SamplingConfig(**{name: value})


def test_config():
    config = SamplingConfig(temperature=0.7, top_k=40, top_p=0.9, seed=2**32 - 1)
    assert dataclasses.replace(config, top_p=1.0).top_p == 1.0
    assert SamplingConfig() == SamplingConfig(temperature=0.0, top_k=0, top_p=1.0, seed=0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1  # type: ignore[misc]
