"""Continuous batching over a real checkpoint: whoever shares a step or a page, the tokens are the oracle's."""

import jax
import numpy as np
import pytest

import dsa_jax.batch
from dsa_jax.cache import init_cache
from dsa_jax.engine import Engine, EngineOptions
from dsa_jax.generate import generate
from dsa_jax.page_allocator import OutOfPagesError
from tests.model.paged_cases import foreign_cache
from tests.support import answers, load_model, prompt

VARIANT = "dsv32"  # 256 positions, 12 of up to 256 keys
PAGES, PAGE_SIZE, CHUNK = 20, 16, 48
NEW = 16  # tokens that the oracle generated


@pytest.fixture(autouse=True)
def one_program(monkeypatch):
    """Wide buckets: all steps of this file share one compiled program."""
    for name, size in {"MIN_ROWS": 64, "MIN_KEYS": 512, "MIN_REQUESTS": 4, "MIN_PAGES": 16}.items():
        monkeypatch.setattr(dsa_jax.batch, name, size)


def make_engine(*, chunk_size: int = CHUNK, **options) -> Engine:
    """An engine whose free pages hold NaN."""
    model = load_model(VARIANT)
    engine = Engine(model, PAGES, EngineOptions(page_size=PAGE_SIZE, chunk_size=chunk_size, **options))
    engine.cache = foreign_cache(model, engine.geometry, PAGES)
    return engine


def drain(engine: Engine) -> dict[int, list[int]]:
    """The tokens of each request until the engine is idle."""
    tokens: dict[int, list[int]] = {}
    while not engine.idle:
        for event in engine.step():
            tokens.setdefault(event.request, []).append(event.token)
    return tokens


def add(engine: Engine, name: str) -> int:
    """Queue one of the oracle's prompts."""
    return engine.add(prompt(VARIANT, name), max_new_tokens=NEW, ignore_eos=True)


def oracle(name: str) -> list[int]:
    """What the oracle generated."""
    return answers(VARIANT)[f"{name}_gen_tokens"][0].tolist()


def assert_all_free(engine: Engine) -> None:
    """Every page is free, and none is handed out twice."""
    (allocator,) = engine.allocators
    assert allocator.num_free == PAGES
    assert sorted(allocator.alloc(PAGES)) == list(range(PAGES))
    allocator.free(list(range(PAGES)))


def test_requests_wait_for_pages_and_all_finish():
    """Six requests that need 33 pages over 20: some wait, all get the oracle's tokens, every page comes back."""
    engine, names = make_engine(prefix_reuse=False), ["s97", "s33", "s97", "s7", "s97", "s33"]
    numbers = [add(engine, name) for name in names]
    events = engine.step()
    assert len(engine.waiting) >= 2, "there is room for all: nothing is tested"
    tokens = {event.request: [event.token] for event in events}
    for number, more in drain(engine).items():
        tokens.setdefault(number, []).extend(more)
    assert [tokens[number] for number in numbers] == [oracle(name) for name in names]
    assert_all_free(engine)


def test_late_requests_prefill_beside_decoding_ones():
    """Requests that arrive while others decode change nobody's tokens and stop nobody."""
    engine = make_engine()
    add(engine, "s33")
    tokens: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for number, name in ((1, "s97"), (2, "s7")):
        for _ in range(3):
            for event in engine.step():
                tokens[event.request].append(event.token)
        assert add(engine, name) == number
        before = len(tokens[0])
        for event in engine.step():
            tokens[event.request].append(event.token)
        assert len(tokens[0]) == before + 1, "the first request decodes beside the new prompt"
    for number, more in drain(engine).items():
        tokens[number] += more
    assert [tokens[0], tokens[1], tokens[2]] == [oracle("s33"), oracle("s97"), oracle("s7")]
    assert_all_free(engine)


@pytest.mark.parametrize("reuse", [True, False])
def test_a_common_beginning_is_reused(reuse):
    """A second request with the first one's prompt runs its last token alone, and gets the same tokens."""
    engine = make_engine(prefix_reuse=reuse)
    add(engine, "s97")
    assert drain(engine) == {0: oracle("s97")}
    add(engine, "s97")
    engine.step()
    (sequence,) = engine.running
    assert sequence.cached == (97 if reuse else CHUNK)
    tokens = [sequence.tokens[97:].tolist()] if reuse else [[]]
    assert tokens[0] + drain(engine)[1] == oracle("s97")
    assert_all_free(engine)


def test_a_request_reads_pages_while_their_owner_decodes():
    """Pages of a running request are shared as soon as its prompt is done; both go on in pages of their own."""
    engine = make_engine(chunk_size=64)
    add(engine, "s97")
    tokens = [[event.token for _ in range(3) for event in engine.step()], []]
    add(engine, "s97")
    for event in engine.step():
        tokens[event.request].append(event.token)
    first, second = engine.running
    assert second.pages[:6].tolist() == first.pages[:6].tolist()
    assert not set(second.pages[6:].tolist()) & set(first.pages.tolist())
    for number, more in drain(engine).items():
        tokens[number] += more
    assert tokens == [oracle("s97"), oracle("s97")]
    assert_all_free(engine)


