"""Cases that every implementation of `index_topk` must pass. A test module subclasses `IndexTopkCases`."""

import dataclasses
from typing import ClassVar

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pallas_kernels.index_topk import index_topk
from tests.kernels import oracle
from tests.kernels.base_lightning_indexer import run_indexer
from tests.kernels.index_inputs import DTYPES, IndexInputs, make

run_index_topk = jax.jit(index_topk, static_argnames=("top_k", "return_scores", "workspace_bytes", "implementation"))


class IndexTopkCases:
    """The contract of `index_topk`.

    Attributes:
      implementation: Name passed to the operation.
      scorer: Implementation of `lightning_indexer` whose scores the selection must be exact on.
      key_multiple: The implementation needs a multiple of so many keys; NaN keys, outside every range, fill up.
      dtype: Operand dtype of the cases that are not about dtypes.
      heads: Number of heads of the cases that are not about heads.
      dim: Width of a head.
      tolerance: Error of a score by operand dtype, relative to the sum of the magnitudes of its products.
      axes: Values of the parametrised arguments.
    """

    implementation = "reference"
    scorer = "reference"
    key_multiple = 1
    dtype = "float32"
    heads = 4
    dim = 32
    tolerance: ClassVar = dict.fromkeys(DTYPES, 1e-6)
    axes: ClassVar = {"any_heads": (1, 4, 8, 16, 64), "any_dtype": DTYPES, "top_k": (1, 9, 32)}

    def make(self, kind, **shape) -> IndexInputs:
        """Operands of the class's dtype, heads and width unless told otherwise."""
        return make(kind, **(dict(rows=6, heads=self.heads, keys=200, dim=self.dim, dtype=self.dtype) | shape))

    def padded(self, inputs: IndexInputs) -> IndexInputs:
        """The same with keys up to a multiple of `key_multiple`."""
        keys = len(inputs.k)
        pad = -keys % self.key_multiple
        if pad == 0:
            return inputs
        scale = inputs.k_scale
        return dataclasses.replace(
            inputs,
            k=np.concatenate([inputs.k, np.full((pad, inputs.k.shape[1]), np.nan, inputs.k.dtype)]),
            k_scale=None if scale is None else np.concatenate([scale, np.full(pad, np.nan, np.float32)]),
            key_end=np.minimum(inputs.key_end, keys).astype(np.int32),
        )

    def select(self, inputs: IndexInputs, top_k: int, **options):
        """Run the implementation under jit."""
        inputs = self.padded(inputs)
        return run_index_topk(
            *inputs.arrays(), top_k, k_scale=inputs.k_scale, implementation=self.implementation, **options
        )

    def check(self, inputs: IndexInputs, top_k: int, **options) -> np.ndarray:
        """Assert that exact inputs give exactly the oracle's selection; return it."""
        ids = self.select(inputs, top_k, **options)
        keys = len(inputs.k)
        everywhere = oracle.index_scores(*inputs.arrays()[:3], *oracle.all_keys(inputs.q, inputs.k), inputs.k_scale)
        assert len(everywhere[0]) == keys
        oracle.assert_selection(ids, oracle.topk(everywhere, top_k, inputs.key_start, inputs.key_end), top_k)
        return np.asarray(ids)

    def test_exact_integers(self, any_dtype, any_heads):
        inputs = self.make("integers", heads=any_heads, dtype=any_dtype)
        inputs = inputs.ranges([0, 0, 50, 190, 7, 30], [200, 100, 200, 200, 7, 50])
        self.check(inputs, 16)

    def test_many_ties(self, top_k):
        inputs = self.make("integers", rows=12)
        q, weights = np.zeros_like(inputs.q), np.round(inputs.weights)
        q[:, :, 0] = np.sign(inputs.q[:, :, 0].astype(np.float32))
        inputs = dataclasses.replace(inputs, q=q, weights=weights, k_scale=None)
        scores = oracle.index_scores(*inputs.arrays())
        assert max(len(np.unique(row)) for row in scores) < 40
        self.check(inputs, top_k)

    def test_continuous_values_to_the_rounding_of_a_score(self, any_dtype, any_heads):
        inputs = self.make("normal", heads=any_heads, dtype=any_dtype)
        inputs = inputs.ranges([0, 0, 50, 190, 7, 30], [200, 100, 200, 200, 7, 50])
        ids, values = map(np.asarray, self.select(inputs, 16, return_scores=True))
        everywhere = inputs.arrays()[:3] + oracle.all_keys(inputs.q, inputs.k)
        scores = oracle.index_scores(*everywhere, inputs.k_scale)
        bound = self.tolerance[any_dtype] * oracle.index_magnitude(*everywhere[:3], inputs.k_scale)
        oracle.assert_selection_within(ids, scores, 16, inputs.key_start, inputs.key_end, bound)
        row, place = np.nonzero(ids >= 0)
        column = ids[row, place] + inputs.key_start[row]
        assert (np.abs(values[row, place] - scores[row, column]) <= bound[row, column]).all()
        assert (values[ids < 0] == -np.inf).all()

    def test_equals_the_two_operations(self, any_dtype, top_k):
        inputs = self.make("normal", rows=9, dtype=any_dtype).ranges(np.arange(9), np.arange(9) * 20 + 40)
        padded = self.padded(inputs)
        scores = run_indexer(*padded.arrays(), k_scale=padded.k_scale, implementation=self.scorer)
        ids, values = map(np.asarray, self.select(inputs, top_k, return_scores=True))
        oracle.assert_selection(ids, oracle.topk(scores, top_k, padded.key_start, padded.key_end), top_k)
        for t in range(9):
            np.testing.assert_array_equal(values[t], np.asarray(scores)[t, ids[t] + t])

    def test_rows_of_at_most_k_keys_take_all_whatever_they_score(self):
        inputs = self.make("integers")
        weights, k = inputs.weights.copy(), inputs.k.copy()
        weights[:3], k[10:20] = np.nan, np.nan
        inputs = dataclasses.replace(inputs, weights=weights, k=k)
        inputs = inputs.ranges([0, 50, 196, 5, 9, 0], [16, 65, 200, 6, 9, 15])
        ids = np.asarray(self.select(inputs, 16))
        oracle.assert_selection(ids, [list(range(n)) for n in (16, 15, 4, 1, 0, 15)], 16)

    def test_top_k_above_the_number_of_keys(self):
        self.check(self.make("integers", keys=20), 32)
        self.check(self.make("integers", keys=32), 32)
        self.check(self.make("integers", keys=33), 32)

    def test_packed_requests_do_not_see_each_other(self):
        inputs = self.make("integers", rows=10, keys=160)
        start = np.repeat([0, 60, 60], [4, 4, 2])
        packed = inputs.ranges(start, [20, 40, 59, 60, 100, 120, 159, 160, 60, 61])
        ids = self.check(packed, 12)
        alone = dataclasses.replace(packed, k=packed.k[60:], k_scale=packed.k_scale[60:])
        alone = alone.ranges(packed.key_start - 60, packed.key_end - 60)
        second = np.asarray(self.select(alone, 12))
        for t in range(4, 10):
            assert set(ids[t].tolist()) == set(second[t].tolist())

    def test_garbage_keys_outside_the_ranges(self):
        inputs = self.make("integers").ranges([0, 5, 5, 9, 100, 0], [100, 100, 60, 80, 100, 1])
        k, scale = inputs.k.copy(), inputs.k_scale.copy()
        k[100:], scale[100:] = np.nan, np.inf
        garbage = dataclasses.replace(inputs, k=k, k_scale=scale)
        oracle.assert_selection(
            self.select(garbage, 8), [[i for i in row if i >= 0] for row in self.check(inputs, 8).tolist()], 8
        )

    def test_nan_scores_rank_last(self):
        inputs = self.make("integers", rows=4)
        scale, weights = inputs.k_scale.copy(), inputs.weights.copy()
        scale[::3], weights[3] = np.nan, np.nan
        inputs = dataclasses.replace(inputs, k_scale=scale, weights=weights)
        ids = self.check(inputs, 24)
        assert (ids[:3] % 3 != 0).all()
        assert sorted(ids[3].tolist()) == list(range(24))

    def test_negative_weights_make_zeros_that_tie(self):
        inputs = self.make("integers", rows=3)
        # Half of the keys give relu zero in every head: -0.0 after the weights. Among them the lowest ids win.
        q, k = np.zeros_like(inputs.q), np.zeros_like(inputs.k)
        q[:, :, 0] = 1.0
        k[:, 0] = np.where(np.arange(200) % 2, 1.0, -1.0)
        k[4, 0] = 0.0
        inputs = dataclasses.replace(inputs, q=q, k=k, weights=-np.abs(inputs.weights) - 1, k_scale=None)
        ids = self.check(inputs, 20)
        assert sorted(ids[0].tolist()) == list(range(0, 40, 2))

    def test_all_rows_empty(self):
        ids, values = self.select(self.make("integers").ranges([0] * 6, [0] * 6), 8, return_scores=True)
        assert (np.asarray(ids) == -1).all()
        assert (np.asarray(values) == -np.inf).all()

    def test_ranges_that_reach_outside_are_cut(self):
        self.check(self.make("integers", rows=4).ranges([-3, 0, 150, 300], [90, 201, 2**31 - 1, 400]), 8)

    def test_no_rows_or_no_keys(self):
        assert run_index_topk(*self.make("integers", rows=0).arrays(), 8, implementation=self.implementation).shape == (
            0,
            8,
        )
        empty = run_index_topk(*self.make("integers", keys=0).arrays(), 8, implementation=self.implementation)
        assert (np.asarray(empty) == -1).all()

    @pytest.mark.parametrize("budget", [1, 10_000, 35_000, 60_000, 1 << 20])
    def test_the_workspace_changes_nothing(self, budget):
        inputs = self.make("integers", rows=13).ranges([0] * 13, np.arange(13) * 15 + 5)
        self.check(inputs, 16, workspace_bytes=budget)

    def test_a_needle_at_the_start_of_a_long_context(self):
        keys, heads = 16384, max(self.axes["any_heads"])
        inputs = self.make("normal", rows=2, heads=heads, keys=keys)
        k, weights = inputs.k.copy(), np.abs(inputs.weights)
        k[0] = 3 * inputs.q[0, 0]
        inputs = dataclasses.replace(inputs, k=k, weights=weights, k_scale=None)
        ids = np.asarray(self.select(inputs, 64))
        assert 0 in ids[0]
        assert ids.min() < keys - 64
        everywhere = inputs.arrays()[:3] + oracle.all_keys(inputs.q, inputs.k)
        bound = self.tolerance[self.dtype] * oracle.index_magnitude(*everywhere[:3])
        oracle.assert_selection_within(
            ids, oracle.index_scores(*everywhere), 64, inputs.key_start, inputs.key_end, bound
        )

    def test_every_run_gives_the_same(self):
        inputs = self.make("normal", rows=8)
        runs = [np.sort(np.asarray(self.select(inputs, 16)), axis=1) for _ in range(4)]
        for run in runs[1:]:
            np.testing.assert_array_equal(run, runs[0])

    def test_rows_split_over_devices(self):
        devices = len(jax.devices())
        mesh = jax.make_mesh((devices,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
        rows, whole = jax.sharding.PartitionSpec("rows"), jax.sharding.PartitionSpec()
        inputs = self.make("integers", rows=3 * devices, keys=128)
        inputs = inputs.ranges(np.arange(3 * devices), np.arange(3 * devices) + 100)

        def local(*operands):
            return index_topk(*operands, 16, workspace_bytes=10_000, implementation=self.implementation)

        split = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(rows, whole, rows, rows, rows), out_specs=rows))
        everywhere = oracle.index_scores(*inputs.arrays()[:3], *oracle.all_keys(inputs.q, inputs.k))
        want = oracle.topk(everywhere, 16, inputs.key_start, inputs.key_end)
        oracle.assert_selection(split(*inputs.arrays()), want, 16)

    @given(
        weights=hnp.arrays(np.int8, (6, 4), elements=st.integers(-2, 2)),
        start=hnp.arrays(np.int32, 6, elements=st.integers(-2, 202)),
        end=hnp.arrays(np.int32, 6, elements=st.integers(-2, 202)),
        top_k=st.sampled_from((1, 16, 100)),
    )
    @settings(
        max_examples=30,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.differing_executors],
    )
    def test_any_weights_and_ranges(self, weights, start, end, top_k):
        inputs = self.make("integers").ranges(start, end)
        tiled = np.resize(weights, inputs.weights.shape).astype(np.float32)
        self.check(dataclasses.replace(inputs, weights=tiled), top_k)
