"""The host's description of a step: rows, buckets, lengths, tables, and what it refuses."""

import numpy as np
import pytest

from dsa_jax.batch import Request, bucket, build_step, check_prompts, check_requests, choose_rows
from dsa_jax.cache import CacheGeometry
from pallas_kernels.ckv_records import ckv_format, index_key_format
from sharding.local_keys import history_slots, key_layout
from sharding.ownership import slot_mapping
from sharding.rows import row_positions, row_requests

CKV = ckv_format("float32", kv_lora_rank=32, qk_rope_head_dim=8)
KEYS = index_key_format("float32", index_head_dim=16)
PAGES = CacheGeometry(CKV, KEYS, page_size=4)


def request(length: int, pages: list[int], cached: int = 0, group: int = 0) -> Request:
    """A request whose token ids say which one it is and where they stand."""
    tokens = 1000 * (1 + (pages[0] if pages else 0)) + np.arange(length, dtype=np.int64)
    return Request(tokens, np.array(pages, np.int64), group, cached)


def test_decode_rows_come_first_and_the_chunk_is_cut():
    """Two prompts around two decoding requests: decode rows first, then prompts in order as far as the chunk goes."""
    requests = [
        request(9, [5, 6, 7]),
        request(8, [0, 1], cached=7),
        request(6, [2, 3], cached=2),
        request(5, [4, 8], cached=4),
        request(4, [9], cached=4),
    ]
    assert choose_rows(requests, 0, 100) == [(1, 1), (3, 1), (0, 9), (2, 4)]
    assert choose_rows(requests, 0, 12) == [(1, 1), (3, 1), (0, 9), (2, 1)]
    assert choose_rows(requests, 0, 11) == [(1, 1), (3, 1), (0, 9)]
    assert choose_rows(requests, 0, 1) == [(1, 1)]
    assert choose_rows(requests, 1, 100) == []


def test_a_prompt_of_one_token_is_no_decode_row():
    """It has no history; but the last token of a prompt behind its history is one."""
    assert choose_rows([request(3, [0]), request(1, [1])], 0, 9) == [(0, 3), (1, 1)]
    assert choose_rows([request(3, [0]), request(5, [1, 2], cached=4)], 0, 9) == [(1, 1), (0, 3)]


def test_arrays_of_a_mixed_step():
    """Every array of a step with a decode row, the rest of a chunked prompt and a new prompt."""
    requests = [request(10, [7, 5, 2], cached=6), request(8, [3, 0], cached=7), request(3, [6, 4])]
    step = build_step(requests, PAGES, groups=1, chunk_size=64)
    assert step is not None
    inputs = step.inputs
    assert all(array.dtype == np.int32 for array in vars(inputs).values() if array is not None)
    assert inputs.tokens.tolist() == [4007, 8006, 8007, 8008, 8009, 7000, 7001, 7002]
    assert inputs.query_start_loc.tolist() == [0, 1, 5, 8, 8]
    assert inputs.seq_lens.tolist() == [8, 10, 3, 0]
    assert inputs.block_table.tolist() == [[3, 0, -1, -1], [7, 5, 2, -1], [6, 4, -1, -1], [-1, -1, -1, -1]]
    assert inputs.logits_rows.tolist() == [0, 4, 7, 0]
    assert [(p.request, p.first_row, p.count, p.logits_row) for p in step.pieces] == [
        (1, 0, 1, 0),
        (0, 1, 4, 1),
        (2, 5, 3, 2),
    ]
    assert step.lengths[0].seq_lens.tolist() == [8, 10, 3]
    assert step.lengths[0].query_lens.tolist() == [1, 4, 3]
    assert [r.cached for r in requests] == [6, 7, 0], "the requests are left as they are"


def test_positions_and_slots_follow_from_the_arrays():
    """What the device derives: case 2 of multi-request appends, and chunks that start inside a page."""
    requests = [request(5, [0, 1], cached=3), request(12, [4, 2, 3], cached=9)]
    step = build_step(requests, PAGES, groups=1, chunk_size=64)
    assert step is not None
    inputs = step.inputs
    rows = row_requests(inputs.query_start_loc, 8)
    positions = row_positions(inputs.seq_lens, inputs.query_start_loc, 8)
    assert rows.tolist() == [0, 0, 1, 1, 1, -1, -1, -1]
    assert positions.tolist() == [3, 4, 9, 10, 11, -1, -1, -1]
    slots = slot_mapping(positions, rows, inputs.block_table, 0, ranks=1, interleave=1, page_size=4)
    assert np.where(rows < 0, -1, slots).tolist() == [3, 4, 13, 14, 15, -1, -1, -1]
    layout = key_layout(inputs.seq_lens, ranks=1, interleave=1)
    history = history_slots(layout, np.array([3, 9]), inputs.block_table, 0, rows=20, interleave=1, page_size=4)
    assert np.asarray(history).tolist() == [0, 1, 2, -1, -1, 16, 17, 18, 19, 8, 9, 10, 11, 12, -1, -1, -1] + [-1] * 3


