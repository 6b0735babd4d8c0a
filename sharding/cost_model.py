"""What a step of sparse attention costs on each path: bytes received by a rank, work of a rank, seconds.

A model to choose by, not to quote: it counts what differs between the paths and leaves out what they share. Pure
Python on numbers that every rank knows, so that all ranks come to the same answer.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from sharding.row_partition import row_costs


@dataclasses.dataclass(frozen=True)
class Hardware:
    """Rates of one GPU. The defaults were measured on H200s joined by NVLink, except the latency, which is assumed.

    Attributes:
      gather_bytes_per_s: Bytes that a rank receives in an all_gather or a reduce_scatter.
      exchange_bytes_per_s: Bytes that a rank receives in an all_to_all.
      latency_s: Time of a collective of no bytes.
      index_flops: Scoring.
      topk_keys_per_s: Scores that the top-k goes through.
      attention_flops: Sparse attention, where arithmetic bounds it.
      record_bytes_per_s: Selected records, where reading them bounds it.
      memory_bytes_per_s: Copies in device memory.
      matmul_flops: Dense matrix multiplication.
      overlap: Share of a prefetched gather that hides behind the layer before it. Collectives wait for a GPU that a
        kernel fills, so this is 0 until measured otherwise.
    """

    gather_bytes_per_s: float = 214e9
    exchange_bytes_per_s: float = 165e9
    latency_s: float = 20e-6
    index_flops: float = 1.0e15
    topk_keys_per_s: float = 4.0e11
    attention_flops: float = 4.7e14
    record_bytes_per_s: float = 4.8e12
    memory_bytes_per_s: float = 4.18e12
    matmul_flops: float = 7.0e14
    overlap: float = 0.0


@dataclasses.dataclass(frozen=True)
class AttentionFacts:
    """Sizes of a model's sparse attention.

    Attributes:
      heads: Attention heads over all ranks.
      index_heads: Heads of the indexer.
      index_dim: Width of an index key.
      top_k: Tokens that a row selects.
      record_bytes: Bytes of a token's record in the cache.
      kpool: Tokens of an index key.
      record_width: Values of a query in the space of the records.
      kv_lora_rank: Values of an output in that space.
      value_dim: Values of an output after the up-projection.
      value_bytes: Bytes of a value of queries and outputs.
      reduce_bytes: Bytes of a value of a partial output on its way.
    """

    heads: int
    index_heads: int
    index_dim: int
    top_k: int
    record_bytes: int
    kpool: int = 1
    record_width: int = 576
    kv_lora_rank: int = 512
    value_dim: int = 256
    value_bytes: int = 2
    reduce_bytes: int = 4


@dataclasses.dataclass(frozen=True)
class StepFacts:
    """Sums over the rows of a step.

    Attributes:
      scheduled: New tokens.
      context: Tokens in the cache before the step.
      scored: Pairs of a row and an index key that it sees.
      selected: Tokens that the rows attend to.
      longest: Most index keys that a row sees.
    """

    scheduled: int
    context: int
    scored: int
    selected: int
    longest: int

    @property
    def total(self) -> int:
        """Tokens of all requests, those of the step included."""
        return self.scheduled + self.context


def step_facts(seq_lens: Sequence[int], query_lens: Sequence[int], model: AttentionFacts) -> StepFacts:
    """Sums for requests of `seq_lens` tokens of which `query_lens` are new, in int64 on the host."""
    pools, tokens = row_costs(seq_lens, query_lens, model.kpool), row_costs(seq_lens, query_lens, 1)
    return StepFacts(
        scheduled=len(tokens),
        context=int(np.sum(np.asarray(seq_lens, np.int64) - np.asarray(query_lens, np.int64))),
        scored=int(pools.sum()),
        selected=int(np.minimum(tokens, model.top_k).sum()),
        longest=int(pools.max(initial=0)),
    )


@dataclasses.dataclass(frozen=True)
class Cost:
    """Of one layer on one rank.

    Attributes:
      received: Bytes from other ranks.
      seconds: Time of what differs between the paths.
    """

    received: float
    seconds: float


def index_cost(
    step: StepFacts,
    model: AttentionFacts,
    hardware: Hardware,
    *,
    qsplit: int,
    dcp: int,
    shards: int,
    split: bool,
    merge: str,
) -> Cost:
    """Of scoring and selecting in one full layer, with balanced rows; see `indexer_sharding`."""
    tp, splits = qsplit * dcp, qsplit * (dcp // shards) if split else 1
    rows, k = step.scheduled / splits, model.top_k // model.kpool
    pairs = step.scored / (splits * shards)
    seconds = pairs * 2 * model.index_heads * model.index_dim / hardware.index_flops + pairs / hardware.topk_keys_per_s
    exchanged, gathered, collectives, merged_rows = 0.0, 0.0, 0, 0.0
    if shards > 1 and merge == "owner":
        exchanged = (shards - 1) / shards * rows * k * 8
        sharing = tp if split else shards
        gathered = (sharing - 1) / sharing * step.scheduled * k * 4
        collectives, merged_rows = 2, rows / shards
    else:
        gathered = (splits - 1) / splits * step.scheduled * k * 4
        collectives = int(splits > 1)
        if shards > 1 and merge == "replicated":
            gathered += (shards - 1) * rows * k * 8
            collectives, merged_rows = collectives + 1, rows
    seconds += 2 * merged_rows * shards * k / hardware.topk_keys_per_s
    seconds += exchanged / hardware.exchange_bytes_per_s + gathered / hardware.gather_bytes_per_s
    return Cost(exchanged + gathered, seconds + collectives * hardware.latency_s)


def projection_pays(step: StepFacts, model: AttentionFacts, *, dcp: int) -> bool:
    """Whether the value up-projection before the merge of the stock path moves fewer bytes than after it."""
    saved = step.scheduled * (model.kv_lora_rank - model.value_dim) * model.reduce_bytes
    return dcp > 1 and saved > model.kv_lora_rank * model.value_dim * model.value_bytes


def attention_cost(
    step: StepFacts,
    model: AttentionFacts,
    hardware: Hardware,
    *,
    qsplit: int,
    dcp: int,
    gather: bool,
    token_split: bool,
    prefetch: bool = False,
) -> Cost:
    """Of sparse attention in one layer; see `dcp_attention`, `ckv_gather` and `token_split`."""
    tp = qsplit * dcp
    sharded = dcp > 1 and not gather
    splits = (qsplit if sharded else tp) if token_split else 1
    rows, heads = step.scheduled / splits, model.heads / tp * splits
    received, seconds = 0.0, 0.0
    if splits > 1:
        exchanged = (splits - 1) / splits * step.scheduled * model.heads / tp * model.value_bytes
        # Outputs that are projected before the merge come back projected, by weights of all the heads of the rows.
        projected = sharded and projection_pays(step, model, dcp=dcp)
        exchanged *= model.record_width + (model.value_dim if projected else model.kv_lora_rank)
        received += exchanged
        seconds += exchanged / hardware.exchange_bytes_per_s + 2 * hardware.latency_s
        if projected:
            weights = model.kv_lora_rank * model.value_dim * model.value_bytes
            weights *= (splits - 1) * model.heads / tp
            received += weights
            seconds += weights / hardware.gather_bytes_per_s + hardware.latency_s
    selected = step.selected / splits
    if sharded:
        cost = _stock_exchange(step, model, hardware, dcp=dcp, rows=rows, heads=heads)
        received, seconds = received + cost.received, seconds + cost.seconds
        selected, heads = selected / dcp, heads * dcp
    elif dcp > 1:
        history = step.context * model.record_bytes
        gathered = (dcp - 1) / dcp * history
        received += gathered
        hidden = hardware.overlap if prefetch else 0.0
        seconds += (1 - hidden) * (gathered / hardware.gather_bytes_per_s + hardware.latency_s)
        seconds += 2 * history / hardware.memory_bytes_per_s
    arithmetic = 2 * selected * heads * (model.record_width + model.kv_lora_rank) / hardware.attention_flops
    seconds += max(arithmetic, selected * model.record_bytes / hardware.record_bytes_per_s)
    return Cost(received, seconds)


def _stock_exchange(
    step: StepFacts, model: AttentionFacts, hardware: Hardware, *, dcp: int, rows: float, heads: float
) -> Cost:
    """Gathered queries and log-sum-exps, scattered outputs, and the up-projection where it comes first."""
    width, weights, arithmetic = model.kv_lora_rank, 0.0, 0.0
    if projection_pays(step, model, dcp=dcp):
        width = model.value_dim
        weights = heads * model.kv_lora_rank * model.value_dim
        # Each rank projects the heads of all, where it would project its own.
        arithmetic = 2 * rows * (dcp - 1) * weights / hardware.matmul_flops
    values = rows * heads * (model.record_width * model.value_bytes + width * model.reduce_bytes + 4 * dcp)
    received = (dcp - 1) * (values + weights * model.value_bytes)
    collectives = 4 if weights else 3
    return Cost(received, received / hardware.gather_bytes_per_s + arithmetic + collectives * hardware.latency_s)


def gather_buffer_bytes(rows: int, *, dcp: int, record_bytes: int, prefetch: bool) -> int:
    """Memory of the gathered buffers, which the cache cannot use; two with prefetch, none without DCP."""
    return 0 if dcp == 1 else dcp * rows * record_bytes * (2 if prefetch else 1)
