"""Pooled index keys and records without rope in every format: what is stored, and that chunks change nothing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsa_jax.batch
from dsa_jax.layers.kpool import hadamard
from dsa_jax.prefill import PrefillResult
from dsa_jax.testing import selected_sets
from pallas_kernels.ckv_records import read, unpack
from sharding.mesh import make_mesh
from tests.model.flash_wide import LENGTH, wide_geometry, wide_model, wide_prompt
from tests.model.paged_cases import foreign_cache, paged_batch, run

POOL, SEED, DECODED = 4, 0, 7
# What a flipped rounding moves a logit of size 2 by; without what the ring keeps, rows move by up to 0.9.
FLIPPED = 2e-3
# Records, index keys; how far a stored key may be from the float32 one, relative to its norm; the same of the logits.
CASES = [("bf16", "bf16", 0.004, 0.02), ("fp8_ds_mla", "fp8", 0.04, 0.2)]


@pytest.fixture(autouse=True)
def one_program(monkeypatch):
    """Wide buckets: steps of many rows share one compiled program for each format."""
    for name, size in {"MIN_ROWS": 128, "MIN_KEYS": 128, "MIN_PAGES": 8}.items():
        monkeypatch.setattr(dsa_jax.batch, name, size)


def prefilled(ckv: str, index_keys: str, *, chunk_size: int = 128, seed: int = SEED, length: int = LENGTH):
    """The batch and what prefill made of it, in a cache that was full of foreign bytes."""
    model = wide_model(make_mesh())
    geometry = wide_geometry(model, ckv, index_keys)
    batch = paged_batch(model, [wide_prompt()[:length]], geometry, seed)
    return batch, run(model, batch, foreign_cache(model, geometry, batch.pages), chunk_size=chunk_size)


@functools.cache
def one_shot(ckv: str, index_keys: str) -> tuple[PrefillResult, np.ndarray]:
    """The whole prompt in one step, and its pooled keys [pools, 128] as the cache holds them, turned back."""
    batch, result = prefilled(ckv, index_keys)
    fmt, per_page = batch.geometry.index_keys, batch.geometry.index_page_size
    pool = np.arange(LENGTH // POOL)
    slots = jnp.asarray(batch.requests[0].pages[pool // per_page] * per_page + pool % per_page, jnp.int32)
    keys = unpack(fmt, read(fmt, result.cache.index_keys, slots, layer=jnp.int32(0)), dtype=jnp.float32)
    # The rotation is its own inverse.
    return result, np.asarray(keys if fmt.encoding == "plain" else hadamard(keys))


def relative(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Relative error of each row."""
    return np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)


@pytest.mark.parametrize(("ckv", "index_keys", "key_error", "error"), CASES)
def test_stored_pools_are_those_of_float32(ckv, index_keys, key_error, error):
    """Every complete pool's key, quantised behind the Hadamard rotation; and what that does to the logits."""
    (exact, keys), (rounded, stored) = one_shot("float32", "float32"), one_shot(ckv, index_keys)
    wrong = relative(stored, keys)
    assert 0 < wrong.max() < key_error
    assert 0 < np.median(relative(rounded.logits[0], exact.logits[0])) < error
    # The tail is never scored: it is there whatever the rounding.
    for t, ids in enumerate(selected_sets(rounded.selected[0][0])):
        assert set(range((t + 1) // POOL * POOL, t + 1)) <= ids and len(ids) == min(24, (t + 1) // 4 * 4) + (t + 1) % 4


@pytest.mark.parametrize(("ckv", "index_keys"), [case[:2] for case in CASES])
def test_chunks_and_decode_equal_one_shot(ckv, index_keys):
    """Chunks begin inside pools, and decode completes pools: keys are the same from the ring and from one step.

    Other chunks cut linear attention into other blocks: the last bit of its sums moves, and now and then the rounding
    of a value in the cache with it.
    """
    model, (whole, _) = wide_model(make_mesh()), one_shot(ckv, index_keys)
    _, result = prefilled(ckv, index_keys, chunk_size=37, seed=1)
    np.testing.assert_allclose(result.logits[0], whole.logits[0], rtol=0, atol=FLIPPED)
    want = selected_sets(whole.selected[0][0])
    assert sum(a != b for a, b in zip(selected_sets(result.selected[0][0]), want, strict=True)) <= 2
    batch, result = prefilled(ckv, index_keys, seed=2, length=LENGTH - DECODED)
    other = 0
    for t in range(LENGTH - DECODED, LENGTH):
        batch.requests[0].append(wide_prompt()[t])
        result = run(model, batch, result.cache)
        np.testing.assert_allclose(result.logits[0][0], whole.logits[0][t], rtol=0, atol=FLIPPED)
        other += set(result.selected[0][0][0].tolist()) - {-1} != want[t]
    assert other <= 1


def test_open_pools_are_kept_in_the_models_dtype():
    """The ring holds what pools are made of, not what is stored of them."""
    batch, result = prefilled("fp8_ds_mla", "fp8")
    state = jax.tree.map(lambda x: (x.shape, x.dtype.name), result.cache.state)
    assert state.ring == ((1, 1, 2, POOL - 1, 128), "float32") and batch.slots == 1
    assert state.kda[1] == "float32"
