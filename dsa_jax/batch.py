"""Host-side description of a step: which tokens of which requests, built with numpy int64 and checked."""

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from dsa_jax.cache import CacheGeometry
from sharding.local_keys import key_layout, rows_needed
from sharding.mesh import DATA
from sharding.ownership import pool_interleave
from sharding.row_partition import RowPlan

INT32_MAX = np.iinfo(np.int32).max
# Smallest buckets: fewer compiled programs at the price of padding.
MIN_ROWS = 8
MIN_KEYS = 128
MIN_REQUESTS = 1
MIN_PAGES = 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepInputs:
    """Arrays of one step, those of the data groups one after another along the first axis.

    Of each group: T rows, R requests, P pages a request; all padded to buckets. The rows of a request follow one
    another; those that decode, by a single row, come first. Positions and slots follow from the lengths, on the
    device: see `sharding.rows` and `sharding.ownership`.

    Attributes:
      tokens: Token ids [T] int32.
      query_start_loc: First row of each request and the number of real rows [R + 1] int32.
      seq_lens: Tokens of each request after the step [R] int32, 0 for padding requests.
      block_table: Pages of each request [R, P] int32, -1 where it has none.
      logits_rows: Rows whose logits are wanted [M] int32.
      state_slots: Slot of each request in the cache's state [R] int32, -1 for padding requests.
      plan: Which rank selects for which rows, or None where every rank does for all.
    """

    tokens: jax.Array
    query_start_loc: jax.Array
    seq_lens: jax.Array
    block_table: jax.Array
    logits_rows: jax.Array
    state_slots: jax.Array
    plan: RowPlan | None = None


def step_specs(inputs: StepInputs) -> StepInputs:
    """Mesh axes of a step's arrays."""
    return jax.tree.map(lambda _: PartitionSpec(DATA), inputs)


@dataclasses.dataclass
class Request:
    """One sequence.

    Attributes:
      tokens: All its token ids so far [n] int64.
      pages: Its pages in the cache of its data group [p] int64.
      group: Its data group.
      cached: How many of its tokens are in the cache.
      slot: Its place among the requests of its data group that the cache keeps a state of.
    """

    tokens: np.ndarray
    pages: np.ndarray
    group: int = 0
    cached: int = 0
    slot: int = 0

    @property
    def pending(self) -> int:
        """Tokens that no step has processed yet."""
        return len(self.tokens) - self.cached

    @property
    def decodes(self) -> bool:
        """Whether the request goes on by a single token."""
        return self.pending == 1 and self.cached > 0

    def append(self, token: int) -> None:
        """Add a token at the end."""
        self.tokens = np.append(self.tokens, np.int64(operator.index(token)))


@dataclasses.dataclass(frozen=True)
class Piece:
    """A run of rows of one request in a step.

    Attributes:
      request: Index of the request in the batch.
      first_row: Its first row, counted over all data groups' padded rows.
      count: Number of rows.
      logits_row: Row of the step's logits that belongs to its last token, when logits of last rows are wanted.
    """

    request: int
    first_row: int
    count: int
    logits_row: int


@dataclasses.dataclass(frozen=True)
class GroupLengths:
    """Lengths of one data group's requests in a step, for planning on the host.

    Attributes:
      seq_lens: Tokens of each request after the step [requests] int64.
      query_lens: Its rows in the step [requests] int64.
    """

    seq_lens: np.ndarray
    query_lens: np.ndarray


@dataclasses.dataclass(frozen=True)
class Step:
    """A step ready to be planned and run.

    Attributes:
      inputs: Its arrays, numpy int32 on the host.
      ckv_rows: Rows of the buffer that holds a rank's records of the step.
      index_rows: Rows of the buffer that holds a rank's index keys.
      pieces: Which rows belong to which request.
      lengths: Lengths in each data group.
    """

    inputs: StepInputs
    ckv_rows: int
    index_rows: int
    pieces: tuple[Piece, ...]
    lengths: tuple[GroupLengths, ...]


def bucket(value: int, minimum: int) -> int:
    """Round up to a power of two, at least `minimum`, so that few shapes are compiled."""
    return max(minimum, 1 << max(0, value - 1).bit_length())


