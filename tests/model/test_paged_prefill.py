"""Prefill and decode through pages: any page size, chunks, tables and order; foreign bytes change nothing."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsa_jax.batch
from dsa_jax.batch import build_step
from dsa_jax.prefill import NonFiniteWarning
from dsa_jax.step import StepRunner
from tests.model.paged_cases import ROOM, bytes_of, foreign_cache, paged_batch, run
from tests.support import answers, assert_selected, geometry, load_model, prompt

VARIANT = "glm52"  # layers that share a selection among them
TOLERANCE = 5e-5


@pytest.fixture(autouse=True)
def one_program(monkeypatch):
    """Wide buckets: steps of every kind then share one compiled program for each geometry."""
    for name, size in {"MIN_ROWS": 128, "MIN_KEYS": 256, "MIN_REQUESTS": 4}.items():
        monkeypatch.setattr(dsa_jax.batch, name, size)


def assert_oracle(result, names: list[str]) -> None:
    """Logits within the tolerance and selections exactly."""
    for i, name in enumerate(names):
        want = answers(VARIANT)[f"{name}_logits"][0]
        np.testing.assert_allclose(result.logits[i], want, rtol=0, atol=TOLERANCE)
        assert_selected(result.selected[i], VARIANT, name)
        if f"{name}_gen_tokens" in answers(VARIANT):
            assert result.logits[i][-1].argmax() == answers(VARIANT)[f"{name}_gen_tokens"][0][0]


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_any_pages_chunks_and_order_give_the_oracles_answers(page_size):
    """Cut anywhere, in any order, in pages drawn at random out of bytes that are NaN; foreign pages keep theirs."""
    model = load_model(VARIANT)
    pages = geometry(model, page_size=page_size)
    for seed, (chunk_size, names) in enumerate(
        [(128, ["s97", "s7", "s1"]), (40, ["s1", "s97", "s7"]), (9, ["s7", "s1", "s97"])]
    ):
        batch = paged_batch(model, [prompt(VARIANT, name) for name in names], pages, seed)
        result = run(model, batch, foreign_cache(model, pages, batch.pages), chunk_size=chunk_size)
        assert_oracle(result, names)
        written = {p for r in batch.requests for p in r.pages[: -(-len(r.tokens) // page_size)].tolist()}
        foreign = [p for p in range(batch.pages) if p not in written]
        assert 0 in foreign
        for array in (result.cache.ckv, result.cache.index_keys):
            assert (bytes_of(array)[:, foreign] == 0xFF).all()
            assert not (bytes_of(array)[:, sorted(written)] == 0xFF).all(axis=2).any()


def test_pages_anywhere_equal_a_contiguous_cache():
    """To the bit, whether a request's pages follow one another or are drawn at random.

    Pages of another size make another program, whose sums may round in another way.
    """
    model, names = load_model(VARIANT), ["s97", "s33", "s7"]
    prompts = [prompt(VARIANT, name) for name in names]

    def prefilled(page_size: int, seed: int | None):
        pages = geometry(model, page_size=page_size)
        batch = paged_batch(model, prompts, pages, seed or 0)
        if seed is None:
            for i, request in enumerate(batch.requests):
                request.pages = np.arange(len(request.pages)) + i * len(request.pages)
        return run(model, batch, foreign_cache(model, pages, batch.pages), chunk_size=40)

    contiguous, scattered, larger = prefilled(16, None), prefilled(16, 3), prefilled(64, None)
    for i in range(len(names)):
        np.testing.assert_array_equal(scattered.logits[i], contiguous.logits[i])
        np.testing.assert_array_equal(scattered.selected[i], contiguous.selected[i])
        np.testing.assert_allclose(larger.logits[i], contiguous.logits[i], rtol=0, atol=1e-5)
        np.testing.assert_array_equal(np.sort(larger.selected[i]), np.sort(contiguous.selected[i]))


def test_decode_rows_beside_prompts_give_the_oracles_answers():
    """Two requests decode, a token a step, while a third is prefilled in the rows that are left; then all decode."""
    model, names = load_model(VARIANT), ["s97", "s33", "s7"]
    prompts = [prompt(VARIANT, name) for name in names]
    batch = paged_batch(model, [prompts[0][:88], prompts[1][:1], prompts[2][:2]], geometry(model), seed=5)
    runner, cache = StepRunner(model), foreign_cache(model, batch.geometry, batch.pages)
    logits, selected, kinds = [[], [], []], [[], [], []], set()
    while step := build_step(batch.requests, batch.geometry, groups=1, chunk_size=12, logits="all"):
        kinds |= {frozenset(piece.count == 1 for piece in step.pieces)}
        outputs = runner(step, cache, return_selected=True)
        cache = outputs.cache
        for piece in step.pieces:
            request, tokens = batch.requests[piece.request], prompts[piece.request]
            rows = slice(piece.first_row, piece.first_row + piece.count)
            logits[piece.request].append(np.asarray(outputs.logits)[rows, : model.config.vocab_size])
            selected[piece.request].append(np.asarray(outputs.selected)[:, rows])
            request.cached += piece.count
            if request.pending == 0 and len(request.tokens) < len(tokens):
                request.append(tokens[len(request.tokens)])
    assert kinds == {frozenset({False}), frozenset({True}), frozenset({False, True})}
    for i, name in enumerate(names):
        want = answers(VARIANT)[f"{name}_logits"][0]
        np.testing.assert_allclose(np.concatenate(logits[i]), want, rtol=0, atol=TOLERANCE)
        assert_selected(np.concatenate(selected[i], axis=1), VARIANT, name)


def test_a_request_whose_pages_are_poisoned_harms_no_other():
    """NaN in the history of one request changes no bit of the others in the same steps."""
    model, pages = load_model(VARIANT), geometry(load_model(VARIANT))
    prompts = [prompt(VARIANT, "s33"), prompt(VARIANT, "s97")[:40], prompt(VARIANT, "s7")]
    results = []
    for poison in (False, True):
        batch = paged_batch(model, [prompts[0][:20], prompts[1][:20], prompts[2][:3]], pages, seed=7)
        cache = run(model, batch, foreign_cache(model, pages, batch.pages)).cache
        if poison:
            bad = jnp.asarray(batch.requests[1].pages)
            cache = jax.tree.map(lambda x, bad=bad: x.at[:, bad].set(jnp.nan), cache)
        for request, tokens in zip(batch.requests, prompts, strict=True):
            request.tokens = np.array(tokens, np.int64)
        with pytest.warns(NonFiniteWarning, match=r"prompts \[1\]") if poison else contextlib.nullcontext():
            results.append(run(model, batch, cache, chunk_size=50))
    clean, poisoned = results
    assert np.isnan(poisoned.logits[1]).all(), "the poison acts where it is"
    for i in (0, 2):
        np.testing.assert_array_equal(poisoned.logits[i], clean.logits[i])
        np.testing.assert_array_equal(poisoned.selected[i], clean.selected[i])
    np.testing.assert_allclose(clean.logits[0], answers(VARIANT)["s33_logits"][0][20:], rtol=0, atol=TOLERANCE)


def test_shared_pages_give_the_answers_of_own_ones():
    """Two requests read the pages of a third's beginning; each writes only pages of its own."""
    model, pages = load_model(VARIANT), geometry(load_model(VARIANT))
    tokens = prompt(VARIANT, "s97")
    other = [*tokens[:32], *tokens[:5]]
    batch = paged_batch(model, [tokens[:64], tokens, other], pages, seed=9)
    first, second, third = batch.requests
    batch.requests[:] = [first]
    cache = run(model, batch, foreign_cache(model, pages, batch.pages)).cache
    before = bytes_of(cache.ckv)[:, first.pages]
    for request, count in ((second, 4), (third, 2)):
        request.pages[:count] = first.pages[:count]
        request.cached = count * pages.page_size
    batch.requests[:] = [third, second]
    result = run(model, batch, cache)
    np.testing.assert_allclose(result.logits[1], answers(VARIANT)["s97_logits"][0][64:], rtol=0, atol=TOLERANCE)
    for layer, ids in enumerate(result.selected[1]):
        want = answers(VARIANT)[f"s97_sel_L{layer}"][0][64:]
        assert [set(row.tolist()) for row in ids] == [set(row.tolist()) for row in want]
    np.testing.assert_array_equal(bytes_of(result.cache.ckv)[:, first.pages], before)
    # The third one's answers are those of a request that ran all of its tokens itself.
    alone = paged_batch(model, [other], pages, seed=11)
    whole = run(model, alone, foreign_cache(model, pages, alone.pages))
    np.testing.assert_allclose(result.logits[0], whole.logits[0][32:], rtol=0, atol=2e-5)


