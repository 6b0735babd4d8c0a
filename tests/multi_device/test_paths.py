"""Every path of the sharded prefill, and their combinations, against the oracle, whose answers come from one device.

The combinations hold every pair of settings at least once. Each serves the scenario of `scenario.py`: ragged requests
that start together, one of a single token among them, chunks, decode rows beside prefill rows, and a prefix hit.
"""

import dataclasses
import itertools

import pytest
from jax.sharding import AxisType

from dsa_jax.engine import EngineOptions
from dsa_jax.step import Execution, _compile
from dsa_jax.testing import users_mesh
from sharding.policy import PrefillPolicy
from tests.multi_device.scenario import TOKENS_PER_PAGE, placed_model, run_scenario

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
GLM5, GLM52, DSV32 = "glm5_tp8", "glm52_tp8", "dsv32_tp8"
# Rows of a step: three chunks for the longest prompt, or all prompts at once.
CHUNKED, ONE_SHOT = 46, 200


@dataclasses.dataclass(frozen=True)
class Case:
    """Settings of one combination.

    Attributes:
      mesh: (qsplit, dcp) of 8 devices; with two data groups, qsplit counts over both.
      data: Data groups.
      interleave: Tokens in a run, or "page".
      split: Partition of the indexer's rows, or "off".
      attend: "stock", "gather", or "prefetch", which gathers a layer ahead.
      token_split: Whether attention is split by rows.
      merge: How the ranks agree on a selection.
      replicas: How often a DCP group holds the index keys, or "all" for on every rank.
      family: Checkpoint of the oracle. glm5_tp8 alone projects values before the stock merge, in steps of many rows.
      chunk: Rows of a step.
      axes: Type of the mesh's axes.
    """

    mesh: tuple[int, int]
    data: int
    interleave: int | str
    split: str
    attend: str
    token_split: bool
    merge: str
    replicas: int | str
    family: str
    chunk: int
    axes: AxisType

    @property
    def qsplit(self) -> int:
        """Size of the mesh's axis."""
        return self.mesh[0] // self.data

    @property
    def dcp(self) -> int:
        """Size of the mesh's axis."""
        return self.mesh[1]

    @property
    def index_replicas(self) -> int:
        """How often a DCP group holds the index keys."""
        return self.dcp if self.replicas == "all" else int(self.replicas)

    def possible(self) -> bool:
        """Whether every setting has ranks to act on."""
        sizes = self.mesh[0] % self.data == 0 and not (self.replicas == 2 and self.dcp == 2)
        alone = (self.interleave, self.attend, self.merge, self.replicas) == (1, "stock", "owner", 1)
        splits = self.split == "off" or self.qsplit * self.index_replicas > 1
        tokens = not self.token_split or self.attend != "stock" or self.qsplit > 1
        return sizes and (self.dcp > 1 or alone) and splits and tokens

    def options(self) -> EngineOptions:
        """For the engine."""
        policy = PrefillPolicy(
            query_split=self.split != "off",
            partition="auto" if self.split == "off" else self.split,
            ckv_gather=self.attend != "stock",
            prefetch=self.attend == "prefetch",
            token_split=self.token_split,
            merge=self.merge,
            index_replicas=self.index_replicas,
        )
        page_size = TOKENS_PER_PAGE // self.dcp
        return EngineOptions(
            chunk_size=self.chunk,
            page_size=page_size,
            interleave=page_size if self.interleave == "page" else int(self.interleave),
            index_replicas=self.index_replicas,
            execution=Execution(policy=policy),
        )