def test_a_chunk_starts_inside_a_page():
    """Position 130 with pages of 64 tokens is offset 2 of the third page."""
    geometry = CacheGeometry(CKV, KEYS, page_size=64)
    step = build_step([request(131, [9, 8, 6], cached=130)], geometry, groups=1, chunk_size=64)
    assert step is not None
    slots = slot_mapping(
        np.array([130]), np.array([0]), step.inputs.block_table, 0, ranks=1, interleave=1, page_size=64
    )
    assert slots.tolist() == [6 * 64 + 2]


def test_buckets_are_powers_of_two():
    """Few shapes: each size is rounded up, and no size is below its least bucket."""
    assert [bucket(n, 8) for n in (0, 1, 8, 9, 16, 17, 1000)] == [8, 8, 8, 16, 16, 32, 1024]
    assert [bucket(n, 1) for n in (0, 1, 2, 3, 5)] == [1, 1, 2, 4, 8]
    step = build_step([request(37, list(range(10)))], PAGES, groups=1, chunk_size=64)
    assert step is not None
    assert step.inputs.tokens.shape == (64,)
    assert step.inputs.block_table.shape == (1, 16)
    assert (step.ckv_rows, step.index_rows) == (128, 128)


def test_a_decode_row_takes_the_room_of_its_pages():
    """A growing request keeps its shapes; a prompt takes the room of its tokens."""
    pages = list(range(100))
    shapes = set()
    for length in (130, 250, 380):
        step = build_step([request(length, pages, cached=length - 1)], PAGES, groups=1, chunk_size=8)
        assert step is not None
        shapes.add((step.ckv_rows, step.inputs.tokens.shape, step.inputs.block_table.shape))
    assert shapes == {(512, (8,), (1, 128))}
    prompt = build_step([request(130, pages)], PAGES, groups=1, chunk_size=256)
    assert prompt is not None and prompt.ckv_rows == 256


@pytest.mark.parametrize(("logits", "rows"), [("all", list(range(8))), ("last", [2, 0]), ("none", [])])
def test_rows_whose_logits_are_wanted(logits, rows):
    """All rows, the last row of each request, or none; a request slot of padding asks for row 0."""
    step = build_step([request(3, [0])], PAGES, groups=1, chunk_size=8, logits=logits)
    assert step is not None
    want = rows[:1] if logits == "last" else rows
    assert step.inputs.logits_rows.tolist() == want


def test_data_groups_stand_one_after_another():
    """Groups are padded alike; rows, tables and logits of each follow those of the one before, an empty one too."""
    requests = [request(3, [0], group=1), request(9, [0, 1, 2]), request(2, [1], group=1)]
    step = build_step(requests, PAGES, groups=3, chunk_size=64)
    assert step is not None
    inputs = step.inputs
    assert inputs.tokens.shape == (48,) and inputs.block_table.shape == (6, 4)
    assert inputs.query_start_loc.reshape(3, 3).tolist() == [[0, 9, 9], [0, 3, 5], [0, 0, 0]]
    assert inputs.seq_lens.reshape(3, 2).tolist() == [[9, 0], [3, 2], [0, 0]]
    assert inputs.logits_rows.reshape(3, 2).tolist() == [[8, 0], [2, 4], [0, 0]]
    assert [(p.request, p.first_row, p.count, p.logits_row) for p in step.pieces] == [
        (1, 0, 9, 0),
        (0, 16, 3, 2),
        (2, 19, 2, 3),
    ]
    assert [group.seq_lens.tolist() for group in step.lengths] == [[9], [3, 2], []]


def test_pages_stand_for_the_tokens_of_all_ranks():
    """With 4 ranks a page of 4 tokens a rank stands for 16, and a rank's buffer holds its share."""
    geometry = CacheGeometry(CKV, KEYS, page_size=4, dcp=4, interleave=2, index_replicas=2)
    assert (geometry.tokens_per_page, geometry.index_shards, geometry.index_page_size) == (16, 2, 8)
    step = build_step([request(600, list(range(38)))], geometry, groups=1, chunk_size=1024)
    assert step is not None
    assert (step.ckv_rows, step.index_rows) == (256, 512)
    with pytest.raises(ValueError, match="request 0 needs 38 pages of 16 tokens, has 37"):
        build_step([request(600, list(range(37)))], geometry, groups=1, chunk_size=1024)


