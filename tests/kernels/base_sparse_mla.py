"""Cases that every implementation of `sparse_mla` must pass. A test module subclasses `SparseMlaCases`."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pallas_kernels.sparse_mla import merge_partials, sparse_mla
from pallas_kernels.testing import random_ids
from tests.kernels import oracle

run_sparse_mla = jax.jit(
    sparse_mla, static_argnames=("softmax_scale", "kv_lora_rank", "out_dtype", "workspace_bytes", "implementation")
)


def ones_in_one_row(keys: int, width: int, dtype: str, row: int):
    """Zeros [keys, width] with ones in `row`; on a CPU jax takes it as it is, and only that row's memory is touched."""
    if jax.devices()[0].platform != "cpu":
        return jax.jit(lambda: jnp.zeros((keys, width), dtype).at[row].set(1))()
    size = keys * width * jnp.dtype(dtype).itemsize
    raw = np.zeros(size + 64, np.uint8)
    start = -raw.ctypes.data % 64  # jax copies what is not aligned to 64 bytes
    kv = raw[start : start + size].view(jnp.dtype(dtype)).reshape(keys, width)
    kv[row] = 1
    return kv


@dataclasses.dataclass
class MlaInputs:
    """Operands of one call, NumPy arrays."""

    q: np.ndarray
    kv: np.ndarray
    ids: np.ndarray
    num_valid: np.ndarray | None = None

    def with_ids(self, *rows: list[int]) -> "MlaInputs":
        """The same queries with these ids alone, one list a row, filled up with -1 to the width."""
        ids = np.full((len(rows), self.ids.shape[1]), -1, np.int32)
        for t, row in enumerate(rows):
            ids[t, : len(row)] = row
        return dataclasses.replace(self, q=self.q[: len(rows)], ids=ids, num_valid=None)


