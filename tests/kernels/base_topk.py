"""Cases that every implementation of `topk` must pass. A test module subclasses `TopkCases` and names its own."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pallas_kernels.topk import topk
from tests.kernels import oracle

SPECIAL = (np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, -1e-40, 1.0, -1.0, -70000.0, 3.4e38, -3.4e38)

run_topk = jax.jit(topk, static_argnames=("k", "return_scores", "implementation"))


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


class TopkCases:
    """The contract of `topk`.

    Attributes:
      implementation: Name passed to the operation.
      column_multiple: The implementation needs a multiple of so many columns; rows are padded with +inf, which lies
        outside every range and so must never be selected.
      huge: Rows and columns of scores that fill more than 8 GiB, on a GPU only.
      axes: Values of the parametrised arguments.
    """

    implementation = "reference"
    column_multiple = 1
    huge = (2050, 1 << 20)
    axes: ClassVar = {"k": (1, 7, 64), "columns": (64, 257, 1000)}

    def select(self, scores, k, key_start=None, key_end=None, *, return_scores=False):
        """Run the implementation on NumPy arrays under jit."""
        scores = np.asarray(scores, np.float32)
        rows, columns = scores.shape
        pad = -columns % self.column_multiple
        if pad:
            scores = np.pad(scores, ((0, 0), (0, pad)), constant_values=np.inf)
            key_end = np.full(rows, columns, np.int32) if key_end is None else np.minimum(key_end, columns)
        return run_topk(scores, k, key_start, key_end, return_scores=return_scores, implementation=self.implementation)

    def check(self, scores, k, key_start=None, key_end=None):
        """Assert that the selection equals the oracle's and return it."""
        ids = self.select(scores, k, key_start, key_end)
        oracle.assert_selection(ids, oracle.topk(scores, k, key_start, key_end), k)
        return np.asarray(ids)

    def test_random_rows(self, k, columns):
        scores = np.random.default_rng(0).standard_normal((5, columns))
        self.check(scores.astype(np.float32), k)

    def test_ranges(self, k):
        rng = np.random.default_rng(1)
        scores = rng.standard_normal((12, 300)).astype(np.float32)
        start = int32(0, 0, 0, 10, 10, 10, 10, 299, 299, 300, 5, 200)
        end = start + int32(0, 1, 300, k - 1, k, k + 1, 290, 1, 0, 0, 200, 64)
        self.check(scores, k, start, np.minimum(end, 300).astype(np.int32))

    def test_ids_are_relative_to_the_start_of_the_range(self):
        scores = np.zeros((2, 12), np.float32)
        scores[1, [7, 9]] = 1.0
        ids = self.check(scores, 2, int32(0, 6), int32(6, 12))
        assert set(ids[1].tolist()) == {1, 3}

    def test_nothing_outside_the_range_is_selected(self):
        rng = np.random.default_rng(2)
        scores = rng.standard_normal((4, 200)).astype(np.float32)
        start, end = int32(0, 50, 120, 199), int32(100, 60, 200, 200)
        garbage = np.where(oracle.visible(200, start, end), scores, rng.choice([np.nan, np.inf, 9e9], scores.shape))
        np.testing.assert_array_equal(self.check(garbage, 16, start, end), self.check(scores, 16, start, end))

    def test_ranges_that_reach_outside_are_cut(self):
        scores = np.random.default_rng(3).standard_normal((6, 40)).astype(np.float32)
        start = int32(-5, 0, 35, 40, 100, -(2**31))
        end = int32(8, 41, 99, 41, 101, 2**31 - 1)
        self.check(scores, 4, start, end)

    def test_no_more_than_k_keys_are_all_taken(self):
        scores = np.random.default_rng(4).standard_normal((3, 16)).astype(np.float32)
        ids = self.check(scores, 16, int32(0, 0, 4), int32(16, 3, 16))
        assert sorted(ids[0].tolist()) == list(range(16))

    def test_k_above_the_number_of_columns(self):
        self.check(np.full((1, 5), -70000.0, np.float32), 8)
        self.check(np.random.default_rng(5).standard_normal((3, 5)).astype(np.float32), 64, None, int32(5, 2, 0))

    def test_empty_rows(self):
        ids = self.check(np.ones((4, 32), np.float32), 4, int32(0, 7, 32, 9), int32(0, 7, 32, 3))
        assert (ids == -1).all()

    def test_equal_scores_keep_the_lowest_ids(self):
        assert set(self.check(np.ones((1, 6), np.float32), 3)[0].tolist()) == {0, 1, 2}
        self.check(np.ones((3, 500), np.float32), 64, int32(0, 100, 499), int32(500, 400, 500))

    def test_ties_at_the_threshold(self):
        rng = np.random.default_rng(6)
        self.check(rng.integers(-3, 4, (16, 400)).astype(np.float32), 50)
        self.check(np.round(2 * rng.standard_normal((16, 400))).astype(np.float32) / 2, 50)

    def test_scores_that_differ_in_their_low_bits_only(self):
        bits = np.random.default_rng(7).integers(0, 1 << 10, (4, 600)).astype(np.int32)
        positive = (np.float32(1.0).view(np.int32) | bits).view(np.float32)
        self.check(np.concatenate([positive, -positive]), 100)

    def test_bucket_of_the_threshold_holds_nearly_all(self):
        scores = np.full((2, 600), 0.5, np.float32)
        scores[:, 100] = 7.0
        scores[:, 200] = -7.0
        scores[1, 300:] = np.nextafter(np.float32(0.5), np.float32(1.0))
        self.check(scores, 128)

    def test_nan_ranks_last(self):
        scores = np.random.default_rng(8).standard_normal((5, 60)).astype(np.float32)
        scores[0, [0, 3, 59]] = np.nan
        scores[1, 4:] = np.nan  # more NaN than numbers: the lowest ids of NaN fill the row
        scores[2] = np.nan
        scores[3, ::2] = -np.nan
        scores[4, :58] = -np.inf
        scores[4, 58:] = np.nan
        self.check(scores, 8)
        self.check(scores, 58)

    def test_nan_of_any_bits_is_nan(self):
        bits = np.array(
            [[0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF, 0x7FC00000, 0xFFC00000, 0xFF800000]], np.uint32
        )
        scores = np.concatenate([bits.view(np.float32), np.float32([[-np.inf, -3e38]])], axis=1)
        assert set(self.check(scores, 3)[0].tolist()) == {6, 7, 8}

    def test_infinities_are_ordinary_scores(self):
        scores = np.random.default_rng(9).standard_normal((3, 50)).astype(np.float32)
        scores[0, [49, 7]] = np.inf
        scores[1, 2:48] = -np.inf
        scores[2] = -np.inf
        ids = self.check(scores, 10)
        assert {49, 7} <= set(ids[0].tolist())

    def test_all_minus_infinity_is_not_empty(self):
        assert sorted(self.check(np.full((1, 5), -np.inf, np.float32), 3)[0].tolist()) == [0, 1, 2]

    def test_below_the_range_of_float16(self):
        self.check(np.full((1, 5), -70000.0, np.float32), 8)
        scores = -70000.0 - np.random.default_rng(10).permutation(200).reshape(2, 100).astype(np.float32)
        self.check(scores, 10)

    def test_negative_zero_equals_zero(self):
        scores = np.where(np.arange(64) % 3 == 0, np.float32(0.0), np.float32(-0.0))[None]
        assert sorted(self.check(scores, 10)[0].tolist()) == list(range(10))
        mixed = np.concatenate([scores, np.where(np.arange(64) < 40, np.float32(-1.0), scores)])
        self.check(mixed, 10)

    def test_subnormal_scores_are_not_zero(self):
        scores = np.float32([[0.0, 1e-45, -1e-45, 1e-40, -0.0, -1e-40, 1e-38, 0.0]])
        for k in (1, 4, 6):
            self.check(scores, k)

    def test_winners_are_distinct_and_id_0_must_win(self):
        scores = np.arange(2048, dtype=np.float32)[None]
        ids = self.check(scores, 512)
        assert len(set(ids[0].tolist())) == 512
        assert 0 not in ids

    def test_one_row_does_not_depend_on_the_others(self):
        scores = np.round(np.random.default_rng(11).standard_normal((9, 128)), 1).astype(np.float32)
        together = np.asarray(self.select(scores, 16))
        for t in (0, 4, 8):
            assert set(together[t].tolist()) == set(np.asarray(self.select(scores[t : t + 1], 16))[0].tolist())

    def test_every_run_gives_the_same(self):
        scores = np.random.default_rng(12).integers(0, 4, (8, 700)).astype(np.float32)
        runs = [np.sort(np.asarray(self.select(scores, 100)), axis=1) for _ in range(5)]
        for run in runs[1:]:
            np.testing.assert_array_equal(run, runs[0])

    def test_scores_of_the_selected(self):
        rng = np.random.default_rng(13)
        scores = rng.choice(np.float32(SPECIAL), (6, 90))
        start, end = int32(0, 10, 0, 89, 40, 0), int32(90, 90, 3, 90, 40, 60)
        ids, values = map(np.asarray, self.select(scores, 12, start, end, return_scores=True))
        oracle.assert_selection(ids, oracle.topk(scores, 12, start, end), 12)
        assert values.dtype == np.float32
        for t in range(6):
            picked = scores[t, ids[t][ids[t] >= 0] + start[t]]
            # Bits, because -0.0 == 0.0 and NaN != NaN: the score returned is the score that came in.
            np.testing.assert_array_equal(values[t, : len(picked)].view(np.int32), picked.view(np.int32))
            assert (values[t, len(picked) :] == -np.inf).all()

    def test_a_needle_in_a_long_row(self):
        scores = np.random.default_rng(14).standard_normal((2, 20000)).astype(np.float32)
        scores[0, 0], scores[1, 19999] = 50.0, 50.0
        ids = self.check(scores, 64)
        assert 0 in ids[0]
        assert 19999 in ids[1]

    def test_ids_that_float32_cannot_hold(self):
        columns = (1 << 24) + 8
        scores = np.zeros((1, columns), np.float32)
        winners = [(1 << 24) + 1, (1 << 24) + 3, 5]
        scores[0, winners] = 1.0
        ids = self.select(scores, 3, int32(0), int32(columns))
        assert set(np.asarray(ids)[0].tolist()) == set(winners)

    @pytest.mark.gpu
    def test_offsets_above_eight_gigabytes(self):
        rows, columns = self.huge
        winners = [0, columns // 2 + 1, columns - 1]

        @jax.jit
        def select():
            scores = jnp.zeros((rows, columns), jnp.float32).at[-1, jnp.array(winners)].set(1.0)
            return topk(scores, 3, implementation=self.implementation)

        want = [[0, 1, 2]] * (rows - 1) + [winners]
        oracle.assert_selection(select(), want, 3)

    def test_no_rows_or_no_columns(self):
        assert run_topk(np.zeros((0, 64), np.float32), 3, implementation=self.implementation).shape == (0, 3)
        ids, values = run_topk(np.zeros((2, 0), np.float32), 3, return_scores=True, implementation=self.implementation)
        assert (np.asarray(ids) == -1).all()
        assert (np.asarray(values) == -np.inf).all()

    def test_rows_split_over_devices(self):
        devices = len(jax.devices())
        mesh = jax.make_mesh((devices,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
        rows = jax.sharding.PartitionSpec("rows")
        scores = np.random.default_rng(15).integers(-9, 9, (3 * devices, 256)).astype(np.float32)
        start = np.arange(3 * devices, dtype=np.int32)
        end = np.full_like(start, 250)

        def local(scores, start, end):
            return topk(scores, 16, start, end, return_scores=True, implementation=self.implementation)

        split = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=rows, out_specs=rows))
        ids, values = split(scores, start, end)
        oracle.assert_selection(ids, oracle.topk(scores, 16, start, end), 16)
        assert values.shape == ids.shape

    def test_inside_a_larger_program(self):
        @jax.jit
        def step(scores, bias):
            ids = topk(scores + bias, 5, implementation=self.implementation)
            return jnp.where(ids >= 0, ids + 100, ids)

        scores = np.random.default_rng(16).standard_normal((3, 128)).astype(np.float32)
        want = [[i + 100 for i in row] for row in oracle.topk(scores + np.float32(1), 5)]
        oracle.assert_selection(step(scores, jnp.float32(1)), want, 5)

    @given(
        scores=hnp.arrays(np.float32, (4, 24), elements=st.sampled_from(SPECIAL) | st.floats(width=32)),
        start=hnp.arrays(np.int32, 4, elements=st.integers(-2, 26)),
        end=hnp.arrays(np.int32, 4, elements=st.integers(-2, 26)),
        k=st.sampled_from((1, 5, 24, 30)),
    )
    @settings(
        max_examples=60,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.differing_executors],
    )
    def test_any_scores_and_ranges(self, scores, start, end, k):
        self.check(scores, k, start, end)
