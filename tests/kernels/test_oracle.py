"""The oracles themselves, on cases small enough to work out by hand, and that the comparisons can fail."""

import numpy as np
import pytest

from tests.kernels import oracle


def test_scores_by_hand():
    q = np.float32([[[1, 0], [0, 2]]])  # two heads
    k = np.float32([[3, -1], [-1, 4], [1, 1]])
    scores = oracle.index_scores(q, k, np.float32([[0.5, -1]]), [0], [2], np.float32([1, 2, 1]))
    np.testing.assert_array_equal(scores, [[1.5, -16.0, -np.inf]])


def test_topk_by_hand():
    nan, inf = np.nan, np.inf
    row = np.float32([[nan, 2, -0.0, 0.0, inf, -inf, 2, nan]])
    assert oracle.topk(row, 8) == [[4, 1, 6, 2, 3, 5, 0, 7]]
    assert oracle.topk(row, 3, [1], [4]) == [[0, 1, 2]]
    assert oracle.topk(row, 3, [7], [99]) == [[0]]
    assert oracle.topk(row, 3, [5], [2]) == [[]]


def test_attention_by_hand():
    kv = np.float64([[0.0, 1.0], [np.log(3), 5.0]])
    out, lse = oracle.sparse_mla(np.float64([[[1.0, 0.0]]]), kv, [[1, -1, 0, 7]], scale=1.0, rank=2)
    np.testing.assert_allclose(out, [[[np.log(3) * 0.75, 4.0]]])
    np.testing.assert_allclose(lse, [[np.log(4)]])
    out, lse = oracle.sparse_mla(np.ones((1, 1, 2)), kv, [[-1, 2]], scale=1.0, rank=1)
    assert (out == 0).all()
    assert (lse == -np.inf).all()


def test_merge_by_hand():
    out, lse = oracle.merge([[[1.0]], [[5.0]], [[np.nan]]], [[np.log(3)], [0.0], [np.nan]])
    np.testing.assert_allclose(out, [[2.0]])
    np.testing.assert_allclose(lse, [np.log(4)])


@pytest.mark.parametrize(
    "ids",
    [
        [[1, 2, -1, -1]],  # one missing
        [[1, 2, 2, -1]],  # twice
        [[1, 2, 4, -1]],  # another
        [[1, 2, 3, 4]],  # too many
        [[1, 2, -1, 3]],  # a gap
        [[1, 2, 3]],  # too narrow
    ],
)
def test_selection_comparison_can_fail(ids):
    oracle.assert_selection(np.int32([[3, 1, 2, -1]]), [[1, 2, 3]], 4)
    with pytest.raises(AssertionError):
        oracle.assert_selection(np.int32(ids), [[1, 2, 3]], 4)


def test_comparison_within_a_margin_can_fail():
    scores, margin = np.array([[5.0, 4.0, 3.9, 1.0, 9.0]]), np.full((1, 5), 0.06)
    for ids in ([[0, 1]], [[2, 0]]):
        oracle.assert_selection_within(np.int32(ids), scores, 2, [0], [4], margin)
    for ids in ([[0, 3]], [[0, 0]], [[0, -1]], [[1, 2]]):
        with pytest.raises(AssertionError):
            oracle.assert_selection_within(np.int32(ids), scores, 2, [0], [4], margin)