def test_nothing_pending_is_no_step():
    """A batch whose tokens are all cached."""
    assert build_step([request(4, [0], cached=4)], PAGES, groups=1, chunk_size=8) is None
    assert build_step([], PAGES, groups=2, chunk_size=8) is None


@pytest.mark.parametrize(
    ("requests", "options", "message"),
    [
        ([request(3, [0])], {"chunk_size": 0}, "chunk_size must be positive, got chunk_size=0"),
        ([request(3, [0])], {"logits": "some"}, "logits must be 'all', 'last' or 'none', got 'some'"),
        ([request(3, [0]), request(9, [1, 2])], {}, "request 1 needs 3 pages of 4 tokens, has 2"),
        ([request(3, [])], {}, "request 0 needs 1 pages of 4 tokens, has 0"),
        ([request(6, [1, -1])], {}, "request 0 names page -1"),
        ([request(3, [2]), request(2, [2])], {}, "page 2 would be written twice: by requests 0 and 1"),
        ([request(6, [2, 2])], {}, "page 2 would be written twice: by requests 0 and 0"),
    ],
)
def test_bad_steps_are_refused(requests, options, message):
    """Each by its values."""
    with pytest.raises(ValueError, match=message):
        build_step(requests, PAGES, groups=1, **{"chunk_size": 16, **options})


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ([request(3, [0], group=1)], "request 0 is of data group 1, there are 1"),
        ([request(3, [8])], "request 0 names page 8, the cache has 8 a data group"),
        ([request(40, [0, 1])], "request 0 needs 10 pages of 4 tokens, has 2"),
        ([request(5, [0, 1], cached=4), request(3, [0])], "request 1 would write page 0, which holds tokens of 0"),
        ([request(3, [1], cached=3), request(4, [1], cached=3)], "request 1 would write page 1"),
        ([request(9, [3, 1, 3], cached=8)], "request 0 would write page 3, which holds tokens of 0"),
    ],
)
def test_a_batch_that_does_not_fit_its_cache_is_refused(requests, message):
    """Before its first step, whichever step would fail."""
    with pytest.raises(ValueError, match=message):
        check_requests(requests, PAGES, groups=1, pages=8)


def test_shared_history_is_allowed():
    """Requests that read the same full pages and write pages of their own."""
    requests = [request(9, [0, 1, 2], cached=8), request(6, [0, 3], cached=4), request(8, [0, 1], cached=8)]
    check_requests(requests, PAGES, groups=1, pages=8)
    step = build_step(requests, PAGES, groups=1, chunk_size=8)
    assert step is not None and step.inputs.block_table[:2].tolist() == [[0, 1, 2, -1], [0, 3, -1, -1]]


def test_steps_beyond_int32_are_refused():
    """Keys of all requests of a step together are counted in int64 and refused."""
    geometry = CacheGeometry(CKV, KEYS, page_size=1 << 20)
    pages = np.arange(1 << 10, dtype=np.int64)
    requests = [Request(np.zeros(3, np.int64), pages + i * len(pages), cached=2) for i in range(3)]
    with pytest.raises(ValueError, match="a step over 4294967296 keys does not fit int32"):
        build_step(requests, geometry, groups=1, chunk_size=8)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "prompts is empty"),
        ([[1], []], "prompt 1 is empty"),
        ([[1] * 9], "prompt 0 has 9 tokens, more than the model's maximum of 8"),
        ([[1, 50]], "prompt 0 has token id 50, outside the vocabulary of 50"),
        ([[1, -1]], "prompt 0 has token id -1"),
        (["text"], "prompt 0 is text"),
        ([[1.5]], "prompt 0 must be a flat list of token ids"),
        ([[[1]]], "prompt 0 must be a flat list of token ids"),
        ([[2], [1, [2]]], r"prompt 1 must be a flat list of token ids, got \[1, \[2\]\]"),
        ([[True, 2]], "prompt 0 must be a flat list of token ids"),
        ([np.array([True])], "prompt 0 must be a flat list of token ids"),
    ],
)
def test_bad_prompts_are_refused(prompts, message):
    """Each by its place and value."""
    with pytest.raises(ValueError, match=message):
        check_prompts(prompts, 50, 8)
    assert [p.tolist() for p in check_prompts([[49] * 8, [0]], 50, 8)] == [[49] * 8, [0]]
