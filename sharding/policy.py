"""Choice of the sharded path of a step.

The choice is a function of the policy, of sizes, and of the step's lengths on the host: nothing that a rank knows
alone, so no two ranks can run different programs. It counts all tokens of a step and not the longest request.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from sharding.cost_model import (
    AttentionFacts,
    Cost,
    Hardware,
    StepFacts,
    attention_cost,
    gather_buffer_bytes,
    index_cost,
    projection_pays,
    step_facts,
)
from sharding.indexer_sharding import MERGES

Switch = bool | Literal["auto"]
SWITCHES = ("query_split", "ckv_gather", "token_split", "prefetch")


@dataclasses.dataclass(frozen=True)
class PrefillPolicy:
    """Which paths a step may take.

    A switch that is True takes its path in every step that is eligible, False never, "auto" where the cost model finds
    it faster. A path over a group of one rank is no path: its switch is then ignored.

    Attributes:
      query_split: Split the rows of the indexer over the ranks that hold the same index keys.
      ckv_gather: Gather the records of a DCP group and attend with local heads, instead of the stock path.
      token_split: Attend all heads of a share of the rows: over TP with gathered records, else over "qsplit".
      prefetch: Gather the next layer's history ahead of its layer.
      partition: "contiguous" or "balanced" rows; see `row_partition`.
      merge: How DCP ranks agree on a selection; see `IndexSharding`. "auto" never takes "union".
      index_replicas: How often the index keys are held inside a DCP group; divides its size.
      query_split_min_rows: Fewest rows a rank.
      query_split_min_context: Fewest tokens of all requests, those of the step included.
      ckv_gather_min_tokens: The step must have more new tokens than this.
      ckv_gather_max_tokens: Most tokens of all requests, those of the step included; None sets no bound.
    """

    query_split: Switch = "auto"
    ckv_gather: Switch = "auto"
    token_split: Switch = "auto"
    prefetch: Switch = "auto"
    partition: Literal["auto", "contiguous", "balanced"] = "auto"
    merge: Literal["auto", "owner", "replicated", "union"] = "auto"
    index_replicas: int = 1
    query_split_min_rows: int = 0
    query_split_min_context: int = 0
    ckv_gather_min_tokens: int = 0
    ckv_gather_max_tokens: int | None = None

    def __post_init__(self):
        """Check the values and that they fit each other."""
        for name in SWITCHES:
            if getattr(self, name) not in (True, False, "auto"):
                raise ValueError(f"{name} must be True, False or 'auto', got {getattr(self, name)!r}")
        if self.partition not in ("auto", "contiguous", "balanced"):
            raise ValueError(f"partition must be 'auto', 'contiguous' or 'balanced', got {self.partition!r}")
        if self.merge not in ("auto", *MERGES):
            raise ValueError(f"merge must be 'auto' or one of {MERGES}, got {self.merge!r}")
        if self.index_replicas <= 0:
            raise ValueError(f"index_replicas must be positive, got {self.index_replicas}")
        for name in ("query_split_min_rows", "query_split_min_context", "ckv_gather_min_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        most, least = self.ckv_gather_max_tokens, self.ckv_gather_min_tokens
        if most is not None and most <= least:
            raise ValueError(f"ckv_gather_max_tokens={most} must exceed ckv_gather_min_tokens={least}")
        if self.merge == "union" and self.ckv_gather is True:
            raise ValueError("merge='union' selects on each rank alone and cannot be combined with ckv_gather=True")

    @classmethod
    def stock(cls, **changes) -> "PrefillPolicy":
        """Everything off."""
        off = cls(query_split=False, ckv_gather=False, token_split=False, prefetch=False, merge="replicated")
        return dataclasses.replace(off, **changes)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A path that was considered.

    Attributes:
      name: What it does.
      cost: What the model says it costs, or None where the step is not eligible.
      reason: Why not.
      settings: Fields of the `Decision` that it sets.
    """

    name: str
    cost: Cost | None
    reason: str
    settings: tuple[tuple[str, bool | str], ...]


