"""The record formats through the whole model: what they cost, and that cutting prompts costs nothing.

The checkpoint has the released widths, 512 + 64 and index keys of 128; its answers in float32 are the oracle's. Its
routers choose among few experts, so that a rounded record now and then sends a row to other experts: errors are bounded
for the median row, and over all rows. Measured:

| records, index keys | median row | all rows | furthest selected score |
|---|---|---|---|
| bf16, bf16 | 0.0036 | 0.044 | 0.005 |
| fp8_ds_mla, fp8 | 0.041 | 0.13 | 0.13 |
| nvfp4_ds_mla, fp8 | 0.124 | 0.19 | 0.13 |
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import dsa_jax.batch
from dsa_jax.layers.rope import cos_sin
from dsa_jax.prefill import PrefillResult
from dsa_jax.testing import assert_same_selections, selected_sets
from tests.model.paged_cases import bytes_of, foreign_cache, paged_batch, run
from tests.support import answers, geometry, load_model, prompt

VARIANT, NAME, LENGTH, DECODED = "glm5_wide", "s300", 224, 2
TOP_K = 128


@dataclasses.dataclass(frozen=True)
class Formats:
    """Formats, and bounds on what they cost.

    Attributes:
      ckv: Format of the records.
      index_keys: Format of the index keys.
      median_error: Of the relative errors of the rows' logits.
      error: Relative error of all logits together.
      margin: How far a selected key's score may be below the last rank's, or an unselected one's above it, in standard
        deviations of the row's scores.
    """

    ckv: str
    index_keys: str
    median_error: float
    error: float
    margin: float


CASES = (
    Formats("bf16", "bf16", median_error=0.006, error=0.07, margin=0.01),
    Formats("fp8_ds_mla", "fp8", median_error=0.06, error=0.2, margin=0.2),
    Formats("nvfp4_ds_mla", "fp8", median_error=0.18, error=0.3, margin=0.2),
)
every_format = pytest.mark.parametrize("case", CASES, ids=lambda case: case.ckv)


@pytest.fixture(autouse=True)
def one_program(monkeypatch):
    """Wide buckets: steps of every kind then share one compiled program for each format."""
    for name, size in {"MIN_ROWS": 256, "MIN_KEYS": 256, "MIN_REQUESTS": 2}.items():
        monkeypatch.setattr(dsa_jax.batch, name, size)


def prefilled(case: Formats, *, chunk_size: int, seed: int, length: int = LENGTH) -> tuple:
    """The batch and what prefill made of it, in a cache that was full of foreign bytes."""
    model = load_model(VARIANT)
    pages = geometry(model, kv_format=case.ckv, index_format=case.index_keys)
    batch = paged_batch(model, [prompt(VARIANT, NAME)[:length]], pages, seed, room=256)
    return batch, run(model, batch, foreign_cache(model, pages, batch.pages), chunk_size=chunk_size)


@functools.cache
def one_shot(case: Formats) -> PrefillResult:
    """The whole prompt in one step."""
    return prefilled(case, chunk_size=256, seed=0)[1]


@functools.cache
def float32_scores() -> np.ndarray:
    """Scores of the first layer's indexer [T, S], whose inputs no format has touched."""
    model = load_model(VARIANT)
    graphdef, state = nnx.split(model.segments[0][0])
    layer = nnx.merge(graphdef, jax.tree.map(lambda x: x[0], state))
    tokens = jnp.asarray(prompt(VARIANT, NAME)[:LENGTH])
    positions = jnp.arange(LENGTH, dtype=jnp.int32)
    hidden = layer.input_layernorm(model.embed_tokens[...][tokens])
    rotation = cos_sin(model.config.rope, model.config.qk_rope_head_dim, positions)
    q, k, weights = layer.self_attn.indexer(hidden, layer.self_attn.query_latent(hidden), *rotation)
    logits = np.einsum("thd,sd->ths", np.asarray(q, np.float64), np.asarray(k, np.float64))
    return np.einsum("ths,th->ts", np.maximum(logits, 0), np.asarray(weights, np.float64))


@every_format
def test_error_against_float32_is_bounded(case):
    """Logits of a prompt whose rows select 128 of up to 224 keys."""
    want = answers(VARIANT)[f"{NAME}_logits"][0][:LENGTH]
    wrong = one_shot(case).logits[0] - want
    rows = np.linalg.norm(wrong, axis=1) / np.linalg.norm(want, axis=1)
    assert np.median(rows) < case.median_error
    assert np.linalg.norm(wrong) / np.linalg.norm(want) < case.error
    assert np.median(rows) > 1e-5, "the format is not used"


@every_format
def test_selected_scores_are_within_a_margin(case):
    """The first layer's selection is that of float32 but for keys near its last rank; rows up to k see all keys."""
    selected = selected_sets(one_shot(case).selected[0][0])
    assert all(ids == frozenset(range(t + 1)) for t, ids in enumerate(selected[:TOP_K]))
    scores = float32_scores()
    for t in range(TOP_K, LENGTH):
        row = scores[t, : t + 1]
        last, chosen = np.sort(row)[-TOP_K], sorted(selected[t])
        assert len(chosen) == TOP_K
        furthest = max(last - row[chosen].min(), np.delete(row, chosen).max() - last)
        assert furthest < case.margin * row.std(), f"row {t}"


@every_format
def test_chunks_and_decode_equal_one_shot(case):
    """Records are packed before they are attended to: a key is the same from the cache and from its own step."""
    model, whole = load_model(VARIANT), one_shot(case)
    batch, result = prefilled(case, chunk_size=120, seed=1)
    np.testing.assert_allclose(result.logits[0], whole.logits[0], rtol=0, atol=2e-5)
    assert_same_selections(result.selected[0], whole.selected[0])
    foreign = sorted(set(range(batch.pages)) - set(batch.requests[0].pages[: LENGTH // 16].tolist()))
    assert (bytes_of(result.cache.ckv)[:, foreign] == 0xFF).all()
    assert (bytes_of(result.cache.index_keys)[:, foreign] == 0xFF).all()
    batch, result = prefilled(case, chunk_size=256, seed=2, length=LENGTH - DECODED)
    for t in range(LENGTH - DECODED, LENGTH):
        batch.requests[0].append(prompt(VARIANT, NAME)[t])
        result = run(model, batch, result.cache)
        np.testing.assert_allclose(result.logits[0][0], whole.logits[0][t], rtol=0, atol=2e-5)
        for layer, ids in enumerate(result.selected[0]):
            assert set(ids[0].tolist()) == set(whole.selected[0][layer][t].tolist())