def test_prompts_of_the_models_maximum_length():
    """256 of 256 tokens give one new token, 251 give six; whatever the chunks."""
    limit = load_model(VARIANT).config.max_position_embeddings
    assert limit == 256
    longest = (prompt(VARIANT, "s97") * 3)[:limit]
    found = []
    for chunk_size in (CHUNK, 31):
        engine = make_engine(chunk_size=chunk_size)
        engine.add(longest, max_new_tokens=9, ignore_eos=True)
        full = drain(engine)[0]
        engine = make_engine(chunk_size=chunk_size)
        engine.add(longest[:251], max_new_tokens=9, ignore_eos=True)
        found.append((full, drain(engine)[0]))
        assert_all_free(engine)
    assert found[0] == found[1]
    assert (len(found[0][0]), len(found[0][1])) == (1, 6)
    with pytest.raises(ValueError, match="prompt 0 has 257 tokens, more than the model's maximum of 256"):
        engine.add([1] * 257)


def test_a_prompt_of_one_token():
    """Alone and beside others it gets the tokens that generating from it token by token gives."""
    engine = make_engine()
    engine.add(prompt(VARIANT, "s1"), max_new_tokens=4, ignore_eos=True)
    alone = drain(engine)[0]
    for done in range(1, 4):
        other = make_engine()
        other.add([*prompt(VARIANT, "s1"), *alone[:done]], max_new_tokens=1, ignore_eos=True)
        assert drain(other)[0] == alone[done : done + 1]
    add(engine, "s33")
    engine.add(prompt(VARIANT, "s1"), max_new_tokens=4, ignore_eos=True)
    assert drain(engine) == {1: oracle("s33"), 2: alone}


def test_a_request_whose_history_is_nan_ends_alone():
    """Its logits are NaN: it ends without a token, the one beside it gets the oracle's."""
    engine = make_engine(prefix_reuse=False)
    add(engine, "s33"), add(engine, "s7")
    tokens = [event.token for event in engine.step() if event.request == 0]
    bad = np.array(engine.running[1].pages)
    engine.cache = jax.tree.map(lambda x: x.at[:, bad].set(np.nan), engine.cache)
    events = engine.step()
    assert [(event.token, event.finished) for event in events if event.request == 1] == [(-1, "nonfinite")]
    tokens += [event.token for event in events if event.request == 0]
    assert tokens + drain(engine)[0] == oracle("s33")
    assert_all_free(engine)


def test_too_large_a_request_changes_nothing():
    """It is refused before anything is written; the others' tokens and pages are as they were."""
    engine = make_engine()
    add(engine, "s33")
    tokens = [event.token for event in engine.step()]
    small = Engine(load_model(VARIANT), 6, engine.options)
    with pytest.raises(OutOfPagesError, match="out of pages: 7 needed, 6 of 6 free"):
        small.add(prompt(VARIANT, "s97"), max_new_tokens=NEW)
    assert small.idle and small.allocators[0].num_free == 6
    assert tokens + drain(engine)[0] == oracle("s33")
    with pytest.raises(OutOfPagesError, match="prompt 0: out of pages: 7 needed, 6 of 6 free"):
        generate(load_model(VARIANT), [prompt(VARIANT, "s97")], max_new_tokens=NEW, max_pages=6, engine=engine.options)


def test_a_step_that_cannot_be_built_leaves_engine_and_cache():
    """Pages that a caller took away are missed before the cache is donated; given back, the engine goes on."""
    engine = make_engine()
    add(engine, "s97")
    engine.step()
    (sequence,) = engine.running
    pages, cached, cache = sequence.pages, sequence.cached, engine.cache
    sequence.pages = pages[:4]
    with pytest.raises(ValueError, match="request 0 needs 6 pages of 16 tokens, has 4"):
        engine.step()
    assert engine.cache is cache and not cache.ckv.is_deleted() and sequence.cached == cached
    sequence.pages = pages
    assert drain(engine) == {0: oracle("s97")}


def test_caches_are_empty_and_of_the_models_dtype():
    """What an engine starts with."""
    model = load_model(VARIANT)
    engine = make_engine()
    cache = init_cache(model.config, engine.geometry, PAGES, model.mesh)
    assert cache.ckv.shape == (4, PAGES, PAGE_SIZE, 56) and cache.ckv.dtype == model.dtype
    assert cache.pages == PAGES
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(cache))
    with pytest.raises(ValueError, match="more than int32 slots can name"):
        init_cache(model.config, engine.geometry, 2**28, model.mesh)
