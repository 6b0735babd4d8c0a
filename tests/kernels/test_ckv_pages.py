"""Pages of the caches against loops over single tokens, and the arguments that the operations refuse."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import ckv_records
from pallas_kernels.ckv_records import ckv_format, index_key_format, pack, unpack

append = jax.jit(ckv_records.append, static_argnums=0)
gather = jax.jit(ckv_records.gather, static_argnums=0, static_argnames="num_rows")

FORMATS = {
    "float32": ckv_format("float32", kv_lora_rank=32, qk_rope_head_dim=8),
    "bf16": ckv_format("bf16", kv_lora_rank=32, qk_rope_head_dim=8),
    "fp8_656": ckv_format("fp8_ds_mla", kv_lora_rank=512, qk_rope_head_dim=64),
    "fp8_528": ckv_format("fp8_ds_mla", kv_lora_rank=512, qk_rope_head_dim=0),
    "nvfp4_432": ckv_format("nvfp4_ds_mla", kv_lora_rank=512, qk_rope_head_dim=64),
    "nvfp4_304": ckv_format("nvfp4_ds_mla", kv_lora_rank=512, qk_rope_head_dim=0),
    "index_float32": index_key_format("float32", index_head_dim=16),
    "index_bf16": index_key_format("bf16", index_head_dim=16),
    "index_fp8": index_key_format("fp8", index_head_dim=128),
}
every_format = pytest.mark.parametrize("key", FORMATS)


def raw_bytes(records):
    array = np.ascontiguousarray(records)
    return array.view(np.uint8).reshape(*array.shape[:-1], -1)


def filled_pages(fmt, num_pages, page_size, layers=None):
    """Pages full of 0xFF bytes, which are NaN in float32, bfloat16 and e4m3."""
    shape = (num_pages, *fmt.page_shape(page_size))
    shape = shape if layers is None else (layers, *shape)
    return np.full((*shape[:-1], shape[-1] * fmt.dtype.itemsize), 0xFF, np.uint8).view(fmt.dtype)


def record_of(fmt, pages, page, offset, page_size):
    """Bytes of one record of [num_pages, ...] pages, by the layout of the deployed caches."""
    page = raw_bytes(pages[page].reshape(1, -1))[0]
    if fmt.planar:
        scale = page_size * 128 + offset * 4
        return np.concatenate([page[offset * 128 : offset * 128 + 128], page[scale : scale + 4]])
    return page[offset * fmt.bytes_per_token : (offset + 1) * fmt.bytes_per_token]


def random_records(fmt, shape, seed=0):
    raw = np.random.default_rng(seed).integers(0, 255, (*shape, fmt.bytes_per_token)).astype(np.uint8)
    return raw.view(fmt.dtype)


@every_format
def test_append_writes_its_slots_and_nothing_else(key):
    fmt, page_size = FORMATS[key], 4
    pages = filled_pages(fmt, 6, page_size)
    records = random_records(fmt, (8,))
    slots = np.array([9, -1, 23, 2, -1, 4, -1, -1], np.int32)
    got = np.asarray(append(fmt, pages, records, slots))
    for slot in range(24):
        found = record_of(fmt, got, slot // page_size, slot % page_size, page_size)
        rows = np.flatnonzero(slots == slot)
        want = raw_bytes(records[rows[0]][None])[0] if len(rows) else np.full(fmt.bytes_per_token, 0xFF)
        np.testing.assert_array_equal(found, want)


@every_format
def test_padded_rows_leave_page_0_alone(key):
    fmt = FORMATS[key]
    pages = filled_pages(fmt, 3, 4)
    slots = jnp.asarray([5, 6, 7, -1, -1, -1, -1, -1], jnp.int32)
    got = np.asarray(append(fmt, jnp.asarray(pages), jnp.asarray(random_records(fmt, (8,))), slots))
    np.testing.assert_array_equal(raw_bytes(got)[[0, 2]], raw_bytes(pages)[[0, 2]])
    assert (raw_bytes(got)[1] != raw_bytes(pages)[1]).any()
    only_padding = append(fmt, jnp.asarray(pages), jnp.asarray(random_records(fmt, (8,))), jnp.full(8, -1, jnp.int32))
    np.testing.assert_array_equal(raw_bytes(only_padding), raw_bytes(pages))


def test_slots_past_the_end_are_dropped():
    fmt = FORMATS["fp8_656"]
    pages = filled_pages(fmt, 2, 4)
    slots = jnp.asarray([8, 2**31 - 1, -(2**31)], jnp.int32)
    got = append(fmt, jnp.asarray(pages), jnp.asarray(random_records(fmt, (3,))), slots)
    np.testing.assert_array_equal(got, pages)


@pytest.mark.parametrize("key", ["bf16", "nvfp4_432", "index_fp8"])
def test_all_layers_are_written_by_one_append(key):
    fmt = FORMATS[key]
    pages, records = filled_pages(fmt, 5, 4, layers=3), random_records(fmt, (3, 6))
    slots = np.array([3, 17, -1, 8, 0, 1], np.int32)
    got = append(fmt, jnp.asarray(pages), jnp.asarray(records), jnp.asarray(slots))
    for layer in range(3):
        alone = append(fmt, jnp.asarray(pages[layer]), jnp.asarray(records[layer]), jnp.asarray(slots))
        np.testing.assert_array_equal(raw_bytes(got[layer]), raw_bytes(alone))
    table, lens = jnp.asarray([[4, 0]], jnp.int32), jnp.asarray([6], jnp.int32)
    for layer in range(3):
        one = gather(fmt, got, table, lens, num_rows=8, layer=layer)
        np.testing.assert_array_equal(raw_bytes(one), raw_bytes(gather(fmt, got[layer], table, lens, num_rows=8)))


def requests(fmt, page_size, lens, num_pages, seed=0):
    """Pages with the records of requests in pages drawn by `seed`, NaN bytes elsewhere; the table; the records."""
    free = np.random.default_rng(seed).permutation(num_pages)
    table = np.full((len(lens), 5), -1, np.int32)
    slots = []
    for request, length in enumerate(lens):
        needed = -(-length // page_size)
        table[request, :needed], free = free[:needed], free[needed:]
        positions = np.arange(length)
        slots.append(table[request, positions // page_size] * page_size + positions % page_size)
    records = random_records(fmt, (sum(lens),))
    slots = np.concatenate(slots).astype(np.int32)
    pages = append(fmt, jnp.asarray(filled_pages(fmt, num_pages, page_size)), jnp.asarray(records), jnp.asarray(slots))
    return pages, jnp.asarray(table), records


@every_format
def test_gather_returns_the_records_in_order_and_zero_padding(key):
    fmt, lens = FORMATS[key], [7, 0, 1, 16, 5]
    pages, table, records = requests(fmt, 4, lens, 20)
    got = gather(fmt, pages, table, jnp.asarray(lens, jnp.int32), num_rows=40)
    assert got.dtype == fmt.dtype
    np.testing.assert_array_equal(raw_bytes(got[:29]), raw_bytes(records))
    assert not raw_bytes(got[29:]).any()


@pytest.mark.parametrize("page_size", [4, 16, 64])
@pytest.mark.parametrize("key", ["fp8_656", "index_fp8"])
def test_any_page_size_and_page_order_gives_the_same_rows(key, page_size):
    fmt, lens = FORMATS[key], [9, 20, 3]
    pages, table, records = requests(fmt, page_size, lens, 24, seed=page_size)
    got = gather(fmt, pages, table, jnp.asarray(lens, jnp.int32), num_rows=33)
    np.testing.assert_array_equal(raw_bytes(got[:32]), raw_bytes(records))
    order = np.array([2, 0, 1])
    turned = gather(fmt, pages, table[order], jnp.asarray(lens, jnp.int32)[order], num_rows=33)
    by_request = np.split(raw_bytes(records), np.cumsum(lens)[:-1])
    np.testing.assert_array_equal(raw_bytes(turned[:32]), np.concatenate([by_request[r] for r in order]))


def test_windows_cover_the_whole_gather():
    fmt, lens = FORMATS["fp8_528"], [7, 0, 13, 5]
    pages, table, _ = requests(fmt, 4, lens, 20)
    lens = jnp.asarray(lens, jnp.int32)
    whole = gather(fmt, pages, table, lens, num_rows=32)
    windows = [gather(fmt, pages, table, lens, num_rows=8, first_row=jnp.int32(8 * i)) for i in range(4)]
    np.testing.assert_array_equal(np.concatenate(windows), whole)
    stale = jnp.where(table < 0, 3, table)
    for outside in (-8, 32, 2**30):
        assert not gather(fmt, pages, stale, lens, num_rows=8, first_row=jnp.int32(outside)).any()


def test_a_later_chunk_lands_behind_its_history():
    """Position 130 at page size 64 is offset 2 of the request's third page."""
    fmt = FORMATS["bf16"]
    table = jnp.asarray([[5, 2, 7, -1]], jnp.int32)
    record = jnp.arange(40, dtype=jnp.bfloat16)[None]
    pages = append(fmt, jnp.zeros((8, 64, 40), jnp.bfloat16), record, jnp.asarray([7 * 64 + 2], jnp.int32))
    got = gather(fmt, pages, table, jnp.asarray([131], jnp.int32), num_rows=192)
    assert np.flatnonzero(np.asarray(got[:, 1])).tolist() == [130]


