"""The sharded indexer equals one device: every mesh, split, merge and layout of keys."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from dsa_jax.testing import users_mesh
from sharding.indexer_sharding import IndexSharding, sharded_index_topk, split_size
from sharding.mesh import DATA, DCP
from sharding.row_partition import balanced_plan, contiguous_plan, plan_contiguous, row_costs
from tests.sharding.harness import BATCH, Batch, collectives, i32, on_every_rank, run_on_every_rank

HEADS, DIM, TOP_K = 2, 4, 8


@functools.cache
def operands(scores="ties"):
    """Index queries, weights and per-request keys of small integers: every score is exact whatever the shapes."""
    rng = np.random.default_rng(11)
    q = rng.integers(-2, 3, (BATCH.rows, HEADS, DIM)).astype(np.float32)
    weights = rng.integers(-2, 4, (BATCH.rows, HEADS)).astype(np.float32)
    keys = [rng.integers(-2, 3, (n, DIM)).astype(np.float32) for n in BATCH.seq_lens]
    if scores == "negated":
        weights = -weights
    if scores == "equal":
        keys = [np.ones_like(k) for k in keys]
    if scores == "nan":
        keys = [np.where(np.arange(len(k))[:, None] % 3 == 1, np.nan, k).astype(np.float32) for k in keys]
    return q, weights, keys


def key_scale(length):
    """Scale of each key of a request, exact in float32."""
    return (2.0 ** (np.arange(length) % 3)).astype(np.float32)


@functools.cache
def one_device(scores="ties", top_k=TOP_K, kpool=1, scaled=False):
    """Selected ids of each row, as sets."""
    q, weights, keys = operands(scores)
    chosen = []
    for t in range(BATCH.rows):
        request = BATCH.requests[t]
        seen = (BATCH.positions[t] + 1) // kpool if request >= 0 else 0
        k = keys[request][:seen].astype(np.float64)
        dots = np.einsum("hd,sd->hs", q[t], k)
        s = weights[t] @ np.where(dots > 0, dots, 0.0)
        s = s * key_scale(seen) if scaled else s
        order = sorted(range(seen), key=lambda j, s=s: (np.isnan(s[j]), -np.nan_to_num(s[j], nan=0.0), j))
        chosen.append(set(order[:top_k]))
    return chosen


def make_plan(scheme, splits, first_row=0):
    """Plan of the batch's real rows from `first_row` on, of one capacity for every scheme."""
    if scheme is None:
        return None
    costs = row_costs(BATCH.seq_lens, BATCH.query_lens, 1)[first_row:]
    if scheme == "balanced":
        return balanced_plan(costs, rows=BATCH.rows, ranks=splits, tile=2, first_row=first_row)
    sizes = plan_contiguous(BATCH.seq_lens, BATCH.query_lens, ratio=1, ranks=splits, min_rows_per_rank=0)
    sizes = (len(costs),) if sizes is None else sizes
    return contiguous_plan(sizes, rows=BATCH.rows, first_row=first_row, capacity=max(sizes) + 1)


