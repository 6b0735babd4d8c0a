"""Requests and positions of the rows of a step."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sharding.rows import row_positions, row_requests

VECTORS = pathlib.Path(__file__).parents[1] / "fixtures" / "vectors"
CAUSAL = json.loads((VECTORS / "causal.json").read_text())["cases"]


def starts(query_lens, dtype=np.int64):
    return np.concatenate([[0], np.cumsum(query_lens)]).astype(dtype)


@pytest.mark.parametrize("case", CAUSAL)
@pytest.mark.parametrize("make", [np.asarray, lambda x: jnp.asarray(x, jnp.int32)])
def test_vectors(case, make):
    start = starts(case["query_lens"])
    positions = row_positions(make(case["seq_lens"]), make(start), int(start[-1]))
    assert positions.tolist() == case["positions"]
    assert (positions + 1).tolist() == case["causal_lens"]


def test_requests_without_rows_and_padding():
    start = starts([2, 0, 3, 0])
    assert row_requests(start, 8).tolist() == [0, 0, 2, 2, 2, -1, -1, -1]
    assert row_positions(np.array([5, 9, 3, 1]), start, 8).tolist() == [3, 4, 0, 1, 2, -1, -1, -1]


def test_a_step_without_rows():
    assert row_requests(np.array([0, 0]), 3).tolist() == [-1, -1, -1]
    assert row_positions(np.array([7]), np.array([0, 0]), 3).tolist() == [-1, -1, -1]


def test_the_device_form_equals_the_host_form():
    rng = np.random.default_rng(0)
    for _ in range(5):
        query_lens = rng.integers(0, 5, 6)
        seq_lens = query_lens + rng.integers(0, 50, 6)
        start = starts(query_lens)
        device = jax.jit(row_positions, static_argnums=2)(
            jnp.asarray(seq_lens, jnp.int32), jnp.asarray(start, jnp.int32), 32
        )
        assert device.dtype == jnp.int32
        np.testing.assert_array_equal(device, row_positions(seq_lens, start, 32))