def test_pages_that_the_table_lacks_read_as_zero():
    fmt = FORMATS["fp8_656"]
    pages = jnp.asarray(filled_pages(fmt, 3, 4))
    table = jnp.asarray([[0, -1, 3]], jnp.int32)
    got = gather(fmt, pages, table, jnp.asarray([16], jnp.int32), num_rows=16)
    assert (got[:4] == 0xFF).all()
    assert not got[4:].any()


def test_append_works_in_place():
    fmt = FORMATS["fp8_656"]
    shapes = (
        jax.ShapeDtypeStruct((4, 256, *fmt.page_shape(64)), fmt.dtype),
        jax.ShapeDtypeStruct((4, 16, fmt.record_width), fmt.dtype),
        jax.ShapeDtypeStruct((16,), jnp.int32),
    )
    lowered = jax.jit(functools.partial(ckv_records.append, fmt), donate_argnums=0).lower(*shapes)
    # Without this promise XLA writes the bytes of a scatter on GPUs by compare-and-swap, one at a time.
    assert "unique_indices = true" in lowered.as_text()
    assert "unique_indices = false" not in lowered.as_text()
    compiled = lowered.compile()
    memory = compiled.memory_analysis()
    pages_bytes = shapes[0].size
    assert memory.alias_size_in_bytes == pages_bytes
    assert memory.temp_size_in_bytes < pages_bytes / 100
    copies = [line for line in compiled.as_text().splitlines() if "copy(" in line and "u8[4,256," in line]
    assert not copies


