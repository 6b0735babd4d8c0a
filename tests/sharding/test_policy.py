"""The choice of a path: thresholds on what all ranks know, and a cost model that agrees with known byte counts."""

import dataclasses

import numpy as np
import pytest

from sharding.cost_model import (
    AttentionFacts,
    Hardware,
    attention_cost,
    gather_buffer_bytes,
    index_cost,
    projection_pays,
    step_facts,
)
from sharding.policy import PrefillPolicy, decide

GLM = AttentionFacts(heads=64, index_heads=32, index_dim=128, top_k=2048, record_bytes=656)
FLASH = dataclasses.replace(GLM, kpool=4, record_bytes=528, record_width=512)


def choose(policy=None, seq=(131072,), query=(8192,), *, qsplit=2, dcp=4, model=GLM, **options):
    return decide(policy or PrefillPolicy(), seq, query, model, qsplit=qsplit, dcp=dcp, **options)


def test_facts_are_sums_over_rows():
    step = step_facts([5000, 12, 9], [4999, 12, 0], GLM)
    visible = [*range(2, 5001), *range(1, 13)]
    assert (step.scheduled, step.context, step.total) == (5011, 10, 5021)
    assert step.scored == sum(visible)
    assert step.selected == sum(min(n, 2048) for n in visible)
    assert step.longest == 5000
    assert step_facts([5000], [5000], FLASH).scored == sum(n // 4 for n in range(1, 5001))


def test_sums_pass_the_range_of_int32():
    assert step_facts([1 << 20], [1 << 20], GLM).scored == (1 << 20) * ((1 << 20) + 1) // 2


def test_stock_bytes_and_where_the_gather_overtakes_them():
    model = dataclasses.replace(GLM, heads=8 * 8, value_dim=512, reduce_bytes=2)  # h = 8 on TP8, no projection

    def received(seq, gather):
        step = step_facts([seq], [8192], model)
        return attention_cost(step, model, Hardware(), qsplit=2, dcp=4, gather=gather, token_split=False).received

    lse = 3 * 8192 * 8 * 4 * 4
    assert received(131072, False) == 3 * 8192 * 8 * (576 + 512) * 2 + lse
    assert received(131072, True) == pytest.approx(3 / 4 * (131072 - 8192) * 656)
    assert received(800_000, True) < received(800_000, False) < received(920_000, True)


def test_owner_merge_moves_the_fewest_bytes():
    step = step_facts([131072], [8192], GLM)

    def received(merge, shards=4, split=False):
        return index_cost(step, GLM, Hardware(), qsplit=1, dcp=4, shards=shards, split=split, merge=merge).received

    assert received("replicated") == 3 * 8192 * 8 * 2048
    assert received("owner") == pytest.approx(3 / 4 * 8192 * (8 + 4) * 2048)
    assert received("union") == 0
    assert received("owner", shards=1, split=True) == pytest.approx(3 / 4 * 8192 * 4 * 2048)


def test_pools_travel_instead_of_tokens():
    step = step_facts([131072], [8192], FLASH)
    cost = index_cost(step, FLASH, Hardware(), qsplit=2, dcp=4, shards=4, split=True, merge="replicated")
    tokens = index_cost(step, GLM, Hardware(), qsplit=2, dcp=4, shards=4, split=True, merge="replicated")
    assert cost.received * 4 == tokens.received


def test_auto_takes_the_cheapest_of_what_it_lists():
    for qsplit, dcp in ((1, 8), (2, 4), (4, 2), (8, 1), (1, 1)):
        for seq in (8192, 131072, 1 << 20):
            chosen = choose(seq=(seq,), qsplit=qsplit, dcp=dcp)
            for part in ("indexer", "attention"):
                costs = {
                    all(getattr(chosen, k) == v for k, v in c.settings): c.cost.seconds
                    for c in sorted(chosen.candidates, key=lambda c: -c.cost.seconds)
                    if c.name.startswith(part)
                }
                assert costs[True] == min(costs.values())


def test_auto_on_known_ground():
    prefill = choose(qsplit=1, dcp=8)
    assert prefill.ckv_gather
    assert prefill.merge == "owner"
    assert choose(qsplit=8, dcp=1).query_split
    decode = choose(seq=(131073,), query=(1,))
    assert (decode.ckv_gather, decode.token_split, decode.query_split) == (False, False, False)
    assert not prefill.prefetch
    assert choose(PrefillPolicy(token_split=False), qsplit=1, dcp=8, hardware=Hardware(overlap=0.3)).prefetch


def test_a_group_of_one_is_no_path():
    everything = PrefillPolicy(query_split=True, ckv_gather=True, token_split=True, prefetch=True)
    alone = choose(everything, qsplit=1, dcp=1)
    assert (alone.query_split, alone.ckv_gather, alone.token_split, alone.prefetch) == (False,) * 4
    assert alone.buffer_bytes == 0
    no_dcp = choose(everything, qsplit=8, dcp=1)
    assert (no_dcp.query_split, no_dcp.ckv_gather, no_dcp.token_split) == (True, False, True)
    only_dcp = choose(everything, qsplit=1, dcp=8)
    assert (only_dcp.query_split, only_dcp.ckv_gather, only_dcp.token_split) == (False, True, True)


def test_stock_is_all_off():
    chosen = choose(PrefillPolicy.stock())
    assert (chosen.query_split, chosen.ckv_gather, chosen.token_split, chosen.prefetch) == (False,) * 4
    assert chosen.merge == "replicated"
    assert choose(PrefillPolicy.stock(ckv_gather=True)).ckv_gather


def test_thresholds_count_all_tokens_and_not_the_longest_request():
    def gathers(query, context=(0, 0), **limits):
        seq = [q + c for q, c in zip(query, context, strict=True)]
        return choose(PrefillPolicy(ckv_gather=True, **limits), seq, query).ckv_gather

    assert gathers((16, 16), ckv_gather_min_tokens=16)
    assert not gathers((8, 8), ckv_gather_min_tokens=16)
    assert gathers((8, 9), ckv_gather_min_tokens=16)
    assert gathers((100, 100), (200, 200), ckv_gather_max_tokens=600)
    assert not gathers((100, 100), (200, 201), ckv_gather_max_tokens=600)
    # A decode row is a row like any other.
    assert gathers((1, 16), (4000, 0), ckv_gather_min_tokens=16)

    def splits(query, context=(0, 0), **limits):
        seq = [q + c for q, c in zip(query, context, strict=True)]
        return choose(PrefillPolicy(query_split=True, **limits), seq, query).query_split

    assert splits((60, 68), query_split_min_rows=64)
    assert not splits((60, 67), query_split_min_rows=64)
    assert splits((60, 40), (30, 70), query_split_min_context=200)
    assert not splits((60, 40), (30, 69), query_split_min_context=200)


def test_nothing_is_scored_when_every_row_selects_all():
    assert choose(seq=(2048,), query=(2048,)).select_all
    assert not choose(seq=(2049,), query=(2049,)).select_all
    assert choose(seq=(2051,), query=(2051,), model=FLASH).select_all
    assert not choose(seq=(2052,), query=(2052,), model=FLASH).select_all


def test_copies_of_the_index_keys_split_the_rows():
    chosen = choose(PrefillPolicy(index_replicas=4), qsplit=1, dcp=8)
    assert chosen.index_shards == 2
    assert chosen.query_split
    with pytest.raises(ValueError, match="index_replicas=3 must divide dcp=8"):
        choose(PrefillPolicy(index_replicas=3), qsplit=1, dcp=8)


def test_union_attends_where_the_records_are():
    assert not choose(PrefillPolicy(merge="union"), qsplit=1, dcp=8).ckv_gather
    with pytest.raises(ValueError, match="cannot be combined with ckv_gather=True"):
        PrefillPolicy(merge="union", ckv_gather=True)


def test_the_projection_comes_first_where_it_saves_bytes():
    assert projection_pays(step_facts([8192], [8192], GLM), GLM, dcp=4)
    assert not projection_pays(step_facts([8192], [64], GLM), GLM, dcp=4)
    assert not projection_pays(step_facts([8192], [8192], GLM), GLM, dcp=1)
    assert choose(PrefillPolicy.stock()).project_first
    assert not choose(PrefillPolicy(ckv_gather=True)).project_first


def test_decisions_that_run_alike_are_equal():
    first, second = choose(seq=(100_000,)), choose(seq=np.array([108_192]), query=np.array([8192]))
    assert first.facts != second.facts
    assert first == second
    assert hash(first) == hash(second)
    assert choose(PrefillPolicy.stock()) != first


def test_explain_says_what_was_chosen_and_why_not():
    policy = PrefillPolicy(ckv_gather_max_tokens=100_000, query_split=True)
    text = choose(policy).explain()
    assert "8192 rows over 122880 cached tokens" in text
    assert "not eligible: 131072 tokens, ckv_gather_max_tokens=100000" in text
    marked = [line for line in text.splitlines() if line.startswith("*")]
    assert len(marked) == 2
    assert "rows over 2, keys over 4, owner merge" in marked[0]
    assert "stock" in marked[1]
    assert "gathered buffers take 86.0 MB from the cache" in choose(PrefillPolicy(ckv_gather=True)).explain()
    assert "nothing is scored" in choose(seq=(100,), query=(100,)).explain()


def test_buffers_of_the_gather():
    assert gather_buffer_bytes(1000, dcp=4, record_bytes=656, prefetch=False) == 4 * 1000 * 656
    assert gather_buffer_bytes(1000, dcp=4, record_bytes=656, prefetch=True) == 8 * 1000 * 656
    assert gather_buffer_bytes(1000, dcp=1, record_bytes=656, prefetch=True) == 0


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"query_split": "on"}, "query_split must be True, False or 'auto', got 'on'"),
        ({"partition": "stripes"}, "partition must be .* got 'stripes'"),
        ({"merge": "max"}, "merge must be .* got 'max'"),
        ({"index_replicas": 0}, "index_replicas must be positive, got 0"),
        ({"query_split_min_rows": -1}, "query_split_min_rows must not be negative, got -1"),
        (
            {"ckv_gather_min_tokens": 16, "ckv_gather_max_tokens": 16},
            "ckv_gather_max_tokens=16 must exceed ckv_gather_min_tokens=16",
        ),
    ],
)
def test_values_are_checked(bad, message):
    with pytest.raises(ValueError, match=message):
        PrefillPolicy(**bad)
