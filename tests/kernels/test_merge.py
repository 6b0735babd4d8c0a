"""Merge of partial attention outputs, against float64 and by the faults that merges are known for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pallas_kernels.sparse_mla import merge_partials
from pallas_kernels.sparse_mla.merge import merge_weights, weigh
from tests.kernels import oracle

EMPTY = (-np.inf, np.inf, np.nan, -np.nan)


def merge(lse, out):
    """Merge parts of one row and one head with one value each: lists [R] to two floats."""
    merged, merged_lse = jax.jit(merge_partials)(
        np.float32(out).reshape(-1, 1, 1, 1), np.float32(lse).reshape(-1, 1, 1)
    )
    assert merged.dtype == merged_lse.dtype == jnp.float32
    return merged.item(), merged_lse.item()


def check(out, lse):
    got = jax.jit(merge_partials)(out, lse)
    want = oracle.merge(out, lse)
    np.testing.assert_allclose(got[0], want[0], rtol=0, atol=1e-5 * np.nanmax(np.abs(want[0]), initial=1.0))
    np.testing.assert_array_equal(np.asarray(got[1]) == -np.inf, want[1] == -np.inf)
    some = want[1] > -np.inf
    np.testing.assert_allclose(np.asarray(got[1])[some], want[1][some], rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("parts", [1, 2, 8])
def test_random_parts(parts, dtype):
    rng = np.random.default_rng(parts)
    out = rng.standard_normal((parts, 5, 4, 16), dtype=np.float32).astype(dtype)
    lse = (3 * rng.standard_normal((parts, 5, 4))).astype(np.float32)
    lse[:, 2] = -np.inf
    lse[0, 3] = -np.inf
    check(out, lse)


@pytest.mark.parametrize("empty", EMPTY)
def test_an_empty_part_has_no_weight(empty):
    assert merge([np.log(3), empty], [1.0, 0.0]) == pytest.approx((1.0, np.log(3)))
    assert merge([empty, 2.0, empty], [7.0, 5.0, 9.0]) == (5.0, 2.0)


@pytest.mark.parametrize("empty", EMPTY)
@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf])
def test_nothing_of_an_empty_part_reaches_the_output(empty, garbage):
    assert merge([0.0, empty], [2.5, garbage]) == (2.5, 0.0)


@pytest.mark.parametrize("empty", EMPTY)
def test_all_parts_empty(empty):
    assert merge([empty, empty], [1.0, np.nan]) == (0.0, -np.inf)
    assert merge([empty], [np.nan]) == (0.0, -np.inf)


def test_one_part_is_itself():
    assert merge([-3.5], [0.7]) == (np.float32(0.7), -3.5)


def test_equal_parts_average():
    assert merge([1.0, 1.0], [1.0, 3.0]) == pytest.approx((2.0, 1.0 + np.log(2)))


@pytest.mark.parametrize("shift", [-1e4, 1e4, 3e38, -3e38])
def test_large_log_sum_exps_do_not_overflow(shift):
    out, lse = merge([shift, shift], [1.0, 3.0])
    assert out == 2.0
    assert lse == np.float32(shift + np.log(2))


def test_a_part_far_below_vanishes():
    assert merge([0.0, -1000.0], [1.0, np.nan]) == (1.0, 0.0)


def test_finite_but_low_parts_are_not_empty():
    assert merge([-1e30, -np.inf], [4.0, 9.0]) == (4.0, np.float32(-1e30))


def test_weights_sum_to_one_or_are_zero():
    lse = np.float32([[0.0, -np.inf, 5.0], [1.0, -np.inf, np.nan]])
    weights, merged = merge_weights(jnp.asarray(lse))
    np.testing.assert_allclose(np.sum(weights, axis=0), [1.0, 0.0, 1.0], rtol=1e-6)
    np.testing.assert_allclose(merged, [np.log(1 + np.e), -np.inf, 5.0], rtol=1e-6)


def test_zero_weight_silences_nan():
    part = jnp.float32([[np.nan, 1.0], [np.nan, 2.0]])
    np.testing.assert_array_equal(weigh(part, jnp.float32([0.0, 0.5])), [[0.0, 0.0], [np.nan, 1.0]])


def test_merging_in_two_steps_is_merging_at_once():
    rng = np.random.default_rng(3)
    out = rng.standard_normal((4, 3, 2, 8), dtype=np.float32)
    lse = rng.standard_normal((4, 3, 2), dtype=np.float32)
    lse[:2, 0] = -np.inf
    merge_parts = jax.jit(merge_partials)
    halves = [merge_parts(out[i : i + 2], lse[i : i + 2]) for i in (0, 2)]
    twice = merge_parts(np.stack([x[0] for x in halves]), np.stack([x[1] for x in halves]))
    for a, b in zip(twice, merge_parts(out, lse), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_weights_from_a_collective_equal_the_merge():
    """The way a sharded caller merges: lse gathered over an axis, own part weighed, then a sum over the axis."""
    rng = np.random.default_rng(4)
    ranks = 8
    out = rng.standard_normal((ranks, 3, 2, 8), dtype=np.float32)
    lse = rng.standard_normal((ranks, 3, 2), dtype=np.float32)
    lse[2], out[2] = -np.inf, np.nan
    lse[:, 1] = -np.inf
    mesh = jax.make_mesh((ranks,), ("dcp",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("dcp")

    def local(out, lse):
        weights, merged = merge_weights(jax.lax.all_gather(lse[0], "dcp"))
        mine = weigh(out[0], weights[jax.lax.axis_index("dcp")])
        return jax.lax.psum(mine, "dcp")[None], merged[None]

    got, got_lse = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec))(out, lse)
    want, want_lse = jax.jit(merge_partials)(out, lse)
    for rank in range(ranks):
        np.testing.assert_allclose(got[rank], want, atol=1e-6)
        np.testing.assert_allclose(got_lse[rank], want_lse, atol=1e-6)


@given(
    out=hnp.arrays(np.float32, (3, 2, 2, 3), elements=st.floats(-100, 100, width=32)),
    lse=hnp.arrays(np.float32, (3, 2, 2), elements=st.sampled_from(EMPTY) | st.floats(-1e4, 1e4, width=32)),
)
@settings(max_examples=60, derandomize=True, deadline=None, database=None)
def test_any_parts(out, lse):
    check(out, lse)


OUT, LSE = np.zeros((2, 3, 4, 8), np.float32), np.zeros((2, 3, 4), np.float32)


@pytest.mark.parametrize(
    ("out", "lse", "message"),
    [
        ([OUT, OUT], LSE, "out must be an array, got list"),
        (OUT[0], LSE, r"out must have shape \[R, T, H, D\], got \[3, 4, 8\]"),
        (OUT.astype(np.float16), LSE, "out must have dtype float32, bfloat16, got float16"),
        (OUT, LSE[:1], r"lse must have shape \[2, 3, 4\], got \[1, 3, 4\]"),
        (OUT, LSE.astype(jnp.bfloat16), "lse must have dtype float32, got bfloat16"),
        (OUT, LSE.astype(np.float64), "lse must have dtype float32, got float64"),
        (OUT[:0], LSE[:0], r"out must hold at least one part, got shape \[0, 3, 4, 8\]"),
    ],
)
def test_bad_arguments_are_named(out, lse, message):
    with pytest.raises(ValueError, match=f"^merge_partials: {message}"):
        merge_partials(out, lse)
