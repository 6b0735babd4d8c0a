"""Host-side description of a step: which tokens of which requests, built with numpy and checked."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from sharding.mesh import DATA

INT32_MAX = np.iinfo(np.int32).max


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepInputs:
    """Arrays of one step, those of the data groups one after another along the first axis.

    Of each group: T rows, R requests, P pages a request; all padded to buckets.

    Attributes:
      tokens: Token ids [T] int32.
      positions: Position of each row in its request [T] int32.
      request_ids: Request of each row [T] int32, -1 on padding rows.
      slot_mapping: Where each row's record goes, page * page_size + offset [T] int32, -1 on padding rows.
      context_lens: Tokens of each request in the cache before the step [R] int32.
      seq_lens: Tokens of each request after the step [R] int32, 0 for padding requests.
      block_table: Pages of each request [R, P] int32, -1 where it has none.
      logits_rows: Rows whose logits are wanted [M] int32.
    """

    tokens: jax.Array
    positions: jax.Array
    request_ids: jax.Array
    slot_mapping: jax.Array
    context_lens: jax.Array
    seq_lens: jax.Array
    block_table: jax.Array
    logits_rows: jax.Array


_BY_GROUP: Any = PartitionSpec(DATA)
STEP_SPEC = StepInputs(**{field.name: _BY_GROUP for field in dataclasses.fields(StepInputs)})


@dataclasses.dataclass
class Request:
    """One sequence.

    Attributes:
      tokens: All its token ids so far [n] int64.
      pages: Its pages in the cache of its data group [p] int64.
      group: Its data group.
      cached: How many of its tokens are in the cache.
    """

    tokens: np.ndarray
    pages: np.ndarray
    group: int = 0
    cached: int = 0

    @property
    def pending(self) -> int:
        """Tokens that no step has processed yet."""
        return len(self.tokens) - self.cached

    def append(self, token: int) -> None:
        """Add a token at the end."""
        self.tokens = np.append(self.tokens, np.int64(token))


@dataclasses.dataclass(frozen=True)
class Piece:
    """A run of rows of one request in a step.

    Attributes:
      request: Index of the request in the batch.
      first_row: Its first row, counted over all data groups' padded rows.
      first_token: Position of the first token.
      count: Number of rows.
      logits_row: Row of the step's logits that belongs to its last token, when logits of last rows are wanted.
    """

    request: int
    first_row: int
    first_token: int
    count: int
    logits_row: int


@dataclasses.dataclass(frozen=True)
class Step:
    """A step ready to run.

    Attributes:
      inputs: Its arrays, numpy int32 on the host.
      key_capacity: N, how many keys the buffers of one data group hold.
      pieces: Which rows belong to which request.
    """

    inputs: StepInputs
    key_capacity: int
    pieces: tuple[Piece, ...]


def bucket(value: int, minimum: int = 8) -> int:
    """Round up to a power of two, at least `minimum`, so that few shapes are compiled."""
    return max(minimum, 1 << max(0, value - 1).bit_length())


def check_prompts(prompts: Sequence[Sequence[int]], vocab_size: int, max_length: int) -> list[np.ndarray]:
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
        array = np.asarray(prompt)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
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


def choose_pieces(requests: Sequence[Request], group: int, chunk_size: int) -> list[tuple[int, int]]:
    """Requests and row counts of one group's next step: pending tokens in order, `chunk_size` rows at most."""
    chosen, left = [], chunk_size
    for i, request in enumerate(requests):
        if request.group == group and request.pending and left:
            count = min(request.pending, left)
            chosen.append((i, count))
            left -= count
    return chosen


