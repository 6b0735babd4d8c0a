"""The formulas of `docs/sharding.md`, spelled out here, give the numbers of the cost model.

Names are those of the page: T rows, S history tokens, H heads, W and Q the sizes of "dcp" and "qsplit", N = Q W ranks.
"""

import dataclasses
import itertools

import pytest

from sharding.cost_model import AttentionFacts, Hardware, attention_cost, index_cost, projection_pays, step_facts
from sharding.policy import SWITCHES, PrefillPolicy, decide

K, R, DK, L, V, B, PARTIAL = 2048, 656, 576, 512, 256, 2, 4
GLM = AttentionFacts(heads=64, index_heads=32, index_dim=128, top_k=K, record_bytes=R)
T, S = 8192, 131072
STEP = step_facts([S + T], [T], GLM)
MESHES = [(8, 1), (4, 2), (2, 4), (1, 8), (1, 2), (2, 1)]
H200 = Hardware()
FREE = {field.name: 1e40 for field in dataclasses.fields(Hardware)} | {"latency_s": 0.0, "overlap": 0.0}


def only(**rates: float) -> Hardware:
    """Hardware on which everything else is free: seconds are then what is counted."""
    return Hardware(**{**FREE, **rates})


def indexed(qsplit: int, dcp: int, hardware: Hardware = H200, *, copies: int = 1, **options):
    """Cost of the indexer with `copies` of the index keys."""
    return index_cost(STEP, GLM, hardware, qsplit=qsplit, dcp=dcp, shards=dcp // copies, **options)


@pytest.mark.parametrize(("qsplit", "dcp"), MESHES)
def test_bytes_of_the_indexer(qsplit, dcp):
    w, q, n = dcp, qsplit, qsplit * dcp
    assert indexed(q, w, split=False, merge="replicated").received == (w - 1) * T * K * 8
    assert indexed(q, w, split=False, merge="union").received == 0
    owner = (w - 1) / w * T * K * (8 + 4)
    assert indexed(q, w, split=False, merge="owner").received == pytest.approx(owner)
    split = (w - 1) * T / q * K * 8 + (q - 1) / q * T * K * 4
    assert indexed(q, w, split=True, merge="replicated").received == pytest.approx(split)
    if w > 1:
        split_owner = (w - 1) / w * T / q * K * 8 + (n - 1) / n * T * K * 4
        assert indexed(q, w, split=True, merge="owner").received == pytest.approx(split_owner)
    for copies in (c for c in (1, 2, 4, 8) if w % c == 0):
        s, p = w // copies, q * copies
        few = (s - 1) * T / p * K * 8 + (p - 1) / p * T * K * 4
        assert indexed(q, w, copies=copies, split=True, merge="replicated").received == pytest.approx(few)


@pytest.mark.parametrize(("qsplit", "dcp"), MESHES)
def test_work_of_the_indexer(qsplit, dcp):
    """Split and dealt in any way, the ranks that share the work score each pair once."""
    pairs = sum(range(S + 1, S + T + 1))
    for copies, split in itertools.product((1, dcp), (False, True)):
        shared = dcp // copies * (qsplit * copies if split else 1)
        cost = indexed(qsplit, dcp, only(index_flops=1.0), copies=copies, split=split, merge="union")
        assert cost.seconds == pytest.approx(2 * 32 * 128 * pairs / shared)


def attended(qsplit: int, dcp: int, hardware: Hardware = H200, **options):
    """Cost of the attention of one layer."""
    options = {"gather": False, "token_split": False} | options
    return attention_cost(STEP, GLM, hardware, qsplit=qsplit, dcp=dcp, **options)


@pytest.mark.parametrize(("qsplit", "dcp"), MESHES)
def test_bytes_of_the_attention(qsplit, dcp):
    w, q, n, h = dcp, qsplit, qsplit * dcp, 64 // (qsplit * dcp)

    def to_rows(ranks: int, returned: int = L) -> float:
        return (ranks - 1) / ranks * T * h * B * (DK + returned)

    def stock(heads: int) -> float:
        """`heads` of a rank that project T * h / heads rows first."""
        assert projection_pays(STEP, GLM, dcp=w) == (w > 1)
        return (w - 1) * (T * h * (DK * B + V * PARTIAL + 4 * w) + heads * L * V * B)

    assert attended(q, w).received == pytest.approx(stock(h))
    local = 0 if w == 1 else (w - 1) / w * S * R
    if w > 1:
        assert attended(q, w, gather=True).received == pytest.approx(local)
        assert attended(q, w, gather=True, prefetch=True).received == pytest.approx(local)
        assert attended(q, w, gather=True, token_split=True).received == pytest.approx(local + to_rows(n))
    split = stock(h * q) + to_rows(q, V) + (q - 1) * h * L * V * B if w > 1 else to_rows(n)
    assert attended(q, w, token_split=True).received == pytest.approx(split)


@pytest.mark.parametrize(("qsplit", "dcp"), MESHES)
def test_work_of_the_attention(qsplit, dcp):
    """The same FLOPs on every path; what differs is how many selected records a rank reads."""
    w, n = dcp, qsplit * dcp
    selected = T * K
    flops, read = only(attention_flops=1.0), only(record_bytes_per_s=1.0)
    paths = [({}, w), ({"token_split": True}, n)]
    paths += [({"gather": True}, 1), ({"gather": True, "token_split": True}, n)] if w > 1 else []
    for options, readers in paths:
        assert attended(qsplit, w, flops, **options).seconds == pytest.approx(2 * selected * 64 / n * (DK + L))
        assert attended(qsplit, w, read, **options).seconds == pytest.approx(selected * R / readers)


# (qsplit, dcp): what "auto" takes for 8192 rows behind up to 128K tokens, and what changes at 1M; bf16 records.
PICKED = {
    (8, 1): ({"query_split", "token_split"}, {"query_split", "token_split"}),
    (4, 2): ({"query_split", "ckv_gather", "token_split"}, {"query_split", "token_split"}),
    (2, 4): ({"query_split", "ckv_gather", "token_split"}, {"query_split"}),
    (1, 8): ({"ckv_gather", "token_split"}, set()),
    (2, 1): ({"query_split"}, {"query_split"}),
    (1, 2): ({"ckv_gather"}, set()),
}


@pytest.mark.parametrize("mesh", PICKED)
def test_what_auto_picks(mesh):
    model = dataclasses.replace(GLM, record_bytes=1152)

    def picked(history: int, rows: int) -> set[str]:
        decision = decide(PrefillPolicy(), [history + rows], [rows], model, qsplit=mesh[0], dcp=mesh[1])
        assert mesh[1] == 1 or decision.merge == ("owner" if rows > 1 else "replicated")
        return {name for name in SWITCHES if getattr(decision, name)}

    assert [picked(history, T) for history in (0, 8192, S)] == [PICKED[mesh][0]] * 3
    assert picked(1 << 20, T) == PICKED[mesh][1]
    assert picked(S, 1) == set()
