"""Gathered history: the same bytes as the ranks hold, the same attention as one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from dsa_jax.testing import users_mesh
from pallas_kernels.ckv_records import ckv_format, pack
from pallas_kernels.sparse_mla import sparse_mla
from sharding.ckv_gather import (
    append_chunk,
    buffer_rows,
    count_to_last_valid,
    gather_history,
    gather_history_windows,
    history_windows,
    read_pages,
    remap,
)
from sharding.local_keys import history_slots, key_layout, rows_needed
from sharding.mesh import DCP, TP_AXES
from tests.sharding.harness import (
    BATCH,
    attend,
    attention,
    collectives,
    i32,
    on_every_rank,
    run_on_every_rank,
)

LATENT, SCALE = 6, 0.3


def gather(read, layout, context_lens, table, requests, positions, own, *, rows, interleave, page_size, window):
    """The gathered buffer with the step's own records in it; `window` None gathers at once."""
    rank = jax.lax.axis_index(DCP)
    slots = history_slots(layout, context_lens, table, rank, rows=rows, interleave=interleave, page_size=page_size)
    if window is None:
        buffer = gather_history(read, slots)
    else:
        buffer = jnp.zeros((layout.ranks, rows, *own.shape[1:]), own.dtype)
        windows = history_windows(layout, context_lens, interleave=interleave, window=window)
        buffer = gather_history_windows(read, slots, windows, buffer, window=window)
    placed = remap(positions[:, None], requests, layout, rows=rows, interleave=interleave)[:, 0]
    return append_chunk(buffer, own, placed)


def program(qsplit, dcp, interleave, window, *, records=None, written=False, axis_type=AxisType.Auto):
    """Gather and, on float records, attention with the local heads alone.

    With `written` the cache holds the step's own records already and nothing is appended.
    """
    case = attention()
    records = case.records if records is None else records
    page_size = max(4, interleave)
    rows = buffer_rows(sum(BATCH.seq_lens), len(BATCH.seq_lens), ranks=dcp, interleave=interleave, multiple=16)
    lens = BATCH.seq_lens if written else BATCH.context_lens
    junk = 9 if records[0].dtype == np.uint8 else np.nan
    pages = BATCH.pages(records, lens, dcp, interleave, page_size, junk)
    args = (
        pages.reshape(-1, *pages.shape[2:]),
        BATCH.own(records),
        case.q,
        i32(case.ids),
        i32(np.full(BATCH.rows, -1) if written else BATCH.requests),
        i32(BATCH.positions),
        i32(lens),
        i32(BATCH.block_table(page_size)),
        BATCH.layout(dcp, interleave),
    )
    specs = (P(DCP), P(), P(None, TP_AXES), P(), P(), P(), P(), P(), P())

    def local(pages, own, q, ids, requests, positions, context_lens, table, layout):
        buffer = gather(
            read_pages(pages),
            layout,
            context_lens,
            table,
            requests,
            positions,
            own,
            rows=rows,
            interleave=interleave,
            page_size=page_size,
            window=window,
        )
        if buffer.dtype == jnp.uint8:
            return buffer
        slots = remap(ids, requests, layout, rows=rows, interleave=interleave, visible=positions + 1)
        return sparse_mla(
            q,
            buffer.reshape(-1, buffer.shape[-1]),
            slots,
            softmax_scale=SCALE,
            kv_lora_rank=LATENT,
            num_valid=count_to_last_valid(slots),
        )

    return local, users_mesh(1, qsplit, dcp, axis_type), specs, args


CASES = [
    (1, 8, 1, 16, AxisType.Explicit),
    (2, 4, 4, None, AxisType.Auto),
    (4, 2, 16, 16, AxisType.Auto),
    (8, 1, 1, None, AxisType.Explicit),
]


