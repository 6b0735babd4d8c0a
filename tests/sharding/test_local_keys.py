"""Buffers of keys on each rank, against lists built token by token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sharding.local_keys import history_slots, key_layout, local_rows, row_key_ranges, rows_needed
from sharding.ownership import owner_of, slot_mapping


def i32(x):
    return jnp.asarray(np.asarray(x), jnp.int32)


def padded(x):
    return i32(np.concatenate([x, np.full(sum(SEQ_LENS) - len(x), -1)]))


def buffers(seq_lens, ranks, interleave):
    """What each rank's buffer holds: (request, position) of each row."""
    return [
        [
            (request, position)
            for request, length in enumerate(seq_lens)
            for position in range(length)
            if owner_of(position, ranks=ranks, interleave=interleave) == rank
        ]
        for rank in range(ranks)
    ]


SEQ_LENS = [5, 0, 22, 1, 0]
GEOMETRIES = [(1, 1), (2, 4), (4, 1), (8, 4)]
rows_of = jax.jit(local_rows, static_argnames="interleave")
ranges_of = jax.jit(row_key_ranges, static_argnames="interleave")
slots_of = jax.jit(history_slots, static_argnames=("rows", "interleave", "page_size"))


@pytest.mark.parametrize(("ranks", "interleave"), GEOMETRIES)
def test_layout_and_rows(ranks, interleave):
    held = buffers(SEQ_LENS, ranks, interleave)
    host = key_layout(np.array(SEQ_LENS), ranks=ranks, interleave=interleave)
    assert rows_needed(host) == max(map(len, held))
    assert rows_needed(host, 8) == -(-max(map(len, held)) // 8) * 8
    layout = jax.jit(lambda n: key_layout(n, ranks=ranks, interleave=interleave))(i32(SEQ_LENS))
    assert layout.starts.dtype == layout.lens.dtype == jnp.int32
    np.testing.assert_array_equal(layout.starts, host.starts)
    np.testing.assert_array_equal(layout.lens, host.lens)
    for rank in range(ranks):
        request, position = np.array(held[rank]).reshape(-1, 2).T
        rows = rows_of(layout, padded(position), padded(request), jnp.int32(rank), interleave=interleave)
        np.testing.assert_array_equal(rows[: len(position)], np.arange(len(position)))
        assert np.all(np.asarray(rows[len(position) :]) == -1)
        other = rows_of(layout, padded(position), padded(request), jnp.int32((rank + 1) % ranks), interleave=interleave)
        assert ranks == 1 or np.all(np.asarray(other) == -1)


def test_rows_of_padding_and_of_tokens_beyond_the_request_are_none():
    layout = key_layout(i32([3, 4]), ranks=1, interleave=1)
    rows = local_rows(layout, i32([-1, 2, 3, 3, 0]), i32([0, 0, 0, 1, -1]), 0, interleave=1)
    assert rows.tolist() == [-1, 2, -1, 6, -1]


@pytest.mark.parametrize(("ranks", "interleave"), GEOMETRIES)
def test_a_row_sees_what_the_rank_holds_of_its_causal_length(ranks, interleave):
    held = buffers(SEQ_LENS, ranks, interleave)
    layout = key_layout(i32(SEQ_LENS), ranks=ranks, interleave=interleave)
    requests = [0, 0, 2, 2, 2, 3, -1]
    visible = [4, 5, 1, 13, 22, 1, 9]
    for rank in range(ranks):
        start, end = ranges_of(layout, i32(requests), i32(visible), jnp.int32(rank), interleave=interleave)
        for t, (request, length) in enumerate(zip(requests, visible, strict=True)):
            expected = [n for n, (r, p) in enumerate(held[rank]) if r == request and p < length]
            assert list(range(int(start[t]), int(end[t]))) == expected


@pytest.mark.parametrize(("ranks", "interleave"), GEOMETRIES)
def test_history_comes_from_where_it_was_written(ranks, interleave):
    page_size, max_pages, rows = 4, 8, 40
    context_lens = [3, 0, 22, 0, 0]  # request 0 and 3 get new tokens in this step
    rng = np.random.default_rng(1)
    table = rng.permutation(5 * max_pages).reshape(5, max_pages)
    layout = key_layout(i32(SEQ_LENS), ranks=ranks, interleave=interleave)
    for rank, held in enumerate(buffers(SEQ_LENS, ranks, interleave)):
        slots = slots_of(
            layout,
            i32(context_lens),
            i32(table),
            jnp.int32(rank),
            rows=rows,
            interleave=interleave,
            page_size=page_size,
        )
        expected = np.full(rows, -1)
        for n, (request, position) in enumerate(held):
            if position < context_lens[request]:
                (expected[n],) = slot_mapping(
                    np.array([position]),
                    np.array([request]),
                    table,
                    rank,
                    ranks=ranks,
                    interleave=interleave,
                    page_size=page_size,
                )
                assert expected[n] >= 0
        np.testing.assert_array_equal(slots, expected)