SETTINGS = {
    "mesh": [(8, 1), (4, 2), (2, 4), (1, 8)],
    "data": [1, 2],
    "interleave": [1, 4, "page"],
    "split": ["off", "contiguous", "balanced"],
    "attend": ["stock", "gather", "prefetch"],
    "token_split": [False, True],
    "merge": ["owner", "replicated"],
    "replicas": [1, 2, "all"],
    "family": [GLM5, GLM52, DSV32],
    "chunk": [CHUNKED, ONE_SHOT],
    "axes": [AUTO, EXPLICIT],
}
CASES = [
    Case((4, 2), 1, 4, "off", "stock", False, "replicated", 1, GLM52, CHUNKED, EXPLICIT),
    Case((2, 4), 1, 4, "balanced", "gather", False, "owner", 1, GLM5, CHUNKED, AUTO),
    Case((2, 4), 2, 1, "off", "gather", True, "owner", 2, DSV32, ONE_SHOT, AUTO),
    Case((8, 1), 1, 1, "off", "stock", False, "owner", 1, GLM5, ONE_SHOT, AUTO),
    Case((1, 8), 1, "page", "balanced", "stock", False, "replicated", 2, DSV32, ONE_SHOT, EXPLICIT),
    Case((8, 1), 2, 1, "contiguous", "stock", False, "owner", 1, DSV32, CHUNKED, EXPLICIT),
    Case((8, 1), 1, 1, "balanced", "stock", True, "owner", 1, GLM52, ONE_SHOT, AUTO),
    Case((1, 8), 1, "page", "off", "prefetch", True, "owner", 1, GLM5, CHUNKED, AUTO),
    Case((2, 4), 2, "page", "contiguous", "prefetch", False, "replicated", 2, GLM52, CHUNKED, EXPLICIT),
    Case((1, 8), 1, 4, "contiguous", "prefetch", True, "owner", 2, GLM5, ONE_SHOT, AUTO),
    Case((2, 4), 2, 4, "balanced", "stock", False, "replicated", "all", DSV32, CHUNKED, AUTO),
    Case((1, 8), 1, 1, "off", "gather", True, "replicated", "all", GLM52, ONE_SHOT, AUTO),
    Case((4, 2), 1, 1, "balanced", "prefetch", False, "owner", "all", DSV32, ONE_SHOT, AUTO),
    Case((4, 2), 2, "page", "contiguous", "gather", True, "replicated", "all", GLM5, ONE_SHOT, EXPLICIT),
]


def pairs(case: Case) -> set:
    """Every two settings of a case."""
    return set(itertools.combinations([(name, getattr(case, name)) for name in SETTINGS], 2))


def test_every_pair_of_settings_is_a_case():
    """The list below is what it claims to be."""
    every = (Case(*values) for values in itertools.product(*SETTINGS.values()))
    wanted = set().union(*(pairs(case) for case in every if case.possible()))
    assert all(case.possible() for case in CASES)
    assert wanted - set().union(*map(pairs, CASES)) == set()


def pad_alike(monkeypatch, rows: int) -> None:
    """Pad all steps to one shape, so that one program serves them: these tests spend their time on compiling."""
    for name, size in (("ROWS", rows), ("KEYS", 512), ("REQUESTS", 4), ("PAGES", 4)):
        monkeypatch.setattr(f"dsa_jax.batch.MIN_{name}", size)


def label(case: Case) -> str:
    """Readable test id."""
    flags = [case.attend, "tokens" if case.token_split else "heads", case.merge, f"replicas_{case.replicas}"]
    shape = f"{case.data}x{case.qsplit}x{case.dcp}"
    return "-".join(
        [shape, f"run_{case.interleave}", f"split_{case.split}", *flags, case.family, f"chunk_{case.chunk}"]
    )


@pytest.mark.parametrize("case", [pytest.param(CASES[0], marks=pytest.mark.quick), *CASES[1:]], ids=label)
def test_path_equals_the_oracle(case, monkeypatch):
    """Selections and tokens exactly, logits within the tolerance, in every step; a new plan compiles nothing."""
    pad_alike(monkeypatch, rows=64 if case.chunk == CHUNKED else 256)
    programs = _compile.cache_info().misses
    check(case)
    assert _compile.cache_info().misses == programs + 1


def test_shapes_of_an_engine_equal_the_oracle():
    """The same without the padding: decode steps have a program of their own, of 8 rows for 8 ranks."""
    check(dataclasses.replace(CASES[1], split="contiguous", merge="replicated", token_split=True))


def check(case: Case) -> None:
    """Serve the scenario, and see that it ran as the case says."""
    model = placed_model(case.family, users_mesh(case.data, case.qsplit, case.dcp, case.axes))
    runner = run_scenario(model, case.family, case.options())
    assert len(runner.decisions) == 1
    decision = runner.decisions.pop()
    assert decision.query_split == (case.split != "off")
    assert decision.ckv_gather == (case.attend != "stock")
    assert (decision.prefetch, decision.token_split) == (case.attend == "prefetch", case.token_split)
    assert decision.merge == case.merge and decision.index_shards * case.index_replicas == case.dcp