@pytest.mark.parametrize(("qsplit", "dcp", "interleave", "window", "axis_type"), CASES)
def test_attention_equals_one_device(qsplit, dcp, interleave, window, axis_type):
    settings = program(qsplit, dcp, interleave, window, axis_type=axis_type)
    out, lse = run_on_every_rank(*settings, check_vma=interleave != 16)
    expected, expected_lse = attend()
    out = np.moveaxis(out, 0, 1).reshape(expected.shape)
    lse = np.moveaxis(lse, 0, 1).reshape(expected_lse.shape)
    np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("qsplit", "dcp", "interleave", "window"), [(2, 4, 1, 16), (4, 2, 4, None)])
def test_bytes_equal_those_of_a_gather_after_the_write(qsplit, dcp, interleave, window):
    rng = np.random.default_rng(8)
    records = [rng.integers(0, 256, (n, 11), dtype=np.uint8) for n in BATCH.seq_lens]
    ahead = run_on_every_rank(*program(qsplit, dcp, interleave, window, records=records))
    after = run_on_every_rank(*program(qsplit, dcp, interleave, None, records=records, written=True))
    np.testing.assert_array_equal(ahead, after)
    assert np.all(ahead == ahead[0])
    layout = key_layout(np.array(BATCH.seq_lens), ranks=dcp, interleave=interleave)
    for rank, dealt in enumerate(BATCH.deal(records, dcp, interleave, rows=184)):
        used = layout.lens[rank].sum()
        np.testing.assert_array_equal(ahead[0, rank, :used], dealt[:used])
        assert np.all(ahead[0, rank, used:] == 0)


