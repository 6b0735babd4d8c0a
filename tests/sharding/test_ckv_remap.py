"""Positions to rows of the gathered buffer."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sharding.ckv_gather import count_to_last_valid, remap
from sharding.local_keys import key_layout, rows_needed
from sharding.ownership import local_of, owner_of

VECTORS = pathlib.Path(__file__).parents[1] / "fixtures" / "vectors"
REMAP = json.loads((VECTORS / "remap.json").read_text())
remap_of = jax.jit(remap, static_argnames=("rows", "interleave"))


def i32(x):
    return jnp.asarray(np.asarray(x), jnp.int32)


def test_vectors():
    dealt = {"ranks": REMAP["ranks"], "interleave": REMAP["interleave"]}
    host = key_layout(np.array(REMAP["seq_lens"]), **dealt)
    assert host.lens.tolist() == REMAP["local_lens"]
    assert rows_needed(host, REMAP["page"]) == REMAP["padded"]
    layout = key_layout(i32(REMAP["seq_lens"]), **dealt)
    for case in REMAP["cases"]:
        slots = remap_of(
            i32([case["ids"]]), i32([case["request"]]), layout, rows=REMAP["padded"], interleave=REMAP["interleave"]
        )
        assert slots.tolist() == [case["slots"]]


@pytest.mark.parametrize(("ranks", "interleave"), [(1, 1), (2, 4), (4, 1), (8, 2)])
def test_every_token_of_a_ragged_batch_is_found(ranks, interleave):
    seq_lens, rows = [7, 0, 90, 1], 104
    host = key_layout(np.array(seq_lens), ranks=ranks, interleave=interleave)
    buffer = np.full((ranks, rows), -1)
    for request, length in enumerate(seq_lens):
        for position in range(length):
            rank = owner_of(position, ranks=ranks, interleave=interleave)
            local = local_of(position, ranks=ranks, interleave=interleave)
            buffer[rank, host.starts[rank, request] + local] = request * 1000 + position
    rng = np.random.default_rng(2)
    requests = np.array([0, 2, 2, 3, -1])
    positions = np.stack([rng.permutation(90)[:24] for _ in requests])
    layout = key_layout(i32(seq_lens), ranks=ranks, interleave=interleave)
    slots = np.asarray(remap_of(i32(positions), i32(requests), layout, rows=rows, interleave=interleave))
    for t, request in enumerate(requests):
        for column, position in enumerate(positions[t]):
            if request < 0 or position >= seq_lens[request]:
                assert slots[t, column] == -1
            else:
                assert buffer.ravel()[slots[t, column]] == request * 1000 + position


def test_the_bound_is_the_global_causal_length():
    # Six tokens on four ranks: rank 0 holds two of them, and the last row still sees all six.
    layout = key_layout(i32([6]), ranks=4, interleave=1)
    ids = i32([[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]])
    slots = remap_of(ids, i32([0, 0]), layout, rows=2, interleave=1, visible=i32([6, 3]))
    assert slots.tolist() == [[0, 2, 4, 6, 1, 3], [0, 2, 4, -1, -1, -1]]
    assert count_to_last_valid(slots).tolist() == [6, 3]


def test_the_second_request_finds_its_own_tokens():
    layout = key_layout(i32([8, 6]), ranks=2, interleave=1)
    slots = remap_of(i32([[2, 7]]), i32([1]), layout, rows=8, interleave=1)
    assert slots.tolist() == [[4 + 1, -1]]


def test_requests_of_padding_change_no_slot():
    # Steps pad their requests to a bucket: starts must not be read with the stride of the real ones.
    ids = i32([[0, 3, 7, -1], [1, 4, 8, 2]])
    for padding in ([], [0, 0]):
        layout = key_layout(i32([8, 9, *padding]), ranks=2, interleave=1)
        slots = remap_of(ids, i32([0, 1]), layout, rows=16, interleave=1)
        assert slots.tolist() == [[0, 16 + 1, 16 + 3, -1], [16 + 4, 4 + 2, 4 + 4, 4 + 1]]


def test_a_wide_row_keeps_the_order_of_its_columns():
    # 2048 pooled tokens and a tail of 3, with holes between them.
    ids = np.full((1, 2051), -1)
    ids[0, :1000] = np.random.default_rng(3).permutation(1000)
    ids[0, 2048:2050] = [1000, 1001]
    layout = key_layout(i32([1002]), ranks=2, interleave=4)
    slots = np.asarray(remap_of(i32(ids), i32([0]), layout, rows=512, interleave=4))
    expected = np.where(ids < 0, -1, ids // 4 % 2 * 512 + ids // 8 * 4 + ids % 4)
    np.testing.assert_array_equal(slots, expected)
    assert count_to_last_valid(i32(slots)).tolist() == [2050]
    assert count_to_last_valid(jnp.full((2, 3), -1, jnp.int32)).tolist() == [0, 0]