@dataclasses.dataclass(frozen=True)
class Decision:
    """How a step runs; equal decisions run the same program.

    Attributes:
      select_all: No row sees more keys than it may select, so nothing needs to be scored.
      query_split: Split the rows of the indexer.
      partition: "contiguous" or "balanced".
      merge: "owner", "replicated" or "union".
      index_shards: Ranks that the index keys are dealt to.
      ckv_gather: Gather the records.
      token_split: Split attention by rows.
      prefetch: Gather a layer ahead.
      project_first: Apply the value up-projection before the stock path's merge.
      candidates: What was considered, for `explain`.
      facts: The step, for `explain`.
      buffer_bytes: Memory that the gathered buffers of this step take from the cache.
    """

    select_all: bool
    query_split: bool
    partition: str
    merge: str
    index_shards: int
    ckv_gather: bool
    token_split: bool
    prefetch: bool
    project_first: bool
    candidates: tuple[Candidate, ...] = dataclasses.field(compare=False)
    facts: StepFacts = dataclasses.field(compare=False)
    buffer_bytes: int = dataclasses.field(compare=False)

    def chose(self, candidate: Candidate) -> bool:
        """Whether this is the path of the indexer, or of the attention, that was chosen."""
        chosen = all(getattr(self, name) == value for name, value in candidate.settings)
        return chosen and candidate.cost is not None

    def explain(self) -> str:
        """Table of the candidates with what they cost a layer; the chosen ones are marked."""
        step = self.facts
        lines = [
            f"{step.scheduled} rows over {step.context} cached tokens: {step.scored} pairs to score,"
            f" {step.selected} records to read",
        ]
        for candidate in self.candidates:
            mark = "*" if self.chose(candidate) else " "
            if candidate.cost is None:
                lines.append(f"{mark} {candidate.name:<52} not eligible: {candidate.reason}")
            else:
                received, seconds = candidate.cost.received / 1e6, candidate.cost.seconds * 1e3
                lines.append(f"{mark} {candidate.name:<52} {seconds:9.3f} ms {received:9.1f} MB received")
        if self.select_all:
            lines.append("no row sees more keys than it may select: nothing is scored")
        if self.buffer_bytes:
            lines.append(f"gathered buffers take {self.buffer_bytes / 1e6:.1f} MB from the cache")
        return "\n".join(lines)


