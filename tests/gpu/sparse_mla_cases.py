"""What the tests of sparse MLA on a real GPU share: FlashMLA's own inputs and tolerances, and a float64 oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.ckv_records import RecordFormat
from pallas_kernels.sparse_mla import plan

SCALE = 576**-0.5
LATENT = 512


def inputs(rng, rows, heads, keys, width=576):
    """FlashMLA's test data: small, with a shift, so that rounding shows as it does in a model."""
    q = jnp.asarray(rng.standard_normal((rows, heads, width)) / 10 + 0.02, jnp.bfloat16)
    return q, jnp.asarray(rng.standard_normal((keys, width)) / 10 + 0.02, jnp.bfloat16)


@np.errstate(invalid="ignore")
def oracle(q, kv, ids, num_valid=None):
    """Float64 attention, one row at a time; NaN in a selected row makes the row NaN."""
    q, kv = (np.asarray(x.astype(jnp.float32)).astype(np.float64) for x in (q, kv))
    out = np.zeros((*q.shape[:2], LATENT))
    lse = np.full(q.shape[:2], -np.inf)
    for t, row in enumerate(np.asarray(ids)):
        row = row[: max(0, row.size if num_valid is None else num_valid[t])]
        row = row[(row >= 0) & (row < kv.shape[0])]
        if row.size:
            logits = q[t] @ kv[row].T * SCALE
            top = logits.max(1, keepdims=True)
            p = np.exp(logits - top)
            out[t] = p @ kv[row, :LATENT] / p.sum(1, keepdims=True)
            lse[t] = (np.log(p.sum(1, keepdims=True)) + top)[:, 0]
    return out, lse


def assert_close(got, want):
    """Assert that output and lse are the oracle's to FlashMLA's tolerances, NaN and empty rows the same."""
    out, lse = (np.asarray(x.astype(jnp.float32)).astype(np.float64) for x in got)
    want_out, want_lse = want
    whole_row = np.isnan(want_lse)  # of a selected NaN only the row counts: which columns hold it is left open
    np.testing.assert_array_equal(np.isnan(out).any(-1), whole_row)
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(want_lse))
    np.testing.assert_array_equal(out[np.isneginf(want_lse)], 0)
    out, want_out = out[~whole_row], want_out[~whole_row]
    error = np.abs(out - want_out)
    assert np.all((error < 8e-4) | (error < np.abs(want_out) * 3.01 / 128)), error.max()
    assert 1 - 2 * np.sum(out * want_out) / max(np.sum(out**2 + want_out**2), 1e-300) < 7e-6
    finite = np.isfinite(want_lse)
    error = np.abs(lse[finite] - want_lse[finite])
    assert np.all((error < 1e-6) | (error < np.abs(want_lse[finite]) * 2.01 / 65536)), error.max()


@functools.cache
def _attend(chosen, config, out_dtype: str, kv_format: RecordFormat | None):
    return jax.jit(
        functools.partial(
            plan.sparse_mla,
            softmax_scale=SCALE,
            out_dtype=jnp.dtype(out_dtype),
            workspace_bytes=1 << 30,
            kv_format=kv_format,
            plan=chosen,
            config=config,
        )
    )


def run(q, kv, ids, num_valid=None, chosen=None, out_dtype=jnp.float32, config=None, kv_format=None):
    """Output and lse of the Hopper kernel; calls of one shape share a program."""
    num_valid = np.full(q.shape[0], ids.shape[1], np.int32) if num_valid is None else num_valid
    attend = _attend(chosen, config, jnp.dtype(out_dtype).name, kv_format)
    return attend(q, kv, jnp.asarray(ids), num_valid=jnp.asarray(num_valid))