@pytest.mark.parametrize("name", ["bf16", "fp8_ds_mla", "nvfp4_ds_mla"])
def test_every_format_is_attended_to_where_it_was_gathered(name):
    """Records travel as they are stored: attention over the gathered buffer is that over one device's records."""
    fmt = ckv_format(name, kv_lora_rank=512, qk_rope_head_dim=64)
    rng, heads, scale = np.random.default_rng(12), 8, 0.05
    values = jnp.asarray(rng.standard_normal((sum(BATCH.seq_lens), fmt.width)), jnp.float32)
    packed = jax.jit(functools.partial(pack, fmt))(values)
    records = np.split(np.asarray(packed), np.cumsum(BATCH.seq_lens)[:-1])
    # XLA's gathers of bfloat16 and of bytes are what is tested: the queries are exact in both.
    q = jnp.asarray(rng.integers(-2, 3, (BATCH.rows, heads, fmt.width)), jnp.bfloat16)
    _, mesh, specs, args = program(2, 4, 4, 16, records=records)
    args, ids = (*args[:2], q, *args[3:]), attention().ids
    rows = buffer_rows(sum(BATCH.seq_lens), len(BATCH.seq_lens), ranks=4, interleave=4, multiple=16)
    options = {"softmax_scale": scale, "kv_lora_rank": fmt.latent, "out_dtype": jnp.float32}
    options["kv_format"] = None if fmt.encoding == "plain" else fmt

    def local(pages, own, q, ids, requests, positions, context_lens, table, layout):
        placed = {"rows": rows, "interleave": 4, "page_size": 4, "window": 16}
        buffer = gather(read_pages(pages), layout, context_lens, table, requests, positions, own, **placed)
        slots = remap(ids, requests, layout, rows=rows, interleave=4, visible=positions + 1)
        return sparse_mla(q, buffer.reshape(-1, buffer.shape[-1]), slots, **options)

    out, lse = run_on_every_rank(local, mesh, specs, args)
    starts = np.concatenate([[0], np.cumsum(BATCH.seq_lens)])
    slots = np.where(ids < 0, -1, ids + starts[np.maximum(BATCH.requests, 0)][:, None])
    want, want_lse = jax.jit(functools.partial(sparse_mla, **options))(q, packed, i32(slots))
    np.testing.assert_allclose(np.moveaxis(out, 0, 1).reshape(want.shape), want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(np.moveaxis(lse, 0, 1).reshape(want_lse.shape), want_lse, rtol=1e-5, atol=1e-5)


def windows_program(window, rows=32, width=3, buffer_width=3):
    """Gather of one request on four ranks into a buffer of sentinels."""
    rng = np.random.default_rng(9)
    pages = rng.standard_normal((4, 16, 4, width)).astype(np.float32)
    table = i32(np.arange(16)[None])

    def local(pages, context_lens, layout):
        rank = jax.lax.axis_index(DCP)
        slots = history_slots(layout, context_lens, table, rank, rows=rows, interleave=1, page_size=4)
        count = history_windows(layout, context_lens, interleave=1, window=window)
        buffer = jnp.full((4, rows, buffer_width), -5.0, jnp.float32)
        return gather_history_windows(read_pages(pages), slots, count, buffer, window=window), count

    def args(context, seq_len):
        layout = jax.tree.map(i32, key_layout(np.array([seq_len]), ranks=4, interleave=1))
        return pages.reshape(-1, 4, width), i32([context]), layout

    return local, users_mesh(1, 1, 4), (P(DCP), P(), P()), args, pages.reshape(4, 64, width)


def test_windows_move_what_is_there_in_one_program():
    local, mesh, specs, make_args, held = windows_program(8)
    run, _ = on_every_rank(local, mesh, specs, make_args(0, 8))
    for context, windows in ((0, 0), (1, 1), (32, 1), (33, 2), (120, 4)):
        _, args = on_every_rank(local, mesh, specs, make_args(context, context + 8))
        buffer, count = jax.tree.map(np.asarray, run(*args))
        assert count.tolist() == [windows] * 4
        for rank in range(4):
            length = len(range(rank, context, 4))
            np.testing.assert_array_equal(buffer[2, rank, :length], held[rank, :length])
            assert np.all(buffer[2, rank, length : windows * 8] == 0)
            assert np.all(buffer[2, rank, windows * 8 :] == -5)
    assert run._cache_size() == 1


def test_only_records_travel():
    rows = buffer_rows(sum(BATCH.seq_lens), len(BATCH.seq_lens), ranks=4, interleave=4, multiple=16)
    at_once = collectives(*on_every_rank(*program(2, 4, 4, None)))
    assert at_once == [("all-gather", f"f32[4,{rows},8]")]
    windows = collectives(*on_every_rank(*program(2, 4, 4, 16)))
    assert windows == [("all-gather", "f32[4,16,8]")]
    assert collectives(*on_every_rank(*program(8, 1, 1, 16))) == []


def test_buffer_and_window_are_checked():
    for window, options, message in (
        (7, {}, "window=7 must divide the 32 rows"),
        (8, {"buffer_width": 4}, r"buffer must be float32\[4, 32, 3\], got float32\[4, 32, 4\]"),
    ):
        local, mesh, specs, make_args, _ = windows_program(window, **options)
        with pytest.raises(ValueError, match=message):
            collectives(*on_every_rank(local, mesh, specs, make_args(4, 8)))


def test_the_buffer_holds_any_step_it_was_made_for():
    rng = np.random.default_rng(10)
    for _ in range(50):
        ranks, interleave = int(rng.choice([1, 2, 3, 4, 8])), int(rng.choice([1, 4, 16]))
        seq_lens = rng.integers(0, 60, int(rng.integers(1, 7)))
        rows = buffer_rows(int(seq_lens.sum()), len(seq_lens), ranks=ranks, interleave=interleave, multiple=8)
        assert rows % 8 == 0
        assert rows_needed(key_layout(seq_lens, ranks=ranks, interleave=interleave)) <= rows


def test_pages_are_read_by_layer_and_holes_are_zero():
    pages = jnp.arange(2 * 3 * 4 * 2, dtype=jnp.float32).reshape(2, 3, 4, 2)
    slots = i32([11, -1, 0])
    for layer in (0, 1):
        got = jax.jit(lambda p, layer, s: read_pages(p, layer)(s))(pages, jnp.int32(layer), slots)
        np.testing.assert_array_equal(got, [pages[layer, 2, 3], [0, 0], pages[layer, 0, 0]])
    np.testing.assert_array_equal(read_pages(pages[1])(slots)[0], pages[1, 2, 3])
