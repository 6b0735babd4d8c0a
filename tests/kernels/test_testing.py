"""The generators of ids for tests and benchmarks make what the benchmarks claim."""

import numpy as np
import pytest

from pallas_kernels.testing import random_ids, shared_ids, window_ids


def distinct(ids) -> bool:
    ordered = np.sort(ids, axis=1)
    return bool((ordered[:, 1:] != ordered[:, :-1]).all())


@pytest.mark.parametrize("make", [random_ids, window_ids, shared_ids])
def test_ids_are_distinct_in_range_and_reproducible(make):
    ids = make(np.random.default_rng(0), 40, 16384, 2048)
    assert ids.shape == (40, 2048)
    assert ids.dtype == np.int32
    assert ids.min() >= 0
    assert ids.max() < 16384
    assert distinct(ids)
    np.testing.assert_array_equal(ids, make(np.random.default_rng(0), 40, 16384, 2048))
    assert (ids != make(np.random.default_rng(1), 40, 16384, 2048)).any()


@pytest.mark.parametrize("make", [random_ids, window_ids, shared_ids])
def test_ids_are_not_in_order(make):
    ids = make(np.random.default_rng(0), 4, 16384, 2048).astype(np.int64)
    ascending = (np.diff(ids, axis=1) > 0).mean()
    assert 0.4 < ascending < 0.6
    # Neither half of a row is drawn from one part of the keys.
    assert abs(ids[:, :1024].mean() - ids[:, 1024:].mean()) < 1000


def test_random_ids_reach_all_keys():
    ids = random_ids(np.random.default_rng(0), 64, 1000, 200)
    assert len(np.unique(ids)) == 1000
    assert len(np.intersect1d(ids[0], ids[1])) < 100


def test_window_ids_stay_in_a_window_that_slides_to_the_end():
    ids = window_ids(np.random.default_rng(0), 50, 131072, 2048)
    assert (np.ptp(ids, axis=1) < 8192).all()
    assert ids[0].max() < 8192
    assert ids[-1].min() >= 131072 - 8192
    assert (np.diff(ids.mean(axis=1)) > 0).all()


def test_neighbours_share_four_fifths():
    ids = shared_ids(np.random.default_rng(0), 40, 131072, 2048)
    for first in (0, 16, 32):
        group = ids[first : first + 16]
        common = set(group[0].tolist()).intersection(*(row.tolist() for row in group[1:]))
        assert len(common) == 1638
        assert len(np.unique(group)) == 1638 + len(group) * 410
    assert len(np.unique(ids[:16])) == 8198
    assert len(np.intersect1d(ids[15], ids[16])) < 200


def test_shared_ids_where_keys_are_few():
    for keys in (10, 12, 15):
        ids = shared_ids(np.random.default_rng(0), 20, keys, 10)
        assert distinct(ids)
        assert ids.max() < keys


def test_too_few_keys_are_refused():
    rng = np.random.default_rng(0)
    for make in (random_ids, shared_ids):
        with pytest.raises(ValueError, match="keys=9 is too small for 10 distinct ids"):
            make(rng, 2, 9, 10)
    with pytest.raises(ValueError, match="window=9 is too small for 10 distinct ids"):
        window_ids(rng, 2, 100, 10, window=9)
    with pytest.raises(ValueError, match="keys=100 is too small for 8192 distinct ids"):
        window_ids(rng, 2, 100, 10)
