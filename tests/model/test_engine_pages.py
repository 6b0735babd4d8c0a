"""The engine's host side against a device of NumPy pages: no page leaks, none has two writers, no token is lost."""

import dataclasses
import hashlib
import types

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import dsa_jax.engine
from dsa_jax.engine import Engine, EngineOptions, TokenEvent
from dsa_jax.page_allocator import OutOfPagesError
from sharding.mesh import make_mesh

VOCAB, EOS, MAX_LENGTH = 64, 7, 40


def records(tokens, before: int = 0) -> list[int]:
    """What the pretended model stores for `tokens` behind a token with the record `before`.

    As in a real model a record depends on all tokens up to its own.
    """
    found = []
    for token in tokens:
        before = int.from_bytes(hashlib.blake2b(f"{before} {token}".encode(), digest_size=7).digest())
        found.append(before)
    return found


def next_token(tokens) -> int:
    """What the pretended model says behind `tokens`."""
    return records(tokens)[-1] % VOCAB


def expected(prompt: list[int], max_new_tokens: int, ignore_eos: bool) -> tuple[list[int], str]:
    """What a request gets when it is alone."""
    tokens, new = list(prompt), []
    while True:
        new.append(next_token(tokens))
        if new[-1] == EOS and not ignore_eos:
            return new, "eos"
        if len(new) == max_new_tokens or len(tokens) == MAX_LENGTH:
            return new, "length"
        tokens.append(new[-1])