def check_prompts(prompts: Sequence[Sequence[int] | np.ndarray], vocab_size: int, max_length: int) -> list[np.ndarray]:
    """Prompts as int64 arrays.

    Raises:
      ValueError: There is no prompt, or one is empty, too long, not a list of ints, or has an id out of range.
    """
    if len(prompts) == 0:
        raise ValueError("prompts is empty: give at least one prompt")
    checked = []
    for i, prompt in enumerate(prompts):
        if isinstance(prompt, (str, bytes)):
            raise ValueError(f"prompt {i} is text; token ids are wanted")
        array = _flat_ids(prompt)
        if array is None:
            raise ValueError(f"prompt {i} must be a flat list of token ids, got {prompt!r}"[:200])
        if array.size == 0:
            raise ValueError(f"prompt {i} is empty")
        if array.size > max_length:
            raise ValueError(f"prompt {i} has {array.size} tokens, more than the model's maximum of {max_length}")
        if array.min() < 0 or array.max() >= vocab_size:
            bad = array[(array < 0) | (array >= vocab_size)][0]
            raise ValueError(f"prompt {i} has token id {bad}, outside the vocabulary of {vocab_size}")
        checked.append(array.astype(np.int64))
    return checked


def _flat_ids(prompt: Sequence[int] | np.ndarray) -> np.ndarray | None:
    """A prompt as an array [n] of integers, or None if it is none."""
    # NumPy takes true and false among ints for 1 and 0, and a list in a list for an error of its own.
    if isinstance(prompt, (list, tuple)) and any(isinstance(token, (bool, np.bool_)) for token in prompt):
        return None
    try:
        array = np.asarray(prompt)
    except ValueError:
        return None
    return array if array.ndim == 1 and (array.size == 0 or array.dtype.kind in "iu") else None


def choose_rows(requests: Sequence[Request], group: int, chunk_size: int) -> list[tuple[int, int]]:
    """Requests of one group's next step and their row counts, at most `chunk_size` rows in all.

    Decode rows come first, so that a long prompt never makes them wait; then the pending tokens of prompts, in order.
    """
    chosen, left = [], chunk_size
    mine = [i for i, request in enumerate(requests) if request.group == group and request.pending]
    for i in sorted(mine, key=lambda i: not requests[i].decodes):
        count = min(requests[i].pending, left)
        if count:
            chosen.append((i, count))
            left -= count
    return chosen


def _key_rows(
    requests: Sequence[Request],
    chosen: list[list[tuple[int, int]]],
    geometry: CacheGeometry,
    ranks: int,
    kpool: int = 1,
) -> int:
    """Rows that the fullest rank of any group needs for the step's keys of `kpool` tokens, rounded up to a bucket.

    A decode row takes the room of all its request's pages, so that a growing request keeps one compiled program.
    """
    most = 0
    for entries in chosen:
        rooms = [
            len(requests[i].pages) * geometry.tokens_per_page if requests[i].decodes else requests[i].cached + count
            for i, count in entries
        ]
        keys = np.array(rooms or [0], np.int64) // kpool
        layout = key_layout(keys, ranks=ranks, interleave=pool_interleave(geometry.interleave, kpool))
        most = max(most, rows_needed(layout))
    rows = bucket(most, MIN_KEYS)
    if rows * ranks > INT32_MAX:
        raise ValueError(f"a step over {rows * ranks} keys does not fit int32: at most {INT32_MAX}")
    return rows


def _group_arrays(
    requests: Sequence[Request], chosen: list[tuple[int, int]], rows: int, slots: int, table: int
) -> dict[str, np.ndarray]:
    """One group's arrays, `last_rows` among them: the last row of each request."""
    counts = np.array([count for _, count in chosen], np.int64)
    ends = np.cumsum(counts)
    arrays = {
        "tokens": np.zeros(rows, np.int64),
        "query_start_loc": np.full(slots + 1, counts.sum(), np.int64),
        "seq_lens": np.zeros(slots, np.int64),
        "block_table": np.full((slots, table), -1, np.int64),
        "last_rows": np.zeros(slots, np.int64),
        "state_slots": np.full(slots, -1, np.int64),
    }
    for r, (i, count) in enumerate(chosen):
        request = requests[i]
        arrays["tokens"][ends[r] - count : ends[r]] = request.tokens[request.cached : request.cached + count]
        arrays["query_start_loc"][r] = ends[r] - count
        arrays["seq_lens"][r] = request.cached + count
        arrays["block_table"][r, : len(request.pages)] = request.pages
        arrays["last_rows"][r] = ends[r] - 1
        arrays["state_slots"][r] = request.slot
    return arrays