def decide(
    policy: PrefillPolicy,
    seq_lens: Sequence[int],
    query_lens: Sequence[int],
    model: AttentionFacts,
    *,
    qsplit: int,
    dcp: int,
    hardware: Hardware | None = None,
) -> Decision:
    """Choose the path of a step.

    Args:
      policy: What is allowed.
      seq_lens: Tokens of each request with those of the step; the same on all ranks.
      query_lens: Tokens of each request in the step, decode rows included; the same on all ranks.
      model: Sizes of the attention.
      qsplit: Size of the mesh's "qsplit" axis.
      dcp: Size of the mesh's "dcp" axis.
      hardware: Rates; None means an H200.

    Raises:
      ValueError: The policy does not fit the mesh.
    """
    hardware = Hardware() if hardware is None else hardware
    if dcp % policy.index_replicas:
        raise ValueError(f"index_replicas={policy.index_replicas} must divide {dcp=}")
    step = step_facts(seq_lens, query_lens, model)
    shards = dcp // policy.index_replicas
    index = _index_candidates(policy, step, model, hardware, qsplit=qsplit, dcp=dcp, shards=shards)
    attention = _attention_candidates(policy, step, model, hardware, qsplit=qsplit, dcp=dcp)
    chosen = dict(_cheapest(index).settings) | dict(_cheapest(attention).settings)
    gather = bool(chosen["ckv_gather"])
    return Decision(
        select_all=step.longest <= model.top_k // model.kpool,
        query_split=bool(chosen["query_split"]),
        # Never more rows a rank than contiguous runs, and one program for all steps.
        partition="balanced" if policy.partition == "auto" else policy.partition,
        merge=str(chosen["merge"]),
        index_shards=shards,
        ckv_gather=gather,
        token_split=bool(chosen["token_split"]),
        prefetch=bool(chosen["prefetch"]),
        project_first=not gather and projection_pays(step, model, dcp=dcp),
        candidates=tuple(index + attention),
        facts=step,
        buffer_bytes=gather_buffer_bytes(
            -(-step.total // dcp), dcp=dcp, record_bytes=model.record_bytes, prefetch=bool(chosen["prefetch"])
        )
        if gather
        else 0,
    )


def _cheapest(candidates: list[Candidate]) -> Candidate:
    """The eligible candidate that costs least; the first of equals."""
    eligible = [(c.cost.seconds, i) for i, c in enumerate(candidates) if c.cost is not None]
    return candidates[min(eligible)[1]]


def _options(switch: Switch, *, possible: bool, reason: str = "") -> list[tuple[bool, str]]:
    """Values that a switch may take, each with why the step may not take it.

    Args:
      switch: What the policy says.
      possible: Whether the mesh has ranks for the path; if not it is not worth a word.
      reason: Why this step is not eligible for it, or nothing.
    """
    if not possible or switch is False:
        return [(False, "")]
    if reason:
        return [(False, ""), (True, reason)]
    return [(True, "")] if switch is True else [(False, ""), (True, "")]


def _index_candidates(
    policy: PrefillPolicy,
    step: StepFacts,
    model: AttentionFacts,
    hardware: Hardware,
    *,
    qsplit: int,
    dcp: int,
    shards: int,
) -> list[Candidate]:
    """Ways to score and select."""
    splits = qsplit * dcp // shards
    reason = ""
    if step.scheduled < policy.query_split_min_rows * splits:
        reason = f"{step.scheduled} rows on {splits} ranks, query_split_min_rows={policy.query_split_min_rows}"
    elif step.total < policy.query_split_min_context:
        reason = f"{step.total} tokens, query_split_min_context={policy.query_split_min_context}"
    merges = ("owner", "replicated") if policy.merge == "auto" else (policy.merge,)
    if shards == 1:
        merges = merges[:1]
    candidates = []
    for split, why in _options(policy.query_split, possible=splits > 1, reason=reason):
        for merge in merges:
            name = f"indexer: rows over {splits if split else 1}, keys over {shards}"
            name += f", {merge} merge" if shards > 1 else ""
            cost = index_cost(step, model, hardware, qsplit=qsplit, dcp=dcp, shards=shards, split=split, merge=merge)
            settings = (("query_split", split), ("merge", merge))
            candidates.append(Candidate(name, None if why else cost, why, settings))
    return candidates


def _attention_candidates(
    policy: PrefillPolicy, step: StepFacts, model: AttentionFacts, hardware: Hardware, *, qsplit: int, dcp: int
) -> list[Candidate]:
    """Ways to attend."""
    gather_reason = ""
    most = policy.ckv_gather_max_tokens
    if policy.merge == "union":
        gather_reason = "merge='union' selects on each rank alone"
    elif step.scheduled <= policy.ckv_gather_min_tokens:
        gather_reason = f"{step.scheduled} new tokens, ckv_gather_min_tokens={policy.ckv_gather_min_tokens}"
    elif most is not None and step.total > most:
        gather_reason = f"{step.total} tokens, ckv_gather_max_tokens={most}"
    candidates = []
    for gather, why in _options(policy.ckv_gather, possible=dcp > 1, reason=gather_reason):
        splits = qsplit if dcp > 1 and not gather else qsplit * dcp
        for split, _ in _options(policy.token_split, possible=splits > 1):
            ahead = [False, True] if policy.prefetch == "auto" and hardware.overlap > 0 else [policy.prefetch is True]
            for prefetch in ahead if gather else [False]:
                name = "attention: " + (("gathered records" if gather else "stock") if dcp > 1 else "local records")
                name += f", rows over {splits}" if split else ""
                name += ", a layer ahead" if prefetch else ""
                cost = attention_cost(
                    step,
                    model,
                    hardware,
                    qsplit=qsplit,
                    dcp=dcp,
                    gather=gather,
                    token_split=split,
                    prefetch=prefetch,
                )
                settings = (("ckv_gather", gather), ("token_split", split), ("prefetch", prefetch))
                candidates.append(Candidate(name, None if why else cost, why, settings))
    return candidates
