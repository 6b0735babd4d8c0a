"""The reference of the exact top-k against its contract, and what the operation refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.topk import topk
from pallas_kernels.topk.reference import sortable_key
from tests.kernels.base_topk import SPECIAL, TopkCases


class TestReference(TopkCases):
    implementation = "reference"
    test_offsets_above_eight_gigabytes = None  # sorts, in several times the memory


@pytest.mark.gpu
class TestReferenceOnGpu(TestReference):
    """The same on the device that the kernels are for."""


def test_numpy_integers_and_arrays_are_accepted():
    scores = np.arange(6, dtype=np.float32)[None]
    ids = topk(scores, np.int64(2), np.zeros(1, np.int32), np.full(1, 6, np.int32))
    assert isinstance(ids, jax.Array)
    assert set(np.asarray(ids)[0].tolist()) == {4, 5}


def test_keys_sort_as_scores_do():
    scores = np.float32(SPECIAL)
    keys = np.asarray(jax.jit(sortable_key)(scores))
    for a, key_a in zip(scores, keys, strict=True):
        for b, key_b in zip(scores, keys, strict=True):
            if np.isnan(a) or np.isnan(b):
                assert (key_a < key_b) == (np.isnan(a) and not np.isnan(b))
            else:
                assert (key_a < key_b) == (a < b)
                assert (key_a == key_b) == (a == b)


SCORES = np.zeros((2, 9), np.float32)
ROWS = np.zeros(2, np.int32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(scores=[[1.0, 2.0]]), "topk: scores must be an array, got list"),
        (dict(scores=SCORES[0]), r"topk: scores must have shape \[T, S\], got \[9\]"),
        (dict(scores=SCORES.astype(jnp.bfloat16)), "topk: scores must have dtype float32, got bfloat16"),
        (dict(scores=SCORES.astype(np.float64)), "topk: scores must have dtype float32, got float64"),
        (dict(scores=SCORES.astype(np.int32)), "topk: scores must have dtype float32, got int32"),
        (dict(k=0), "topk: k must be a positive int, got 0"),
        (dict(k=-1), "topk: k must be a positive int, got -1"),
        (dict(k=2.0), "topk: k must be a positive int, got 2.0"),
        (dict(k=np.float32(2)), "topk: k must be a positive int, got np.float32"),
        (dict(k=True), "topk: k must be a positive int, got True"),
        (dict(k=None), "topk: k must be a positive int, got None"),
        (dict(k=jnp.int32(3)), "topk: k must be a positive int, got Array"),
        (dict(key_start=0), "topk: key_start must be an array, got int"),
        (dict(key_start=ROWS.astype(np.int64)), "topk: key_start must have dtype int32, got int64"),
        (dict(key_start=np.zeros(3, np.int32)), r"topk: key_start must have shape \[2\], got \[3\]"),
        (dict(key_end=ROWS[:, None]), r"topk: key_end must have shape \[2\], got \[2, 1\]"),
        (dict(key_end=ROWS.astype(np.float32)), "topk: key_end must have dtype int32, got float32"),
        (dict(implementation="cuda"), r"topk: implementation='cuda' is not one of \["),
        (dict(implementation=""), r"topk: implementation='' is not one of \["),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    call = dict(scores=SCORES, k=3) | arguments
    with pytest.raises(ValueError, match=message):
        topk(**call)


def test_traced_k_is_refused_with_a_way_out():
    with pytest.raises(ValueError, match=r"topk: k must be static, got the traced value .*static_argnames"):
        jax.jit(topk)(SCORES, 3)