class NumpyPages:
    """Stands in for the compiled step: reads the history of each request from its pages, then writes its records.

    Its logits are the next tokens themselves.
    """

    def __init__(self, groups: int, pages: int, tokens_per_page: int, chunk_size: int):
        self.pages = np.full((groups, pages, tokens_per_page, 2), -1, np.int64)  # token, record
        self.chunk_size = chunk_size
        self.rows: list[int] = []
        self.fails = False

    def __call__(self, step, cache):
        """Run a step."""
        if self.fails:
            raise RuntimeError("the step failed")
        groups, _, per_page, _ = self.pages.shape
        inputs = {name: np.split(getattr(step.inputs, name), groups) for name in ("tokens", "query_start_loc")}
        inputs |= {name: np.split(getattr(step.inputs, name), groups) for name in ("seq_lens", "block_table")}
        logits, writes = [], []
        for group in range(groups):
            tokens, starts, lengths, table = (inputs[name][group] for name in inputs)
            assert starts[-1] <= self.chunk_size
            counts, decodes = np.diff(starts), []
            for request, count in enumerate(counts):
                context, pages = lengths[request] - count, table[request]
                where = [(group, pages[t // per_page], t % per_page) for t in range(lengths[request])]
                assert all(page >= 0 for _, page, _ in where)
                history = [self.pages[slot].tolist() for slot in where[:context]]
                stored = [record for _, record in history]
                assert stored == records(token for token, _ in history), "records of different prefixes"
                new = tokens[starts[request] : starts[request + 1]].tolist()
                made = records(new, stored[-1] if stored else 0)
                writes += zip(where[context:], zip(new, made, strict=True), strict=True)
                logits.append(made[-1] % VOCAB if made else 0)
                decodes += [count == 1 and context > 0] if count else []
            # The last one may be a prompt that the end of the chunk cut down to a single row.
            assert decodes[:-1] == sorted(decodes[:-1], reverse=True), "decode rows come first"
            self.rows.append(int(starts[-1]))
        assert len({slot for slot, _ in writes}) == len(writes), "a slot that two rows write"
        for slot, written in writes:
            self.pages[slot] = written
        return types.SimpleNamespace(cache=cache, logits=np.array(logits))


class HostEngine(Engine):
    """The engine over `NumpyPages`, whose logits are tokens."""

    def _sample(self, logits, step):
        return logits


@dataclasses.dataclass(frozen=True)
class _Indexer:
    head_dim: int = 16


@dataclasses.dataclass(frozen=True)
class _Config:
    """What the engine reads of a model's configuration."""

    vocab_size: int = VOCAB
    max_position_embeddings: int = MAX_LENGTH
    eos_token_ids: tuple[int, ...] = (EOS,)
    kv_lora_rank: int = 32
    qk_rope_head_dim: int = 8
    index_kpool: int = 1
    kda: None = None
    indexer: _Indexer = dataclasses.field(default_factory=_Indexer)


def host_engine(pages: int, *, page_size: int = 4, chunk_size: int = 16, groups: int = 1, **options) -> HostEngine:
    """An engine that compiles nothing."""
    model = types.SimpleNamespace(config=_Config(), mesh=make_mesh(data=groups), dtype=np.dtype(np.float32))
    runner = NumpyPages(groups, pages, page_size, chunk_size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dsa_jax.engine, "init_cache", lambda *_, **__: types.SimpleNamespace(slots=None))
        patch.setattr(dsa_jax.engine, "StepRunner", lambda *_: runner)
        return HostEngine(model, pages, EngineOptions(page_size=page_size, chunk_size=chunk_size, **options))


def drain(engine: Engine, limit: int = 1000) -> list[TokenEvent]:
    """Every event until the engine is idle."""
    events = []
    for _ in range(limit):
        if engine.idle:
            return events
        events += engine.step()
    raise AssertionError(f"not idle after {limit} steps")


def tokens_of(events: list[TokenEvent], request: int) -> list[int]:
    """The tokens of one request."""
    return [event.token for event in events if event.request == request]


def all_free(engine: Engine) -> bool:
    """Whether every page is free."""
    return all(allocator.num_free == allocator.num_pages for allocator in engine.allocators)


class Requests(RuleBasedStateMachine):
    """Random requests, most with beginnings in common, over few pages; now and then a step that fails."""

    @initialize(
        pages=st.integers(1, 14),
        page_size=st.sampled_from([1, 3, 4]),
        chunk_size=st.integers(1, 20),
        groups=st.sampled_from([1, 2]),
        prefix_reuse=st.booleans(),
    )
    def start(self, pages, page_size, chunk_size, groups, prefix_reuse):
        self.engine = host_engine(
            pages, page_size=page_size, chunk_size=chunk_size, groups=groups, prefix_reuse=prefix_reuse
        )
        self.wanted: list[tuple[list[int], str]] = []
        self.got: list[TokenEvent] = []

    @rule(
        start=st.sampled_from([[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [9, 9, 9, 9, 5, 6, 7, 8]]),
        kept=st.integers(0, 12),
        end=st.lists(st.integers(0, 1), min_size=1, max_size=MAX_LENGTH - 12),
        max_new_tokens=st.integers(1, 12),
        ignore_eos=st.booleans(),
    )
    def add(self, start, kept, end, max_new_tokens, ignore_eos):
        prompt = start[:kept] + end
        allocator = self.engine.allocators[0]
        before = (len(self.engine.waiting), self.engine.added)
        needed = allocator.pages_for(min(len(prompt) + max_new_tokens - 1, MAX_LENGTH))
        if needed > allocator.num_pages:
            with pytest.raises(OutOfPagesError, match=f"{needed} needed, {allocator.num_pages} of"):
                self.engine.add(prompt, max_new_tokens=max_new_tokens, ignore_eos=ignore_eos)
            assert (len(self.engine.waiting), self.engine.added) == before
            return
        number = self.engine.add(prompt, max_new_tokens=max_new_tokens, ignore_eos=ignore_eos)
        assert number == len(self.wanted)
        self.wanted.append(expected(prompt, max_new_tokens, ignore_eos))

    @precondition(lambda self: not self.engine.idle)
    @rule()
    def step(self):
        work = self.progress()
        decoding = {sequence.number for sequence in self.engine.running if sequence.decodes}
        events = self.engine.step()
        self.got += events
        assert self.progress() > work, "a step that does nothing would be repeated for ever"
        assert decoding <= {event.request for event in events}, "a request that decodes was passed over"

    @precondition(lambda self: not self.engine.idle)
    @rule()
    def failing_step(self):
        self.engine.runner.fails = True
        with pytest.raises(RuntimeError, match="the step failed"):
            self.engine.step()
        self.engine.runner.fails = False

    def progress(self) -> int:
        """Tokens that have been run or reused, ended requests counted in full."""
        running = sum(sequence.cached for sequence in self.engine.running)
        return running + 1000 * sum(event.finished is not None for event in self.got) + len(self.got)

    @invariant()
    def pages_are_held_by_who_uses_them(self):
        if not hasattr(self, "engine"):
            return
        for group, allocator in enumerate(self.engine.allocators):
            sequences = [s for s in self.engine.running if s.group == group]
            held = [page for sequence in sequences for page in sequence.pages.tolist()]
            refs = [allocator.ref_count(page) for page in range(allocator.num_pages)]
            assert refs == [held.count(page) for page in range(allocator.num_pages)]
            assert allocator.num_free == refs.count(0)
            for sequence in sequences:
                written = sequence.pages[sequence.cached // allocator.tokens_per_page :]
                assert all(held.count(page) == 1 for page in written.tolist()), "a page to write that another holds"

    @invariant()
    def requests_are_admitted_in_order(self):
        if hasattr(self, "engine"):
            numbers = [sequence.number for sequence in (*self.engine.running, *self.engine.waiting)]
            assert numbers == sorted(numbers)

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        self.got += drain(self.engine)
        assert all_free(self.engine)
        for number, (tokens, finished) in enumerate(self.wanted):
            assert tokens_of(self.got, number) == tokens
            ends = [event.finished for event in self.got if event.request == number]
            assert ends == [None] * (len(tokens) - 1) + [finished]


TestRequests = Requests.TestCase
TestRequests.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("reuse", [True, False])
def test_a_common_beginning_is_run_once(reuse):
    """The second request runs only what the first did not: its last page and what differs."""
    engine = host_engine(20, prefix_reuse=reuse, chunk_size=64)
    first = list(range(10, 32))
    engine.add(first, max_new_tokens=3, ignore_eos=True)
    drain(engine)
    before = sum(engine.runner.rows)
    engine.add([*first[:14], 1, 2, 3], max_new_tokens=3, ignore_eos=True)
    events = drain(engine)
    assert tokens_of(events, 1) == expected([*first[:14], 1, 2, 3], 3, True)[0]
    assert sum(engine.runner.rows) - before == (17 - 12 if reuse else 17) + 2


def test_generated_pages_are_reused_too():
    """A second turn, whose prompt is the first prompt, its answer and a question, runs only its end."""
    engine = host_engine(20, chunk_size=64)
    prompt = [1, 2, 3, 4, 5]
    engine.add(prompt, max_new_tokens=9, ignore_eos=True)
    answer = tokens_of(drain(engine), 0)
    before = sum(engine.runner.rows)
    engine.add([*prompt, *answer, 6, 6], max_new_tokens=1)
    drain(engine)
    # 13 tokens were run, which fill 3 pages of 4; the last new token was returned and never run
    assert sum(engine.runner.rows) - before == 16 - 12


def test_the_prompt_itself_again_runs_its_last_page():
    """A prompt of whole pages is never covered in full: something must give the first logits."""
    engine = host_engine(20, chunk_size=64)
    for number in range(2):
        engine.add(list(range(10, 18)), max_new_tokens=1)
        assert tokens_of(drain(engine), number) == expected(list(range(10, 18)), 1, True)[0]
    assert engine.runner.rows == [8, 4]


@pytest.mark.parametrize(("length", "new"), [(MAX_LENGTH, 1), (MAX_LENGTH - 1, 2), (MAX_LENGTH - 5, 6)])
def test_requests_end_at_the_models_maximum_length(length, new):
    """Every position the model has is used: the last token comes from the last position."""
    engine = host_engine(10)
    engine.add([1] * length, max_new_tokens=30, ignore_eos=True)
    events = drain(engine)
    assert len(events) == new and events[-1].finished == "length"
    assert all_free(engine)


def test_bad_requests_change_nothing():
    """A prompt that does not fit the model or the cache, or no new tokens."""
    engine = host_engine(3)
    for prompt, options, error in (
        ([1] * (MAX_LENGTH + 1), {}, ValueError),
        ([], {}, ValueError),
        ([VOCAB], {}, ValueError),
        ([1], {"max_new_tokens": 0}, ValueError),
        ([1] * 12, {"max_new_tokens": 2}, OutOfPagesError),
    ):
        with pytest.raises(error):
            engine.add(prompt, **options)
    assert engine.idle and engine.added == 0 and all_free(engine)
    assert engine.step() == []
    engine.add([1] * 12, max_new_tokens=1)
    assert len(drain(engine)) == 1


def test_data_groups_share_the_load():
    """Requests go to the group with most free pages, and each keeps to its own."""
    engine = host_engine(4, groups=2)
    for _ in range(4):
        engine.add([1] * 5, max_new_tokens=3, ignore_eos=True)
    events = engine.step()
    assert [sequence.group for sequence in engine.running] == [0, 1, 0, 1]
    events += drain(engine)
    assert all_free(engine)
    assert len(events) == 12


def test_more_requests_than_a_step_has_rows():
    """Whoever decodes gets a token in every step; the others wait their turn, and a prompt is not starved either."""
    engine = host_engine(40, chunk_size=2)
    for _ in range(5):
        engine.add([1, 2, 3], max_new_tokens=6, ignore_eos=True)
    steps_of: dict[int, list[int]] = {}
    for step in range(100):
        assert len(engine.running) <= 2
        for event in engine.step():
            steps_of.setdefault(event.request, []).append(step)
        if engine.idle:
            break
    assert engine.idle and sorted(steps_of) == list(range(5))
    assert all(np.diff(steps).tolist() == [1] * 5 for steps in steps_of.values())


def test_a_request_goes_to_the_group_that_holds_its_beginning():
    """Though another one has more free pages; but not where that one has too few."""
    engine = host_engine(8, groups=2, chunk_size=64)
    start = list(range(10, 20))
    engine.add(start, max_new_tokens=15, ignore_eos=True)
    engine.step()
    assert engine.running[0].group == 0 and engine.allocators[0].num_free == 2
    engine.add([*start, 1], max_new_tokens=1)
    engine.add([2, 3, 4], max_new_tokens=10, ignore_eos=True)
    engine.add([*start, 1, 2, 3], max_new_tokens=6, ignore_eos=True)
    before = sum(engine.runner.rows)
    engine.step()
    assert [sequence.group for sequence in engine.running] == [0, 1, 1], "the second one has ended"
    # One row that decodes, the 3 tokens behind the two pages that group 0 holds, and whole prompts in group 1.
    assert sum(engine.runner.rows) - before == 1 + 3 + 3 + 13
    drain(engine)
    assert all_free(engine)


def test_logits_that_are_not_finite_end_their_request(monkeypatch):
    """It gets no token, its pages are free and known to nobody; the other one goes on."""
    engine = host_engine(12)
    engine.add([1, 2, 3, 4, 5], max_new_tokens=4, ignore_eos=True)
    engine.add([9, 9, 9, 9, 9], max_new_tokens=4, ignore_eos=True)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_sample", lambda logits, _: np.where(np.arange(len(logits)) == 1, -1, logits))
        events = engine.step()
    assert events[1] == TokenEvent(1, -1, "nonfinite")
    events += drain(engine)
    assert tokens_of(events, 0) == expected([1, 2, 3, 4, 5], 4, True)[0]
    assert tokens_of(events, 1) == [-1] and all_free(engine)
    assert engine.allocators[0].lookup_prefix([9, 9, 9, 9, 9]).num_tokens == 0


def test_a_failed_draw_can_be_repeated(monkeypatch):
    """Records that a step wrote before its tokens could not be drawn are written again."""
    engine = host_engine(4)
    engine.add([1, 2, 3], max_new_tokens=4, ignore_eos=True)
    events = engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_sample", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    assert tokens_of(events + drain(engine), 0) == expected([1, 2, 3], 4, True)[0]