def program(qsplit, dcp, sharding, scheme, *, scores="ties", top_k=TOP_K, kpool=1, axis_type=AxisType.Auto, **options):
    """The sharded selection as a program that returns every rank's ids."""
    q, weights, keys = operands(scores)
    shards, interleave = sharding.shards, sharding.interleave
    pools = Batch(tuple(n // kpool for n in BATCH.seq_lens), BATCH.query_lens, BATCH.rows)
    keys = [k[:n] for k, n in zip(keys, pools.seq_lens, strict=True)]
    buffers = pools.deal(keys, shards, interleave, rows=184)
    held = buffers[np.arange(dcp) % shards].reshape(-1, DIM)  # rank d holds shard d % shards
    visible = np.where(BATCH.requests >= 0, (BATCH.positions + 1) // kpool, 77)
    scale = None
    if options.pop("scaled", False):
        scale = pools.deal([key_scale(n) for n in pools.seq_lens], shards, interleave, rows=184)
        scale = scale[np.arange(dcp) % shards].ravel()
    plan = options.pop("plan", None) or make_plan(scheme, split_size(qsplit, dcp, sharding))

    def select(q, weights, keys, scale, requests, visible, layout, plan):
        placed = {"sharding": sharding, "plan": plan, "k_scale": scale, **options}
        return sharded_index_topk(q, keys, weights, requests, visible, layout, top_k, **placed)

    args = (q, weights, held, scale, i32(BATCH.requests), i32(visible), pools.layout(shards, interleave), plan)
    specs = (P(), P(), P(DCP), P(DCP), P(), P(), P(), P())
    return select, users_mesh(1, qsplit, dcp, axis_type), specs, args


def check(ids, expected, top_k=TOP_K):
    """Every rank has the same ids, and they are the expected sets with -1 behind them."""
    assert ids.shape[1:] == (BATCH.rows, top_k)
    assert np.all(ids == ids[0])
    for t, wanted in enumerate(expected):
        count = len(wanted)
        assert set(ids[0, t, :count].tolist()) == wanted, t
        assert np.all(ids[0, t, count:] == -1), t


# (qsplit, dcp), shards, interleave, merge, scheme, scores, axis types: each pair of settings once, not the product.
CASES = [
    (1, 8, 8, 1, "owner", None, "ties", AxisType.Auto),
    (1, 8, 8, 4, "replicated", "balanced", "nan", AxisType.Explicit),
    (1, 8, 4, 4, "owner", "contiguous", "ties", AxisType.Explicit),
    (1, 8, 2, 16, "replicated", "balanced", "equal", AxisType.Auto),
    (1, 8, 1, 1, "owner", "balanced", "ties", AxisType.Auto),
    (2, 4, 4, 1, "owner", "balanced", "equal", AxisType.Auto),
    (2, 4, 4, 16, "replicated", "contiguous", "ties", AxisType.Auto),
    (2, 4, 2, 4, "replicated", "contiguous", "nan", AxisType.Explicit),
    (2, 4, 2, 1, "owner", "balanced", "nan", AxisType.Auto),
    (4, 2, 2, 4, "owner", "contiguous", "equal", AxisType.Explicit),
    (4, 2, 2, 16, "replicated", None, "nan", AxisType.Auto),
    (8, 1, 1, 1, "owner", "balanced", "nan", AxisType.Explicit),
    (8, 1, 1, 4, "replicated", "contiguous", "ties", AxisType.Auto),
]


@pytest.mark.parametrize(("qsplit", "dcp", "shards", "interleave", "merge", "scheme", "scores", "axis_type"), CASES)
def test_equals_one_device(qsplit, dcp, shards, interleave, merge, scheme, scores, axis_type):
    sharding = IndexSharding(shards, interleave, merge)
    settings = program(qsplit, dcp, sharding, scheme, scores=scores, axis_type=axis_type)
    ids = run_on_every_rank(*settings, check_vma=interleave != 4)
    check(ids, one_device(scores))
    assert set(np.asarray(ids[0][BATCH.requests < 0]).ravel().tolist()) == {-1}


def test_pools_are_selected_before_they_are_expanded():
    ids = run_on_every_rank(*program(2, 4, IndexSharding(4, 1, "owner"), "balanced", top_k=4, kpool=4))
    check(ids, one_device(top_k=4, kpool=4), top_k=4)


def test_scales_of_the_keys_are_dealt_with_them():
    ids = run_on_every_rank(*program(2, 4, IndexSharding(2, 4), "balanced", scaled=True))
    check(ids, one_device(scaled=True))
    assert one_device(scaled=True) != one_device()


def test_data_groups_never_mix():
    fn, _, specs, args = program(2, 2, IndexSharding(2, 1), "balanced")
    weights = np.concatenate([args[1], operands("negated")[1]])
    mesh = users_mesh(2, 2, 2)
    ids = run_on_every_rank(fn, mesh, (specs[0], P(DATA), *specs[2:]), (args[0], weights, *args[2:]))
    check(ids[:4], one_device())
    check(ids[4:], one_device("negated"))


def test_a_workspace_of_one_row_changes_nothing():
    # Every tile of rows reads the same keys, gathered or filled once.
    ids = run_on_every_rank(*program(2, 4, IndexSharding(4, 1, "owner"), "balanced", workspace_bytes=1))
    check(ids, one_device())


def test_more_columns_than_keys():
    ids = run_on_every_rank(*program(2, 4, IndexSharding(4, 4, "owner"), "balanced", top_k=200))
    check(ids, one_device(top_k=200), top_k=200)


def test_rows_outside_the_plan_keep_what_they_had():
    decode = 2
    plan = make_plan("balanced", 2, first_row=decode)
    initial = i32(np.arange(BATCH.rows * TOP_K).reshape(BATCH.rows, TOP_K))
    ids = run_on_every_rank(*program(2, 4, IndexSharding(4, 1), "balanced", plan=plan, initial=initial))
    real = BATCH.requests >= 0
    outside = ~real | (np.arange(BATCH.rows) < decode)
    np.testing.assert_array_equal(ids[:, outside], np.broadcast_to(initial[outside], (8, outside.sum(), TOP_K)))
    for t in np.flatnonzero(~outside):
        wanted = one_device()[t]
        assert set(ids[5, t, : len(wanted)].tolist()) == wanted


def test_union_keeps_the_best_of_each_shard():
    ids = run_on_every_rank(*program(2, 4, IndexSharding(4, 1, "union"), "balanced"))
    ids = ids.reshape(2, 4, BATCH.rows, TOP_K)
    np.testing.assert_array_equal(ids[0], ids[1])
    for t, wanted in enumerate(one_device()):
        found = [set(ids[0, d, t].tolist()) - {-1} for d in range(4)]
        assert all(g % 4 == d for d in range(4) for g in found[d])
        seen = BATCH.positions[t] + 1
        assert [len(f) for f in found] == [min(TOP_K, len(range(d, seen, 4))) for d in range(4)]
        assert wanted <= set.union(*found)


def shapes(*settings, **options):
    fn, mesh, specs, args = program(*settings, **options)
    return collectives(*on_every_rank(fn, mesh, specs, args))


def test_only_what_must_travel_travels():
    rows = balanced = 2 * -(-BATCH.rows // 4)  # of two splits, in tiles of two
    padded = -(-rows // 4) * 4
    owner = shapes(2, 4, IndexSharding(4, 1, "owner"), "balanced")
    assert owner == [
        ("all-gather", f"s32[8,{padded // 4},{TOP_K}]"),
        ("all-to-all", f"s32[4,{padded // 4},2,{TOP_K}]"),
    ]
    replicated = shapes(2, 4, IndexSharding(4, 1, "replicated"), "balanced")
    assert replicated == [
        ("all-gather", f"s32[2,{balanced},{TOP_K}]"),
        ("all-gather", f"s32[4,{balanced},2,{TOP_K}]"),
    ]
    # Without a merge no score leaves its rank.
    assert shapes(2, 4, IndexSharding(4, 1, "union"), "balanced") == [("all-gather", f"s32[2,{balanced},{TOP_K}]")]
    assert shapes(2, 4, IndexSharding(1), "balanced") == [("all-gather", f"s32[8,6,{TOP_K}]")]
    assert shapes(2, 4, IndexSharding(1), None) == []
    # A group of one is no group.
    assert shapes(1, 1, IndexSharding(1), "balanced") == []


@pytest.mark.parametrize("merge", ["owner", "replicated"])
def test_no_rank_can_branch_around_a_collective(merge):
    run, args = on_every_rank(*program(2, 4, IndexSharding(2, 1, merge), "contiguous"))
    assert " conditional(" not in run.lower(*args).as_text(dialect="hlo")


def test_arguments_are_checked():
    with pytest.raises(ValueError, match=r"merge must be one of .*, got 'max'"):
        IndexSharding(merge="max")
    with pytest.raises(ValueError, match="shards must be positive, got shards=0"):
        IndexSharding(shards=0)
    with pytest.raises(ValueError, match="dcp=4 must be divisible by shards=3"):
        split_size(2, 4, IndexSharding(shards=3))
    with pytest.raises(ValueError, match="plan is for 4 ranks, rows are split over 2"):
        shapes(2, 4, IndexSharding(4), None, plan=make_plan("balanced", 4))
    with pytest.raises(ValueError, match="outside a plan, got plan=None"):
        shapes(2, 4, IndexSharding(4), None, initial=jnp.zeros((BATCH.rows, TOP_K), jnp.int32))
    with pytest.raises(ValueError, match="plan is for 40 rows, got 35"):
        shapes(2, 4, IndexSharding(4), None, plan=balanced_plan(np.ones(8), rows=40, ranks=2, tile=2))


def test_a_layout_for_other_ranks_is_refused():
    fn, mesh, specs, args = program(2, 4, IndexSharding(4, 1), None)
    args = (*args[:6], BATCH.layout(2, 1), None)
    with pytest.raises(ValueError, match="layout is for 2 ranks, sharding has shards=4"):
        collectives(*on_every_rank(fn, mesh, specs, args))


def test_the_program_does_not_depend_on_the_plan():
    fn, mesh, specs, args = program(2, 4, IndexSharding(4, 1), "balanced")
    run, args = on_every_rank(fn, mesh, specs, args)
    first = np.asarray(run(*args))
    other = balanced_plan(np.arange(29)[::-1] ** 2, rows=BATCH.rows, ranks=2, tile=2)
    assert not np.array_equal(other.rows, args[-1].rows)
    _, moved = on_every_rank(fn, mesh, specs, (*args[:-1], other))
    np.testing.assert_array_equal(np.sort(run(*moved)), np.sort(first))
    assert run._cache_size() == 1
    assert jnp.asarray(first).dtype == jnp.int32