def test_a_step_of_padding_alone_writes_nothing():
    """No request at all: not a byte of the cache changes, and nothing is selected."""
    model, pages = load_model(VARIANT), geometry(load_model(VARIANT))
    batch = paged_batch(model, [prompt(VARIANT, "s7")], pages, seed=0)
    step = build_step(batch.requests, pages, groups=1, chunk_size=128, logits="all")
    assert step is not None
    nothing = {"query_start_loc": np.zeros(5, np.int32), "seq_lens": np.zeros(4, np.int32)}
    nothing["block_table"] = np.full((4, ROOM // 16), -1, np.int32)
    step = dataclasses.replace(step, inputs=dataclasses.replace(step.inputs, **nothing))
    outputs = StepRunner(model)(step, foreign_cache(model, pages, batch.pages), return_selected=True)
    for array in (outputs.cache.ckv, outputs.cache.index_keys):
        assert (bytes_of(array) == 0xFF).all()
    assert (np.asarray(outputs.selected) == -1).all()
    assert np.isfinite(np.asarray(outputs.logits)).all()


def test_out_of_pages_is_said_before_anything_is_written():
    """A prompt whose third chunk would not fit fails at once, and the cache is still the caller's."""
    model, pages = load_model(VARIANT), geometry(load_model(VARIANT))
    tokens = prompt(VARIANT, "s97")
    batch = paged_batch(model, [tokens], pages, seed=1)
    enough = batch.requests[0].pages
    batch.requests[0].pages = enough[:5]
    cache = foreign_cache(model, pages, batch.pages)
    with pytest.raises(ValueError, match="request 0 needs 7 pages of 16 tokens, has 5"):
        run(model, batch, cache, chunk_size=40)
    assert batch.requests[0].cached == 0
    assert (bytes_of(cache.ckv) == 0xFF).all()
    batch.requests[0].pages = enough
    assert_oracle(run(model, batch, cache, chunk_size=40), ["s97"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda batch: setattr(batch.requests[0], "pages", np.array([99])), "request 0 names page 99, the cache has"),
        (lambda batch: setattr(batch.requests[0], "group", 2), "request 0 is of data group 2, there are 1"),
        (lambda batch: setattr(batch, "pages", 10**6), "the batch needs 1000000"),
        (lambda batch: setattr(batch, "groups", 2), "batch.groups=2 must equal the mesh's data size 1"),
    ],
)
def test_a_batch_for_another_cache_is_refused(change, message):
    """A page that does not exist would be dropped in silence."""
    model = load_model(VARIANT)
    batch = paged_batch(model, [prompt(VARIANT, "s7")], geometry(model), seed=0)
    cache = batch.init_cache(model)
    change(batch)
    with pytest.raises(ValueError, match=message):
        run(model, batch, cache)
    assert not cache.ckv.is_deleted()
