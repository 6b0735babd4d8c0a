"""A serving scenario whose every row is compared with the oracle, on any mesh and path.

Requests of different lengths start together, are prefilled in chunks, decode while others prefill, and one comes later
and finds the pages of its beginning in the cache. Requests stop inside a prompt of the oracle and are then fed its next
tokens, so that decode rows have known selections too; behind the prompt's end the model's own tokens go on.
"""

import dataclasses
import functools

import numpy as np
from jax.sharding import Mesh

from dsa_jax.engine import Engine, EngineOptions
from dsa_jax.model import Model
from dsa_jax.step import StepRunner
from dsa_jax.testing import place_model
from sharding.mesh import DATA
from sharding.policy import Decision
from tests.model.paged_cases import poisoned
from tests.support import answers, load_model, selected_count, selecting_layers

TOLERANCE = {"flash_tp8": 5e-4}
DEFAULT_TOLERANCE = 5e-5
# Every page stands for as many tokens, whatever the DCP size, so that the shapes of the steps do not depend on it.
TOKENS_PER_PAGE = 64


@functools.lru_cache(maxsize=32)
def placed_model(variant: str, mesh: Mesh) -> Model:
    """A checkpoint of the oracle on `mesh`, moved there from one device, which is faster than loading."""
    return place_model(load_model(variant), mesh)


@dataclasses.dataclass(frozen=True)
class Known:
    """What the oracle says of one prompt and its greedy continuation.

    Attributes:
      tokens: Prompt and new tokens.
      logits: Of each token but the last [tokens - 1, vocabulary].
      selected: Of each layer, the selection of each row of the prompt as a set.
      variant: Variant of the oracle.
    """

    tokens: list[int]
    logits: np.ndarray
    selected: list[list[frozenset[int]]]
    variant: str

    @property
    def prompt_rows(self) -> int:
        """Rows with known selections."""
        return len(self.selected[0])

    def next_token(self, row: int) -> int:
        """What the model says behind row `row`; inside a prompt that is not the prompt's next token."""
        return int(self.logits[row].argmax()) if row + 1 < self.prompt_rows else self.tokens[row + 1]


@functools.lru_cache(maxsize=32)
def known(variant: str, name: str) -> Known:
    """The oracle's prompt `name`."""
    stored = answers(variant)
    selected = [
        [frozenset(x for x in row if 0 <= x <= t) for t, row in enumerate(stored[f"{name}_sel_L{layer}"][0].tolist())]
        for layer in selecting_layers(variant, name)
    ]
    logits = np.concatenate([stored[f"{name}_logits"][0], stored[f"{name}_gen_logits"][0][1:]])
    tokens = stored[f"{name}_input_ids"][0].tolist() + stored[f"{name}_gen_tokens"][0].tolist()
    return Known(tokens, logits, selected, variant)


class CheckedRunner(StepRunner):
    """Compares every row of every step of an engine with the oracle.

    Attributes:
      engine: The engine.
      known: What the oracle says of each request, by its number.
      rows: Number of rows compared.
      decisions: How the steps ran.
    """

    def __init__(self, engine: Engine):
        super().__init__(engine.model, engine.options.execution)
        self.engine = engine
        self.known: list[Known] = []
        self.rows = 0
        self.decisions: set[Decision] = set()

    def __call__(self, step, cache, *, return_selected=False):
        outputs = super().__call__(step, cache, return_selected=True)
        assert self.decision is not None
        self.decisions.add(self.decision)
        logits, selected = np.asarray(outputs.logits), np.asarray(outputs.selected)
        for shard in outputs.selected.addressable_shards:
            np.testing.assert_array_equal(shard.data, selected[shard.index], "ranks of a group differ")
        for piece in step.pieces:
            sequence = self.engine.running[piece.request]
            want = self.known[sequence.number]
            rows = range(sequence.cached, sequence.cached + piece.count)
            np.testing.assert_allclose(
                logits[piece.logits_row, : want.logits.shape[1]],
                want.logits[rows[-1]],
                rtol=0,
                atol=TOLERANCE.get(want.variant, DEFAULT_TOLERANCE),
            )
            compare_selections(selected[:, piece.first_row : piece.first_row + piece.count], rows, want)
            self.rows += piece.count
        return outputs


def compare_selections(selected: np.ndarray, rows: range, want: Known) -> None:
    """Selections [layers, rows, k] against those of the oracle, as sets; behind its prompt, their number and range."""
    for layer, lines in enumerate(selected):
        for row, line in zip(rows, lines, strict=True):
            valid = selected_count(selected.shape[2], row + 1, want.variant)
            got = frozenset(line[:valid].tolist())
            assert len(got) == valid and (line[valid:] == -1).all(), f"{layer=} {row=}: {line}"
            if row < want.prompt_rows:
                assert got == want.selected[layer][row], f"{layer=} {row=}"
            else:
                assert min(got) >= 0 and max(got) <= row, f"{layer=} {row=}"


# (prompt of the oracle, tokens of it that are given, new tokens) of the requests of a data group that start together.
START = (("s7", 5, 6), ("s33", 29, 6), ("s97", 1, 1), ("s97", 94, 4))
# One that comes when all of them decode, and shares a full page with the last.
LATER = ("s97", 94, 2)
ROWS = sum(given + new - 1 for _, given, new in (*START, LATER))


def run_scenario(model: Model, variant: str, options: EngineOptions) -> CheckedRunner:
    """Serve the scenario in every data group, in another order in each, and compare all of it with the oracle.

    Whatever no request has written yet is NaN, in pages and in the state of requests.
    """
    groups = model.mesh.shape[DATA]
    engine = Engine(model, 8, options)
    engine.cache = poisoned(engine.cache)
    runner = engine.runner = CheckedRunner(engine)
    lengths: list[int] = []

    def add(name: str, given: int, new: int) -> None:
        runner.known.append(known(variant, name))
        lengths.append(given)
        engine.add(runner.known[-1].tokens[:given], max_new_tokens=new, ignore_eos=True)

    # A request goes to the group with the most free pages, so the groups take turns.
    for first, second in zip(START, (START[1], START[0], *START[2:]), strict=True):
        for group in range(groups):
            add(*(second if group else first))
    later = False
    while not engine.idle:
        for event in engine.step():
            want, row = runner.known[event.request], lengths[event.request] - 1
            assert event.token == want.next_token(row), f"request {event.request} behind row {row}"
            lengths[event.request] += 1
            for sequence in engine.running:
                if sequence.number == event.request:
                    sequence.tokens[-1] = want.tokens[row + 1]
        if not later and engine.running and all(sequence.drawn for sequence in engine.running):
            later = True
            for _ in range(groups):
                add(*LATER)
    assert runner.rows == groups * (ROWS - (TOKENS_PER_PAGE if engine.prefix_reuse else 0))
    return runner