def test_addresses_past_2_to_the_31_bytes():
    """The last records of a cache past 2 GiB land in its last page."""
    fmt = FORMATS["fp8_528"]
    page_size, num_pages = 2048, 2000  # 2.16e9 bytes
    slots = jnp.asarray([num_pages * page_size - 1, (num_pages - 1) * page_size, 0], jnp.int32)
    records = jnp.asarray(random_records(fmt, (3,)))

    @jax.jit
    def write_and_read():
        pages = append(fmt, jnp.zeros((num_pages, *fmt.page_shape(page_size)), fmt.dtype), records, slots)
        table = jnp.asarray([[num_pages - 1], [0]], jnp.int32)
        return gather(fmt, pages, table, jnp.asarray([page_size, page_size], jnp.int32), num_rows=2 * page_size)

    assert num_pages * page_size * fmt.bytes_per_token > 2**31
    rows = np.asarray(write_and_read())
    written = np.flatnonzero(rows.any(axis=1))
    assert written.tolist() == [0, page_size - 1, page_size]
    np.testing.assert_array_equal(rows[written], records[np.array([1, 0, 2])])


def test_append_and_gather_run_inside_shard_map():
    fmt = FORMATS["index_fp8"]
    mesh = jax.make_mesh((8,), ("dcp",), axis_types=(jax.sharding.AxisType.Auto,))
    pages, records = filled_pages(fmt, 16, 4), random_records(fmt, (24,))
    slots = np.tile(np.array([1, -1, 6], np.int32), 8)

    def step(pages, records, slots):
        pages = ckv_records.append(fmt, pages, records, slots)
        table = jnp.asarray([[0, 1]], jnp.int32)
        return pages, ckv_records.gather(fmt, pages, table, jnp.asarray([8], jnp.int32), num_rows=8)

    spec = P("dcp")
    sharded = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(spec,) * 3, out_specs=(spec, spec)))
    put = functools.partial(jax.device_put, device=NamedSharding(mesh, spec))
    got_pages, got_rows = sharded(put(pages), put(records), put(slots))
    for rank in range(8):
        want_pages, want_rows = step(
            jnp.asarray(pages[2 * rank : 2 * rank + 2]), jnp.asarray(records[3 * rank : 3 * rank + 3]), slots[:3]
        )
        np.testing.assert_array_equal(np.asarray(got_pages)[2 * rank : 2 * rank + 2], want_pages)
        np.testing.assert_array_equal(np.asarray(got_rows)[8 * rank : 8 * rank + 8], want_rows)