def _fill_group(
    arrays: dict[str, np.ndarray], requests: Sequence[Request], chosen: list[tuple[int, int]], page_size: int
) -> list[tuple[int, int, int, int]]:
    """Fill one group's rows; returns (request, first row, first token, count) of each piece."""
    row, runs = 0, []
    for r, (i, count) in enumerate(chosen):
        request = requests[i]
        positions = request.cached + np.arange(count, dtype=np.int64)
        pages = request.pages[positions // page_size]
        rows = slice(row, row + count)
        arrays["tokens"][rows] = request.tokens[positions]
        arrays["positions"][rows] = positions
        arrays["request_ids"][rows] = r
        arrays["slot_mapping"][rows] = pages * page_size + positions % page_size
        arrays["context_lens"][r] = request.cached
        arrays["seq_lens"][r] = request.cached + count
        arrays["block_table"][r, : len(request.pages)] = request.pages
        arrays["last_rows"][r] = row + count - 1
        runs.append((i, row, request.cached, count))
        row += count
    return runs


def _keys(request: Request, count: int, page_size: int) -> int:
    """Room for a request's keys in a step.

    A decode row takes the room of all its request's pages, so that a growing request keeps one compiled program.
    """
    decode = count == 1 and request.cached > 0
    return len(request.pages) * page_size if decode else request.cached + count


def build_step(
    requests: Sequence[Request], *, groups: int, chunk_size: int, page_size: int, logits: str = "last"
) -> Step | None:
    """Describe the next step of `requests`.

    Args:
      requests: All requests; those with pending tokens take part.
      groups: Number of data groups.
      chunk_size: Most rows a group.
      page_size: Tokens a page.
      logits: "all" rows, the "last" row of each request, or "none".

    Returns:
      The step, or None when nothing is pending. It leaves `requests` as they are.

    Raises:
      ValueError: A size is out of range, or a request has too few pages.
    """
    if chunk_size <= 0:
        raise ValueError(f"chunk_size must be positive, got {chunk_size=}")
    if logits not in ("all", "last", "none"):
        raise ValueError(f"logits must be 'all', 'last' or 'none', got {logits!r}")
    chosen = [choose_pieces(requests, group, chunk_size) for group in range(groups)]
    if not any(chosen):
        return None
    for i, count in (entry for entries in chosen for entry in entries):
        needed = -(-(requests[i].cached + count) // page_size)
        if needed > len(requests[i].pages):
            raise ValueError(f"request {i} needs {needed} pages of {page_size} tokens, has {len(requests[i].pages)}")
    rows = bucket(max(sum(count for _, count in entries) for entries in chosen))
    slots = bucket(max(len(entries) for entries in chosen), minimum=1)
    table = bucket(max(len(requests[i].pages) for entries in chosen for i, _ in entries), minimum=1)
    keys = max(sum(_keys(requests[i], count, page_size) for i, count in entries) for entries in chosen)
    if keys > INT32_MAX // 2:
        raise ValueError(f"a step over {keys} keys is too large: at most {INT32_MAX // 2}")

    per_group, pieces = [], []
    for group, entries in enumerate(chosen):
        arrays = {
            "tokens": np.zeros(rows, np.int64),
            "positions": np.zeros(rows, np.int64),
            "request_ids": np.full(rows, -1, np.int64),
            "slot_mapping": np.full(rows, -1, np.int64),
            "context_lens": np.zeros(slots, np.int64),
            "seq_lens": np.zeros(slots, np.int64),
            "block_table": np.full((slots, table), -1, np.int64),
            "last_rows": np.zeros(slots, np.int64),
        }
        runs = _fill_group(arrays, requests, entries, page_size)
        pieces += [
            Piece(i, group * rows + row, token, count, group * slots + r)
            for r, (i, row, token, count) in enumerate(runs)
        ]
        last_rows = arrays.pop("last_rows")
        wanted = {"all": np.arange(rows), "last": last_rows, "none": np.zeros(0, np.int64)}
        arrays["logits_rows"] = wanted[logits]
        per_group.append(arrays)
    stacked = {name: np.concatenate([arrays[name] for arrays in per_group]) for name in per_group[0]}
    if stacked["slot_mapping"].max() > INT32_MAX:
        raise ValueError(f"slot {stacked['slot_mapping'].max()} does not fit int32: use fewer or smaller pages")
    int32: dict[str, Any] = {name: array.astype(np.int32) for name, array in stacked.items()}
    inputs = StepInputs(**int32)
    return Step(inputs, bucket(keys, minimum=128), tuple(pieces))
