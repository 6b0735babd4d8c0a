"""Gather of the compressed KV over a DCP group, so that each rank attends with its own heads alone.

Every rank contributes its part of the history, all ranks get all of it, and no queries, log-sum-exps or partial
outputs travel. The gathered buffer is rank-major, [ranks, rows, width], each rank's part in the order of
`local_keys`; `remap` turns positions into its rows.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from sharding.local_keys import KeyLayout
from sharding.mesh import DCP, vary_like
from sharding.ownership import local_length, local_of, owner_of

# Records [n, ...] behind cache rows [n] int32, zeros where the row is -1; see `read_pages`.
Reader = Callable[[jax.Array], jax.Array]


def remap(
    positions: jax.Array,
    requests: jax.Array,
    layout: KeyLayout,
    *,
    rows: int,
    interleave: int,
    visible: jax.Array | None = None,
) -> jax.Array:
    """Rows of the gathered buffer that hold the given tokens; the order of the columns is kept.

    It depends on the selection and the lengths, not on the layer: compute it once for a full layer and all layers that
    share its selection.

    Args:
      positions: Selected tokens of each row, as positions in its request [T, K] int32, -1 for none.
      requests: Request of each row [T] int32, -1 for padding.
      layout: Where the ranks hold the tokens, those of this step included.
      rows: Rows of one rank's part of the buffer.
      interleave: Tokens in a run.
      visible: Tokens that each row may see over all ranks, its causal length [T] int32: never a rank's share of it.
        None allows the whole request.

    Returns:
      Rows [T, K] int32 of the buffer flattened to [ranks * rows]; -1 for none, and for tokens the row may not see.
    """
    real = requests >= 0
    request = jnp.where(real, requests, 0)
    allowed = layout.lens.sum(axis=0, dtype=jnp.int32)[request]
    allowed = jnp.where(real, allowed if visible is None else jnp.minimum(allowed, visible), 0)
    valid = (positions >= 0) & (positions < allowed[:, None])
    dealt: dict[str, Any] = {"ranks": layout.ranks, "interleave": interleave}
    owner = jnp.where(valid, owner_of(positions, **dealt), 0)
    starts = jnp.take_along_axis(layout.starts[:, request].T, owner, axis=1)  # [T, K]
    return jnp.where(valid, owner * rows + starts + local_of(positions, **dealt), -1)


def count_to_last_valid(slots: jax.Array) -> jax.Array:
    """How many leading columns of [T, K] hold every valid slot [T] int32, for kernels that stop there."""
    columns = jnp.arange(1, slots.shape[1] + 1, dtype=jnp.int32)
    return jnp.max(jnp.where(slots >= 0, columns, 0), axis=1, initial=0)


def buffer_rows(max_tokens: int, max_requests: int, *, ranks: int, interleave: int, multiple: int = 1) -> int:
    """Rows of one rank's part that hold any step of so many tokens and requests, rounded up.

    Args:
      max_tokens: Tokens of all requests of a step, history included.
      max_requests: Requests of a step; each may leave a rank with a run more than its share.
      ranks: Size of the DCP group.
      interleave: Tokens in a run.
      multiple: Of which the rows are a multiple: the window.
    """
    rows = -(-max_tokens // ranks) + max_requests * interleave
    return -(-rows // multiple) * multiple


def read_pages(pages: jax.Array, layer: jax.Array | int | None = None) -> Reader:
    """Reader of a paged cache [pages, page_size, ...], or of one layer of [layers, pages, page_size, ...].

    The layer is an index of the gather and not a slice, which would copy the layer.
    """
    page_size = pages.shape[1] if layer is None else pages.shape[2]

    def read(slots: jax.Array) -> jax.Array:
        where = (slots // page_size, slots % page_size)
        where = where if layer is None else (jnp.broadcast_to(layer, slots.shape), *where)
        return pages.at[where].get(mode="fill", fill_value=0, wrap_negative_indices=False)

    return read


def gather_history(read: Reader, slots: jax.Array) -> jax.Array:
    """Gather the history of all ranks in one collective. Call it inside `shard_map` on all ranks alike.

    It depends on the cache as it was before the step and on nothing that the layers of the step compute, so it may run
    ahead of the layer that uses it. Records travel as they are stored, bit for bit.

    Args:
      read: Reads this rank's records.
      slots: Cache row behind each row of this rank's part [rows] int32, from `local_keys.history_slots`.

    Returns:
      [ranks, rows, ...], zeros where there is no history.
    """
    records = read(slots)
    return records[None] if jax.lax.axis_size(DCP) == 1 else jax.lax.all_gather(records, DCP)


def history_windows(layout: KeyLayout, context_lens: jax.Array, *, interleave: int, window: int) -> jax.Array:
    """How many windows of rows hold all history of every rank: an int32 scalar, the same on all ranks.

    Args:
      layout: Where the ranks hold the tokens, those of this step included.
      context_lens: Tokens of each request in the cache before the step [requests] int32.
      interleave: Tokens in a run.
      window: Rows of a window.
    """
    rank = jnp.arange(layout.ranks, dtype=jnp.int32)[:, None]
    held = local_length(context_lens[None], rank, ranks=layout.ranks, interleave=interleave)
    last = jnp.max(jnp.where(held > 0, layout.starts + held, 0), initial=0)
    return (last + window - 1) // window


def gather_history_windows(
    read: Reader, slots: jax.Array, num_windows: jax.Array, buffer: jax.Array, *, window: int
) -> jax.Array:
    """Gather the history of all ranks window by window. Call it inside `shard_map` on all ranks alike.

    The history grows with every chunk of a prompt. One program with a buffer for the longest serves all of them and
    moves only what is there: the number of windows is data, known to all ranks.

    Args:
      read: Reads this rank's records.
      slots: Cache row behind each row of this rank's part [rows] int32, from `local_keys.history_slots`.
      num_windows: From `history_windows`.
      buffer: [ranks, rows, ...] of the records' width and dtype; rows behind the last window stay as they are.
      window: Rows of a window, a divisor of `rows`.

    Returns:
      The buffer, equal to `gather_history` as far as the windows reach.

    Raises:
      ValueError: The window does not divide the rows, or the buffer does not fit the records.
    """
    rows = slots.shape[0]
    if window <= 0 or rows % window:
        raise ValueError(f"{window=} must divide the {rows} rows of a rank")
    # Traced for its type alone; the compiler drops it.
    record = read(slots[:window])
    wanted = (jax.lax.axis_size(DCP), rows, *record.shape[1:])
    if buffer.shape != wanted or buffer.dtype != record.dtype:
        raise ValueError(
            f"buffer must be {record.dtype.name}{list(wanted)}, got {buffer.dtype.name}{list(buffer.shape)}"
        )

    def step(i: jax.Array, buffer: jax.Array) -> jax.Array:
        part = gather_history(read, jax.lax.dynamic_slice_in_dim(slots, i * window, window))
        return jax.lax.dynamic_update_slice_in_dim(buffer, part, i * window, axis=1)

    return jax.lax.fori_loop(0, num_windows, step, vary_like(buffer, record, axes=(DCP,)))


def append_chunk(buffer: jax.Array, records: jax.Array, rows: jax.Array) -> jax.Array:
    """Put the step's own records behind the history; every rank has computed all of them, so none travel.

    Args:
      buffer: [ranks, rows, ...].
      records: Records of the step's rows [T, ...], as they will be stored.
      rows: Where they go [T] int32, -1 for padding: `remap` of the rows' own positions.

    Returns:
      The buffer, with the bytes that a gather after the write of the cache would give.
    """
    flat = buffer.reshape(-1, *buffer.shape[2:])
    # Padding goes to rows of its own beyond the end, so that no two updates share one.
    rows = jnp.where(rows < 0, flat.shape[0] + jnp.arange(rows.shape[0], dtype=rows.dtype), rows)
    flat = flat.at[rows].set(records, mode="drop", wrap_negative_indices=False, unique_indices=True)
    return flat.reshape(buffer.shape)