class SparseMlaCases:
    """The contract of `sparse_mla`.

    Attributes:
      implementation: Name passed to the operation.
      dtype: Operand dtype of the cases that are not about dtypes.
      heads: Number of heads of the cases that are not about heads.
      rank: Width of the latent.
      rope: Width of the rotary part; 0 for models without one.
      selected: Number of ids a row of the cases that are not about it, at least 8.
      keys: Rows of kv, far more than any number of ids.
      scale: softmax_scale.
      out_tolerance: Error of the output by operand dtype, relative to the largest value in kv.
      lse_tolerance: Error of the log-sum-exp by operand dtype, absolute.
      axes: Values of the parametrised arguments.
    """

    implementation = "reference"
    dtype = "float32"
    heads = 4
    rank = 24
    rope = 8
    selected = 16
    keys = 400
    scale = 0.3
    out_tolerance: ClassVar = {"float32": 2e-6, "bfloat16": 2e-6}
    lse_tolerance: ClassVar = {"float32": 1e-5, "bfloat16": 1e-5}
    axes: ClassVar = {
        "any_heads": (1, 4, 8, 16, 64),
        "any_dtype": ("float32", "bfloat16"),
        "any_selected": (1, 7, 33, 100),
    }

    def make(self, *, rows=5, keys=None, heads=None, selected=None, dtype=None, seed=0) -> MlaInputs:
        """Random operands with distinct ids; k is far below the number of keys."""
        rng = np.random.default_rng(seed)
        heads, selected = heads or self.heads, self.selected if selected is None else selected
        dtype, keys = jnp.dtype(dtype or self.dtype), keys or self.keys
        q = rng.standard_normal((rows, heads, self.rank + self.rope), dtype=np.float32).astype(dtype)
        kv = rng.standard_normal((keys, self.rank + self.rope), dtype=np.float32).astype(dtype)
        return MlaInputs(q, kv, random_ids(rng, rows, keys, selected))

    def attend(self, inputs: MlaInputs, *, out_dtype="float32", scale=None, **options):
        """Run the implementation under jit: output [T, H, rank] and lse [T, H], NumPy."""
        out, lse = run_sparse_mla(
            inputs.q,
            inputs.kv,
            inputs.ids,
            softmax_scale=self.scale if scale is None else scale,
            kv_lora_rank=self.rank,
            num_valid=inputs.num_valid,
            out_dtype=out_dtype,
            implementation=self.implementation,
            **options,
        )
        assert out.dtype == jnp.dtype(inputs.q.dtype if out_dtype is None else out_dtype)
        assert out.shape == (*inputs.q.shape[:2], self.rank)
        assert lse.dtype == jnp.float32
        assert lse.shape == inputs.q.shape[:2]
        return np.asarray(out), np.asarray(lse)

    def check(self, inputs: MlaInputs, **options):
        """Assert that output and lse are the oracle's and return them."""
        out, lse = self.attend(inputs, **options)
        scale = options.get("scale") or self.scale
        want = oracle.sparse_mla(
            inputs.q, inputs.kv, inputs.ids, scale=scale, rank=self.rank, num_valid=inputs.num_valid
        )
        self.assert_close(inputs, (out, lse), want)
        return out, lse

    def assert_close(self, inputs: MlaInputs, got, want):
        """Assert that (output, lse) pairs agree to the dtype's tolerance; empty rows exactly."""
        name = inputs.q.dtype.name
        out, want_out = (np.asarray(x[0]).astype(np.float64) for x in (got, want))
        rounding = 2.0**-8 if got[0].dtype == jnp.bfloat16 else 0.0
        largest = np.nanmax(np.abs(inputs.kv.astype(np.float64)))
        np.testing.assert_allclose(out, want_out, rtol=rounding, atol=self.out_tolerance[name] * largest)
        np.testing.assert_array_equal(got[1] == -np.inf, want[1] == -np.inf)
        some = want[1] > -np.inf
        np.testing.assert_allclose(got[1][some], want[1][some], rtol=0, atol=self.lse_tolerance[name])
        assert (out[~some] == 0).all()

    @pytest.mark.parametrize("out_dtype", ["float32", "bfloat16", None])
    def test_random_ids(self, any_dtype, any_heads, out_dtype):
        self.check(self.make(heads=any_heads, dtype=any_dtype), out_dtype=out_dtype)

    def test_numbers_of_ids(self, any_selected):
        self.check(self.make(selected=any_selected))

    def test_every_key_selected_is_dense_attention(self):
        inputs = self.make(keys=self.selected)
        out, lse = self.check(inputs)
        q, kv = inputs.q.astype(np.float32), inputs.kv.astype(np.float32)
        logits = self.scale * np.einsum("thd,kd->thk", q, kv)
        p = np.exp(logits - logits.max(axis=-1, keepdims=True))
        dense = np.einsum("thk,kd->thd", p / p.sum(axis=-1, keepdims=True), kv[:, : self.rank])
        self.assert_close(inputs, (out, lse), (dense, np.log(np.exp(logits).sum(axis=-1))))

    def test_one_key_returns_its_latent_and_its_logit(self):
        last = self.keys - 1
        inputs = self.make(rows=2).with_ids([7], [last])
        out, _ = self.check(inputs)
        np.testing.assert_array_equal(out[0], np.broadcast_to(inputs.kv[7, : self.rank], out[0].shape))
        np.testing.assert_array_equal(out[1], np.broadcast_to(inputs.kv[last, : self.rank], out[1].shape))

    def test_rope_counts_in_the_logits_and_not_in_the_output(self):
        inputs = self.make(rows=1).with_ids([0, 1])
        kv = inputs.kv.copy()
        kv[1, : self.rank] = kv[0, : self.rank]
        kv[1, self.rank :] = kv[0, self.rank :] + 2
        inputs = dataclasses.replace(inputs, kv=kv)
        out, lse = self.check(inputs)
        want = np.broadcast_to(kv[0, : self.rank].astype(np.float64), out[0].shape)
        self.assert_close(inputs, (out[:1], lse), (want[None], lse))
        other = self.attend(inputs.with_ids([0, 0]))[1]
        assert (np.abs(lse - other) > 0.01).any()

    def test_softmax_scale(self):
        inputs = self.make()
        self.check(inputs, scale=1.0)
        self.check(inputs, scale=0.01)

    def test_the_order_of_ids_is_free(self):
        inputs = self.make()
        backwards = dataclasses.replace(inputs, ids=np.sort(inputs.ids, axis=1)[:, ::-1].copy())
        self.assert_close(inputs, self.check(inputs), self.check(backwards))

    def test_negative_ids_never_read_a_row(self):
        inputs = self.make()
        kv = inputs.kv.copy()
        kv[[0, -1, -2]] = np.nan  # what id -1 would read if it became row 0 or wrapped around
        ids = np.where(np.isin(inputs.ids, [0, self.keys - 2, self.keys - 1]), -1, inputs.ids)
        ids[:, ::3] = -1
        ids[1, 1], ids[2, 1], ids[3, 4] = -2, -(2**31), -self.keys
        self.check(dataclasses.replace(inputs, kv=kv, ids=ids.astype(np.int32)))

    def test_ids_beyond_the_rows_are_skipped(self):
        inputs = self.make()
        kv = inputs.kv.copy()
        kv[[0, -1]] = np.nan  # what an id too large would read if it were clipped or wrapped around
        ids = np.where(np.isin(inputs.ids, [0, self.keys - 1]), self.keys, inputs.ids)
        ids[0, 0], ids[1, 1], ids[2, 2], ids[4, -1] = self.keys, self.keys + 1, 2**31 - 1, 2 * self.keys
        out, _ = self.check(dataclasses.replace(inputs, kv=kv, ids=ids.astype(np.int32)))
        assert np.isfinite(out).all()

    def test_rows_without_a_valid_id(self):
        inputs = self.make().with_ids([], [3, 4], [-1, -1], [self.keys, 2 * self.keys, -7], [])
        out, lse = self.check(inputs)
        assert (lse[[0, 2, 3, 4]] == -np.inf).all()
        assert (out[[0, 2, 3, 4]] == 0).all()
        all_empty = self.make().with_ids([], [], [])
        out, lse = self.attend(all_empty, out_dtype=None)
        assert (lse == -np.inf).all()
        assert (out == 0).all()

    def test_the_only_valid_id_is_the_last(self):
        inputs = self.make(rows=3)
        ids = np.full_like(inputs.ids, -1)
        ids[0, -1] = 5
        ids[1] = 2 * self.keys - np.arange(ids.shape[1])  # descending and beyond the rows, but for the last
        ids[1, -1] = 0
        ids[2, -1], ids[2, 0] = self.keys - 1, self.keys - 2
        self.check(dataclasses.replace(inputs, ids=ids))

    def test_an_id_listed_twice_counts_twice(self):
        inputs = self.make(rows=3).with_ids([4, 9, 4], [5, 5, 5, 5], [1, 2])
        _, lse = self.check(inputs)
        once = self.attend(inputs.with_ids([4, 9], [5], [1, 2]))[1]
        np.testing.assert_allclose(lse[1] - once[1], np.log(4), atol=2 * self.lse_tolerance[self.dtype])

    def test_num_valid_cuts_the_list(self):
        width = self.selected
        inputs = self.make(rows=7)
        inputs.num_valid = np.array([3, width, 0, 1, width - 1, width + 5, -2], np.int32)
        ids = inputs.ids.copy()
        ids[0, :6] = [2, 0, 1, 7, 7, 7]
        kv = inputs.kv.copy()
        kv[7] = np.nan
        ids[1:][ids[1:] == 7] = 8
        ids[0, 6:] = 7
        inputs = dataclasses.replace(inputs, ids=ids, kv=kv)
        _, lse = self.check(inputs)
        assert (lse[[2, 6]] == -np.inf).all()
        self.assert_close(inputs, [x[:1] for x in self.attend(inputs)], self.attend(inputs.with_ids([2, 0, 1])))

    def test_num_valid_counts_places_and_not_valid_ids(self):
        inputs = self.make(rows=2).with_ids([-1, 5, -1, 6, 9], [-1, -1, 8])
        inputs.num_valid = np.array([4, 2], np.int32)
        self.check(inputs)

    def test_garbage_behind_num_valid(self):
        inputs = self.make(rows=4)
        inputs.num_valid = np.array([2, 9, 0, 5], np.int32)
        garbage = inputs.ids.copy()
        behind = np.arange(self.selected)[None] >= inputs.num_valid[:, None]
        garbage[behind] = np.resize([2**31 - 1, -(2**31), self.keys - 1, 0, self.keys], behind.sum())
        first, second = self.attend(inputs), self.attend(dataclasses.replace(inputs, ids=garbage))
        np.testing.assert_array_equal(first[0], second[0])
        np.testing.assert_array_equal(first[1], second[1])

    def test_nan_in_rows_that_are_not_selected(self, any_dtype):
        inputs = self.make(dtype=any_dtype)
        half = self.keys // 2
        ids = inputs.ids % half
        clean = dataclasses.replace(inputs, ids=ids)
        kv = inputs.kv.copy()
        kv[half:] = np.nan
        poisoned = dataclasses.replace(clean, kv=kv)
        for a, b in zip(self.attend(clean), self.attend(poisoned), strict=True):
            np.testing.assert_array_equal(a, b)

    def test_nan_in_a_selected_row_stays_in_the_rows_that_selected_it(self):
        inputs = self.make(rows=3).with_ids([1, 2], [2, 50], [50, 3])
        kv = inputs.kv.copy()
        kv[1], kv[3, 0] = np.nan, np.inf
        out, lse = self.attend(dataclasses.replace(inputs, kv=kv))
        want, want_lse = self.attend(inputs)
        np.testing.assert_array_equal(out[1], want[1])
        np.testing.assert_array_equal(lse[1], want_lse[1])

    def test_large_logits_do_not_overflow(self):
        inputs = self.make()
        q = (inputs.q.astype(np.float32) * 1000).astype(inputs.q.dtype)
        out, lse = self.attend(dataclasses.replace(inputs, q=q))
        want, want_lse = oracle.sparse_mla(q, inputs.kv, inputs.ids, scale=self.scale, rank=self.rank)
        np.testing.assert_allclose(lse, want_lse, rtol=1e-5)
        assert np.isfinite(out).all()
        np.testing.assert_allclose(out, want, atol=1e-2)

    def test_equal_keys_share_the_weight(self):
        inputs = self.make(rows=1, selected=self.selected)
        kv = np.broadcast_to(inputs.kv[:1], inputs.kv.shape).copy()
        inputs = dataclasses.replace(inputs, kv=kv)
        _, lse = self.check(inputs)
        one = self.attend(inputs.with_ids([0]))[1]
        np.testing.assert_allclose(lse - one, np.log(self.selected), atol=2 * self.lse_tolerance[self.dtype])

    def test_no_rows_no_ids_or_no_keys(self):
        inputs = self.make()
        self.attend(dataclasses.replace(inputs, q=inputs.q[:0], ids=inputs.ids[:0]))
        for empty in (
            dataclasses.replace(inputs, ids=inputs.ids[:, :0]),
            dataclasses.replace(inputs, kv=inputs.kv[:0], ids=np.full_like(inputs.ids, -1)),
        ):
            out, lse = self.attend(empty)
            assert (out == 0).all()
            assert (lse == -np.inf).all()

    @pytest.mark.parametrize("budget", [1, 10_000, 15_000, 25_000, 1 << 20])
    def test_the_workspace_changes_nothing(self, budget):
        inputs = self.make(rows=13)
        inputs.num_valid = np.arange(13).astype(np.int32)
        self.check(inputs, workspace_bytes=budget)

    @pytest.mark.parametrize("parts", [2, 5])
    def test_merged_parts_equal_the_whole(self, parts):
        inputs = self.make(rows=6)
        ids = inputs.ids.copy()
        ids[0], ids[1, 3:] = -1, -1
        inputs = dataclasses.replace(inputs, ids=ids)
        owned = [np.where((ids >= 0) & (ids % parts == r), ids, -1) for r in range(parts)]
        partials = [self.attend(dataclasses.replace(inputs, ids=x.astype(np.int32))) for x in owned]
        merged = jax.jit(merge_partials)(np.stack([x[0] for x in partials]), np.stack([x[1] for x in partials]))
        self.assert_close(inputs, merged, self.attend(inputs))

    def test_ids_that_float32_cannot_hold_at_offsets_above_two_gigabytes(self):
        keys, width = (1 << 24) + 4, self.rank + self.rope
        last = keys - 3  # odd and above 2**24
        kv = ones_in_one_row(keys, width, self.dtype, last)
        assert kv.nbytes >= 1 << 31
        inputs = self.make(rows=1, keys=64)
        ids = np.full_like(inputs.ids, -1)
        ids[0, 0] = last
        out, _ = run_sparse_mla(
            inputs.q,
            kv,
            ids,
            softmax_scale=self.scale,
            kv_lora_rank=self.rank,
            implementation=self.implementation,
        )
        assert (np.asarray(out) == 1).all()

    @pytest.mark.parametrize("axis", ["rows", "heads"])
    def test_split_over_devices(self, axis):
        devices = len(jax.devices())
        mesh = jax.make_mesh((devices,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        spec = jax.sharding.PartitionSpec
        by_row = axis == "rows"
        inputs = self.make(rows=3 * devices, heads=self.heads if by_row else self.heads * devices)
        ids = spec("x") if by_row else spec()
        split = spec("x") if by_row else spec(None, "x")

        def local(q, kv, ids):
            return sparse_mla(
                q,
                kv,
                ids,
                softmax_scale=self.scale,
                kv_lora_rank=self.rank,
                workspace_bytes=10_000,
                implementation=self.implementation,
            )

        mapped = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(split, spec(), ids), out_specs=split))
        got = tuple(np.asarray(x) for x in mapped(inputs.q, inputs.kv, inputs.ids))
        want = oracle.sparse_mla(inputs.q, inputs.kv, inputs.ids, scale=self.scale, rank=self.rank)
        self.assert_close(inputs, got, want)

    @given(
        ids=hnp.arrays(np.int32, (5, 16), elements=st.integers(-3, 403) | st.integers(-(2**31), 2**31 - 1)),
        num_valid=hnp.arrays(np.int32, 5, elements=st.integers(-1, 18)),
    )
    @settings(
        max_examples=40,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.differing_executors],
    )
    def test_any_ids(self, ids, num_valid):
        inputs = self.make()
        width = np.full_like(inputs.ids, -1)
        count = min(16, self.selected)
        width[:, :count] = ids[:, :count]
        self.check(dataclasses.replace(inputs, ids=width, num_valid=num_valid))
