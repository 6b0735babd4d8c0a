"""Ownership of tokens by the ranks of a DCP group, against its vectors and against counting by hand."""

import itertools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sharding import ownership
from sharding.ownership import check_ownership, global_of, local_length, local_lengths, local_of, local_slot, owner_of

VECTORS = pathlib.Path(__file__).parents[1] / "fixtures" / "vectors"
OWNERSHIP = json.loads((VECTORS / "ownership.json").read_text())["cases"]
KPOOL = json.loads((VECTORS / "kpool.json").read_text())["cases"]
GEOMETRIES = list(itertools.product([1, 2, 3, 4, 8], [1, 2, 4, 16, 64]))


@pytest.mark.parametrize("case", OWNERSHIP, ids=lambda c: f"{c['ranks']}-{c['interleave']}-{c['seq_len']}")
def test_vectors(case):
    dealt = {"ranks": case["ranks"], "interleave": case["interleave"]}
    assert local_lengths(np.array(case["seq_len"]), **dealt).tolist() == case["local_lens"]
    for position, rank, local in case["samples"]:
        assert (owner_of(position, **dealt), local_of(position, **dealt)) == (rank, local)


@pytest.mark.parametrize(("ranks", "interleave"), GEOMETRIES)
def test_local_is_the_count_of_earlier_positions_of_the_owner(ranks, interleave):
    dealt = {"ranks": ranks, "interleave": interleave}
    positions = np.arange(300)
    owners, locals_ = owner_of(positions, **dealt), local_of(positions, **dealt)
    for rank in range(ranks):
        mine = positions[owners == rank]
        np.testing.assert_array_equal(locals_[owners == rank], np.arange(len(mine)))
        np.testing.assert_array_equal(global_of(np.arange(len(mine)), rank, **dealt), mine)
    lengths = np.arange(301)
    counted = np.array([[np.sum(owners[:n] == rank) for n in lengths] for rank in range(ranks)])
    np.testing.assert_array_equal(local_lengths(lengths, **dealt), counted)
    np.testing.assert_array_equal(counted.sum(0), lengths)


@pytest.mark.parametrize(("ranks", "interleave"), [(1, 4), (3, 2), (4, 1), (8, 16)])
def test_the_device_form_equals_the_host_form(ranks, interleave):
    dealt = {"ranks": ranks, "interleave": interleave}
    host = np.concatenate([np.arange(-1, 200), [2**30, 2**31 - 2]])
    device = jnp.asarray(host, jnp.int32)
    for formula in (owner_of, local_of):
        out = jax.jit(lambda x, formula=formula: formula(x, **dealt))(device)
        assert out.dtype == jnp.int32
        np.testing.assert_array_equal(out, formula(host, **dealt))
    rank = jnp.int32(ranks - 1)
    lengths = host[1:]
    np.testing.assert_array_equal(
        jax.jit(lambda n, r: local_length(n, r, **dealt))(device[1:], rank), local_length(lengths, ranks - 1, **dealt)
    )
    back = jax.jit(lambda n, r: global_of(n, r, **dealt))(device[:100], rank)
    np.testing.assert_array_equal(back, global_of(host[:100], ranks - 1, **dealt))


def test_none_stays_none():
    for value in (np.array([-1, -7]), jnp.array([-1, -7], jnp.int32)):
        for formula in (owner_of, local_of):
            assert formula(value, ranks=4, interleave=2).tolist() == [-1, -1]
        assert global_of(value, 3, ranks=4, interleave=2).tolist() == [-1, -1]


def test_interleave_above_one():
    assert (owner_of(13, ranks=2, interleave=4), local_of(13, ranks=2, interleave=4)) == (1, 5)
    assert local_lengths(np.array(13), ranks=2, interleave=4).tolist() == [8, 5]


def test_only_the_owner_converts_an_id():
    table = np.array([[5, 9, 2]])
    slots = [
        ownership.slot_mapping(np.array([5]), np.array([0]), table, rank, ranks=2, interleave=1, page_size=4)
        for rank in (0, 1)
    ]
    assert [int(slot[0]) for slot in slots] == [-1, 5 * 4 + 2]


def test_slots_of_a_chunk_that_starts_inside_a_page():
    table = np.array([[7, 3, 11]])
    slots = ownership.slot_mapping(
        np.arange(130, 133), np.zeros(3, np.int64), table, 0, ranks=1, interleave=1, page_size=64
    )
    assert slots.tolist() == [11 * 64 + 2, 11 * 64 + 3, 11 * 64 + 4]