def check_requests(requests: Sequence[Request], geometry: CacheGeometry, *, groups: int, pages: int) -> None:
    """Check, before anything is written, that every pending token has a place of its own in the cache.

    Args:
      requests: The requests.
      geometry: Of the cache.
      groups: Number of data groups.
      pages: Pages of each data group's cache.

    Raises:
      ValueError: A request has too few pages, names a page or a group that does not exist, or would write a page that
        another one writes too or has tokens in.
    """
    for i, request in enumerate(requests):
        if not 0 <= request.group < groups:
            raise ValueError(f"request {i} is of data group {request.group}, there are {groups}")
        if len(request.pages) and request.pages.max() >= pages:
            raise ValueError(f"request {i} names page {request.pages.max()}, the cache has {pages} a data group")
    for group in range(groups):
        mine = [i for i, request in enumerate(requests) if request.group == group]
        writers = _page_writers(requests, [(i, requests[i].pending) for i in mine if requests[i].pending], geometry)
        for i in mine:
            held = requests[i].pages[: -(-requests[i].cached // geometry.tokens_per_page)].tolist()
            for position, page in enumerate(held):
                # The last page that holds tokens of a request is also the first that it writes, unless it is full.
                own = writers.get(page) == i and position == requests[i].cached // geometry.tokens_per_page
                if page in writers and not own:
                    raise ValueError(f"request {writers[page]} would write page {page}, which holds tokens of {i}")


def _page_writers(
    requests: Sequence[Request], chosen: Sequence[tuple[int, int]], geometry: CacheGeometry
) -> dict[int, int]:
    """Which request writes which page of one group; raises unless each row has a page and each page one writer."""
    tokens = geometry.tokens_per_page
    writers: dict[int, int] = {}
    for i, count in chosen:
        request = requests[i]
        needed = -(-(request.cached + count) // tokens)
        if needed > len(request.pages):
            raise ValueError(f"request {i} needs {needed} pages of {tokens} tokens, has {len(request.pages)}")
        pages = request.pages[:needed]
        if needed and pages.min() < 0:
            raise ValueError(f"request {i} names page {pages.min()}")
        for page in pages[request.cached // tokens :].tolist():
            if page in writers:
                raise ValueError(f"page {page} would be written twice: by requests {writers[page]} and {i}")
            writers[page] = i
    return writers


def build_step(
    requests: Sequence[Request], geometry: CacheGeometry, *, groups: int, chunk_size: int, logits: str = "last"
) -> Step | None:
    """Describe the next step of `requests`.

    Args:
      requests: All requests; those with pending tokens take part.
      geometry: Of the cache.
      groups: Number of data groups.
      chunk_size: Most rows a group.
      logits: "all" rows, the "last" row of each request, or "none".

    Returns:
      The step, or None when nothing is pending. It leaves `requests` as they are.

    Raises:
      ValueError: A size is out of range, a request has too few pages, or two would write the same page.
    """
    if chunk_size <= 0:
        raise ValueError(f"chunk_size must be positive, got {chunk_size=}")
    if logits not in ("all", "last", "none"):
        raise ValueError(f"logits must be 'all', 'last' or 'none', got {logits!r}")
    chosen = [choose_rows(requests, group, chunk_size) for group in range(groups)]
    if not any(chosen):
        return None
    for entries in chosen:
        _page_writers(requests, entries, geometry)
    rows = bucket(max(sum(count for _, count in entries) for entries in chosen), MIN_ROWS)
    slots = bucket(max(len(entries) for entries in chosen), MIN_REQUESTS)
    table = bucket(max(len(requests[i].pages) for entries in chosen for i, _ in entries), MIN_PAGES)
    stacked: dict[str, list[np.ndarray]] = {}
    pieces, lengths = [], []
    for group, entries in enumerate(chosen):
        arrays = _group_arrays(requests, entries, rows, slots, table)
        pieces += [
            Piece(i, group * rows + int(arrays["query_start_loc"][r]), count, group * slots + r)
            for r, (i, count) in enumerate(entries)
        ]
        count = len(entries)
        lengths.append(GroupLengths(arrays["seq_lens"][:count], np.array([c for _, c in entries], np.int64)))
        last_rows = arrays.pop("last_rows")
        wanted = {"all": np.arange(rows), "last": last_rows, "none": np.zeros(0, np.int64)}
        arrays["logits_rows"] = wanted[logits]
        for name, array in arrays.items():
            stacked.setdefault(name, []).append(array)
    int32: dict[str, Any] = {name: np.concatenate(parts).astype(np.int32) for name, parts in stacked.items()}
    return Step(
        inputs=StepInputs(**int32),
        ckv_rows=_key_rows(requests, chosen, geometry, geometry.dcp),
        index_rows=_key_rows(requests, chosen, geometry, geometry.index_shards, geometry.kpool),
        pieces=tuple(pieces),
        lengths=tuple(lengths),
    )
