"""Cases that every implementation of `lightning_indexer` must pass. A test module subclasses them."""

import dataclasses
from typing import ClassVar

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pallas_kernels.lightning_indexer import lightning_indexer
from tests.kernels import oracle
from tests.kernels.index_inputs import DTYPES, IndexInputs, make

run_indexer = jax.jit(lightning_indexer, static_argnames=("clean_logits", "implementation"))


class LightningIndexerCases:
    """The contract of `lightning_indexer`.

    Attributes:
      implementation: Name passed to the operation.
      key_multiple: The implementation needs a multiple of so many keys; NaN keys, outside every range, fill up.
      dtype: Operand dtype of the cases that are not about dtypes.
      heads: Number of heads of the cases that are not about heads.
      dim: Width of a head in the cases that are not about widths.
      tolerance: Error of a score by operand dtype, relative to the sum of the magnitudes of its products.
      axes: Values of the parametrised arguments.
    """

    implementation = "reference"
    key_multiple = 1
    dtype = "float32"
    heads = 4
    dim = 32
    tolerance: ClassVar = dict.fromkeys(DTYPES, 1e-6)
    axes: ClassVar = {"any_heads": (1, 4, 8, 16, 32, 64), "any_dtype": DTYPES, "any_dim": (32, 64, 96, 128)}

    def make(self, kind, **shape) -> IndexInputs:
        """Operands of the class's dtype, heads and width unless told otherwise."""
        return make(kind, **(dict(rows=6, heads=self.heads, keys=40, dim=self.dim, dtype=self.dtype) | shape))

    def score(self, inputs: IndexInputs, *, clean_logits=True) -> np.ndarray:
        """Run the implementation under jit."""
        keys = len(inputs.k)
        pad = -keys % self.key_multiple
        k = np.concatenate([inputs.k, np.full((pad, inputs.k.shape[1]), np.nan, inputs.k.dtype)])
        scale = None if inputs.k_scale is None else np.concatenate([inputs.k_scale, np.full(pad, np.nan, np.float32)])
        end = np.minimum(inputs.key_end, keys) if pad else inputs.key_end
        scores = run_indexer(
            inputs.q,
            k,
            inputs.weights,
            inputs.key_start,
            end,
            k_scale=scale,
            clean_logits=clean_logits,
            implementation=self.implementation,
        )
        assert scores.dtype == np.float32
        assert scores.shape == (len(inputs.q), keys + pad)
        return np.asarray(scores)[:, :keys]

    def check(self, inputs: IndexInputs, *, exact=True):
        """Assert that the scores equal the oracle's, exactly or to the tolerance of the dtype; return them."""
        scores = self.score(inputs)
        want = oracle.index_scores(*inputs.arrays(), inputs.k_scale)
        if exact:
            np.testing.assert_array_equal(scores, want)
        else:
            seen = oracle.visible(len(inputs.k), inputs.key_start, inputs.key_end)
            assert (scores[~seen] == -np.inf).all()
            bound = oracle.index_magnitude(inputs.q, inputs.k, inputs.weights, inputs.k_scale)[seen]
            error = np.abs(scores[seen] - want[seen]) / bound
            assert error.max() <= self.tolerance[inputs.q.dtype.name]
        return scores

    def test_exact_integers(self, any_dtype, any_heads):
        inputs = self.make("integers", heads=any_heads, dtype=any_dtype)
        scores = self.check(inputs)
        assert (scores < 0).any()
        assert (scores > 0).any()

    def test_continuous_values(self, any_dtype, any_heads):
        self.check(self.make("normal", heads=any_heads, dtype=any_dtype), exact=False)

    def test_widths(self, any_dim):
        self.check(self.make("integers", dim=any_dim))
        self.check(self.make("normal", dim=any_dim), exact=False)

    def test_without_scale_of_the_keys(self, any_dtype):
        self.check(dataclasses.replace(self.make("integers", dtype=any_dtype), k_scale=None))

    def test_scale_of_a_key_multiplies_the_sum_over_heads(self):
        inputs = self.make("integers")
        plain = self.score(dataclasses.replace(inputs, k_scale=np.ones(40, np.float32)))
        scale = np.float32([0.0, 2.0, -1.0, 0.25] * 10)
        np.testing.assert_array_equal(self.score(dataclasses.replace(inputs, k_scale=scale)), plain * scale)

    def test_relu_of_each_head_and_sum_over_heads(self):
        inputs = self.make("integers", rows=1, keys=2)
        q, k, weights = np.zeros_like(inputs.q), np.zeros_like(inputs.k), np.zeros_like(inputs.weights)
        q[0, 0, 0], q[0, 1, 0], k[0, 0], k[1, 0] = -2.0, 1.0, 1.0, -1.0
        weights[0, :2] = 1.0
        inputs = dataclasses.replace(inputs, q=q, k=k, weights=weights, k_scale=None)
        np.testing.assert_array_equal(self.score(inputs), [[1.0, 2.0]])

    def test_a_negative_weight_lowers_the_score(self):
        inputs = self.make("integers")
        negated = self.score(dataclasses.replace(inputs, weights=-inputs.weights))
        np.testing.assert_array_equal(negated, -self.score(inputs))

    def test_zero_weights_give_zero(self):
        inputs = self.make("integers")
        assert (self.score(dataclasses.replace(inputs, weights=np.zeros_like(inputs.weights))) == 0).all()

    def test_weights_keep_all_bits_of_float32(self):
        inputs = self.make("integers", rows=2)
        weights = np.zeros_like(inputs.weights)
        weights[0, 0], weights[1, 0] = 1.0, 1.0 + 2.0**-22  # equal in TF32 and bfloat16
        inputs = dataclasses.replace(
            inputs, q=np.ones_like(inputs.q), k=np.ones_like(inputs.k), weights=weights, k_scale=None
        )
        scores = self.check(inputs)
        assert (scores[1] > scores[0]).all()

    def test_float32_operands_keep_all_their_bits(self):
        if "float32" not in self.axes["any_dtype"]:
            pytest.skip("takes no float32 operands")
        inputs = self.make("integers", rows=1, keys=2, dtype="float32")
        k, weights = np.zeros_like(inputs.k), np.zeros_like(inputs.weights)
        k[0, 0], k[1, 0], weights[0, 0] = 1.0, 1.0 + 2.0**-22, 1.0
        inputs = dataclasses.replace(inputs, q=np.ones_like(inputs.q), k=k, weights=weights, k_scale=None)
        np.testing.assert_array_equal(self.score(inputs), k[:, :1].T)

    def test_ranges(self):
        inputs = self.make("integers", rows=8)
        start, end = [0, 0, 5, 39, 40, 17, 20, 0], [40, 1, 9, 40, 40, 17, 3, 0]
        scores = self.check(inputs.ranges(start, end))
        assert (scores[4:] == -np.inf).all()

    def test_ranges_that_reach_outside_are_cut(self):
        inputs = self.make("integers", rows=4)
        self.check(inputs.ranges([-3, 0, 38, 50], [5, 41, 2**31 - 1, 60]))

    def test_all_rows_empty(self):
        inputs = self.make("integers").ranges([0] * 6, [0] * 6)
        assert (self.score(inputs) == -np.inf).all()

    def test_without_clean_logits_the_range_is_right_and_the_rest_is_free(self):
        inputs = self.make("integers", rows=3).ranges([0, 10, 39], [40, 20, 39])
        scores = self.score(inputs, clean_logits=False)
        want = oracle.index_scores(*inputs.arrays(), inputs.k_scale)
        seen = oracle.visible(40, inputs.key_start, inputs.key_end)
        np.testing.assert_array_equal(scores[seen], want[seen])

    def test_nan_in_a_key_stays_in_its_column_and_scores_zero(self, any_dtype):
        inputs = dataclasses.replace(self.make("integers", dtype=any_dtype), k_scale=None)
        k = inputs.k.copy()
        k[[3, 39]] = np.nan
        scores = self.check(dataclasses.replace(inputs, k=k))
        assert (scores[:, [3, 39]] == 0).all()

    def test_nan_in_a_query_head_leaves_the_other_heads(self):
        inputs = self.make("integers")
        q = inputs.q.copy()
        q[2, 1] = np.nan
        self.check(dataclasses.replace(inputs, q=q))

    def test_nan_in_a_weight_or_a_scale_reaches_the_score(self):
        inputs = self.make("integers")
        weights, scale = inputs.weights.copy(), inputs.k_scale.copy()
        weights[1, 0], scale[7] = np.nan, np.nan
        scores = self.check(dataclasses.replace(inputs, weights=weights, k_scale=scale))
        assert np.isnan(scores[1]).all()
        assert np.isnan(scores[:, 7]).all()
        assert np.isnan(scores).sum() == 40 + 6 - 1

    def test_garbage_outside_the_range_stays_outside(self):
        inputs = self.make("integers").ranges([0, 5, 5, 9, 30, 0], [30, 30, 6, 20, 30, 1])
        k, scale = inputs.k.copy(), inputs.k_scale.copy()
        k[30:], scale[30:] = np.nan, np.inf
        np.testing.assert_array_equal(self.score(dataclasses.replace(inputs, k=k, k_scale=scale)), self.score(inputs))

    def test_no_rows_or_no_keys(self):
        assert self.score(self.make("integers", rows=0)).shape == (0, 40)
        assert self.score(self.make("integers", keys=0)).shape == (6, 0)

    def test_rows_split_over_devices(self):
        devices = len(jax.devices())
        mesh = jax.make_mesh((devices,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
        rows, whole = jax.sharding.PartitionSpec("rows"), jax.sharding.PartitionSpec()
        inputs = self.make("integers", rows=2 * devices, keys=128)
        inputs = inputs.ranges(np.arange(2 * devices), np.arange(2 * devices) + 100)

        def local(*operands):
            return lightning_indexer(*operands, implementation=self.implementation)

        split = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(rows, whole, rows, rows, rows), out_specs=rows))
        np.testing.assert_array_equal(split(*inputs.arrays()), oracle.index_scores(*inputs.arrays()))

    @given(
        weights=hnp.arrays(np.int8, (6, 4), elements=st.integers(-8, 8)),
        start=hnp.arrays(np.int32, 6, elements=st.integers(-2, 42)),
        end=hnp.arrays(np.int32, 6, elements=st.integers(-2, 42)),
        seed=st.integers(0, 999),
    )
    @settings(
        max_examples=30,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.differing_executors],
    )
    def test_any_weights_and_ranges(self, weights, start, end, seed):
        inputs = self.make("integers", seed=seed).ranges(start, end)
        tiled = np.resize(weights, inputs.weights.shape).astype(np.float32) / 8
        self.check(dataclasses.replace(inputs, weights=tiled))