@pytest.mark.parametrize(("ranks", "interleave", "page_size"), [(1, 1, 4), (2, 1, 4), (4, 2, 4), (3, 4, 8), (2, 8, 8)])
def test_every_token_has_exactly_one_slot_and_no_two_tokens_share_one(ranks, interleave, page_size):
    lengths = [1, 37, 50]
    per_request = -(-max(lengths) // (page_size * ranks))
    order = np.random.default_rng(0).permutation(len(lengths) * per_request)
    table = order.reshape(len(lengths), per_request)
    positions = np.concatenate([np.arange(n) for n in lengths])
    requests = np.repeat(np.arange(len(lengths)), lengths)
    geometry = {"ranks": ranks, "interleave": interleave, "page_size": page_size}
    slots = np.stack([ownership.slot_mapping(positions, requests, table, r, **geometry) for r in range(ranks)])
    owned = slots >= 0
    np.testing.assert_array_equal(owned.sum(0), np.ones(len(positions)))
    for rank in range(ranks):
        mine = slots[rank][owned[rank]]
        assert len(set(mine.tolist())) == len(mine)
        assert mine.max(initial=0) < table.size * page_size
    # Upstream's address: the page of B * W positions, then the run inside it.
    page, offset = np.divmod(positions, page_size * ranks)
    expected = table[requests, page] * page_size + offset // (ranks * interleave) * interleave + offset % interleave
    np.testing.assert_array_equal(slots.max(0), expected)
    arrays = [jnp.asarray(x, jnp.int32) for x in (positions, requests, table)]
    device = jax.jit(lambda p, q, t, r: ownership.slot_mapping(p, q, t, r, **geometry))(*arrays, jnp.int32(ranks - 1))
    np.testing.assert_array_equal(device, slots[-1])


@pytest.mark.parametrize("make", [np.asarray, jnp.asarray])
def test_padding_and_unknown_pages_get_no_slot(make):
    table = make(np.array([[0, -1]], np.int32))
    positions = make(np.array([0, -1, 4, 8, 1, 1], np.int32))
    requests = make(np.array([0, 0, 0, 0, -1, 1], np.int32))
    slots = ownership.slot_mapping(positions, requests, table, 0, ranks=1, interleave=1, page_size=4)
    # a token; padding; a page not given; beyond the table; no such request, twice
    assert slots.tolist() == [0, -1, -1, -1, -1, -1]


def test_padded_tokens_leave_page_zero_alone():
    positions = jnp.array([0, 1, 2, -1, -1, -1, -1, -1], jnp.int32)
    table = jnp.array([[1]], jnp.int32)
    slots = ownership.slot_mapping(positions, jnp.zeros(8, jnp.int32), table, 0, ranks=1, interleave=1, page_size=4)
    cache = (
        jnp.full((8,), -5, jnp.int32)
        .at[slots]
        .set(jnp.arange(8, dtype=jnp.int32), mode="drop", wrap_negative_indices=False)
    )
    assert cache.tolist() == [-5] * 4 + [0, 1, 2, -5]


def test_host_slots_pass_the_range_of_int32():
    table = np.array([[2**27]])
    slots = ownership.slot_mapping(np.array([3]), np.array([0]), table, 0, ranks=1, interleave=1, page_size=64)
    assert slots.tolist() == [2**33 + 3]


def test_local_slot_reads_the_row_of_its_request():
    table = np.array([[0, 1], [2, 3]])
    slots = local_slot(np.array([[0, 5], [0, 5]]), np.array([[0], [1]]), table, page_size=4)
    assert slots.tolist() == [[0, 5], [8, 13]]


@pytest.mark.parametrize("ranks", [1, 2])
def test_pools_of_large_pages_have_slots_of_their_own(ranks):
    # Pages of 640 tokens a rank are pages of 160 pools: no slot is shared, and the last token of the table has one.
    pages, page_size, kpool = 251, 640, 4
    table = np.random.default_rng(0).permutation(pages)[None]
    last = pages * page_size * ranks - 1
    geometry = {"ranks": ranks, "interleave": ownership.pool_interleave(page_size, kpool), "page_size": 160}
    pools = np.concatenate([np.arange(4096), [last // kpool]])
    slots = [ownership.slot_mapping(pools, np.zeros_like(pools), table, rank, **geometry) for rank in range(ranks)]
    owned = np.stack(slots).max(axis=0)
    assert np.all((np.stack(slots) >= 0).sum(axis=0) == 1)
    assert len({(int(np.argmax(s)), int(max(s))) for s in np.stack(slots).T}) == len(pools)
    assert owned[-1] == table[0, -1] * 160 + 159


def test_geometry_is_checked():
    check_ownership(ranks=4, interleave=4, page_size=8, kpool=4)
    check_ownership(ranks=1, interleave=1, page_size=8, kpool=4)
    for bad, message in (
        ({"ranks": 0, "interleave": 1}, "ranks must be positive, got ranks=0"),
        ({"ranks": 2, "interleave": 0}, "interleave must be positive"),
        ({"ranks": 2, "interleave": 1, "kpool": 0}, "kpool must be positive"),
        ({"ranks": 2, "interleave": 1, "page_size": 0}, "page_size must be positive"),
        ({"ranks": 2, "interleave": 3, "page_size": 8}, "page_size=8 must be divisible by interleave=3"),
        ({"ranks": 2, "interleave": 16, "page_size": 8}, "page_size=8 must be divisible by interleave=16"),
        ({"ranks": 2, "interleave": 2, "kpool": 4}, "interleave=2 must be divisible by kpool=4"),
        ({"ranks": 1, "interleave": 2, "page_size": 6, "kpool": 4}, "page_size=6 must be divisible by kpool=4"),
    ):
        with pytest.raises(ValueError, match=message):
            check_ownership(**bad)


@pytest.mark.parametrize("case", KPOOL, ids=lambda c: str(c["position"]))
def test_pools_are_dealt_as_the_tokens_they_hold(case):
    kpool, interleave, ranks = 4, 8, 4
    pools = {"ranks": ranks, "interleave": ownership.pool_interleave(interleave, kpool)}
    complete = case["complete_pools"]
    for pool in range(complete):
        tokens = np.arange(pool * kpool, (pool + 1) * kpool)
        owners = owner_of(tokens, ranks=ranks, interleave=interleave)
        assert set(owners.tolist()) == {int(owner_of(pool, **pools))}
    assert int(local_lengths(np.array(complete), **pools).sum()) == complete


def test_local_pools_of_the_report():
    dealt = {"ranks": 4, "interleave": ownership.pool_interleave(4, 4)}
    for position, expected in ((22, [2, 1, 1, 1]), (15, [1, 1, 1, 1]), (2, [0, 0, 0, 0])):
        assert local_lengths(np.array((position + 1) // 4), **dealt).tolist() == expected