def bad_calls():
    fmt, pages = FORMATS["fp8_656"], jnp.zeros((2, 4, 656), jnp.uint8)
    table, lens, slots = jnp.zeros((1, 2), jnp.int32), jnp.zeros(1, jnp.int32), jnp.zeros(3, jnp.int32)
    records = jnp.zeros((3, 656), jnp.uint8)
    huge = jax.ShapeDtypeStruct((2**20, 2**11, 656), jnp.uint8)
    return {
        "values must have shape .*576": lambda: pack(fmt, jnp.zeros((3, 512))),
        "values must have dtype": lambda: pack(fmt, jnp.zeros((3, 576), jnp.float16)),
        "records must have shape .*656": lambda: unpack(fmt, jnp.zeros((3, 432), jnp.uint8)),
        "records must have dtype uint8": lambda: unpack(fmt, jnp.zeros((3, 656), jnp.int8)),
        "dtype must be float32 or bfloat16": lambda: unpack(fmt, records, dtype=jnp.float16),
        "implementation='cuda' is not one of": lambda: pack(fmt, jnp.zeros((3, 576)), implementation="cuda"),
        "pages must have shape": lambda: append(fmt, pages[0], records, slots),
        "a page of format 'fp8_ds_mla' must have shape": lambda: append(fmt, pages[..., :432], records, slots),
        "slot_mapping must have shape .3.": lambda: append(fmt, pages, records, slots[:2]),
        "slot_mapping must have dtype int32": lambda: append(fmt, pages, records, slots.astype(jnp.int16)),
        "2147483648 tokens": lambda: jax.eval_shape(lambda p: append(fmt, p, records, slots), huge),
        "seq_lens must have shape .1.": lambda: gather(fmt, pages, table, slots, num_rows=4),
        "num_rows must be a positive int, got 0": lambda: gather(fmt, pages, table, lens, num_rows=0),
        "gather: pages must have shape": lambda: gather(fmt, pages, table, lens, num_rows=4, layer=0),
    }


@pytest.mark.parametrize("message", bad_calls())
def test_bad_arguments_are_named(message):
    with pytest.raises(ValueError, match=message):
        bad_calls()[message]()
