"""Where the rows of a step come from and go to for layers that keep something of a request from step to step.

The rows of a request follow one another. What a layer needs of earlier tokens stands behind the step's own rows, in
one buffer: the step's T rows, then for each request the `kept` entries that the cache has of it.
"""

import dataclasses

import jax
import jax.numpy as jnp

from sharding.rows import row_requests

BLOCK = 64


@dataclasses.dataclass(frozen=True)
class _Lengths:
    """Of each request [R]: first row, rows, and tokens before and after the step."""

    first: jax.Array
    rows: jax.Array
    before: jax.Array
    after: jax.Array


def _lengths(query_start_loc: jax.Array, seq_lens: jax.Array) -> _Lengths:
    rows = query_start_loc[1:] - query_start_loc[:-1]
    return _Lengths(query_start_loc[:-1], rows, seq_lens - rows, seq_lens)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PoolRows:
    """The pools that a step completes, and the tokens of the pools that it leaves open.

    Attributes:
      requests: Request of each completed pool [N] int32; meaningless where there is none.
      pools: Its number in the request [N] int32, -1 where there is none.
      members: Where its tokens are in the buffer [N, P] int32.
      open: Where the tokens of each request's open pool are in the buffer [R, P - 1] int32.
    """

    requests: jax.Array
    pools: jax.Array
    members: jax.Array
    open: jax.Array


def pool_rows(query_start_loc: jax.Array, seq_lens: jax.Array, *, rows: int, kpool: int) -> PoolRows:
    """Find the pools of a step; the cache keeps the first P - 1 tokens of each request's open pool.

    Args:
      query_start_loc: First row of each request and the number of real rows [R + 1] int32.
      seq_lens: Tokens of each request after the step [R] int32.
      rows: Rows T of the step, padding included.
      kpool: Tokens P of a pool.
    """
    lengths = _lengths(query_start_loc, seq_lens)
    kept, requests = kpool - 1, seq_lens.shape[0]

    def source(positions: jax.Array, request: jax.Array) -> jax.Array:
        before = lengths.before[request]
        own = lengths.first[request] + positions - before
        return jnp.where(positions >= before, own, rows + request * kept + positions % kpool)

    first = lengths.before // kpool
    count = lengths.after // kpool - first
    ends = jnp.cumsum(count, dtype=jnp.int32)
    number = jnp.arange((rows + requests * kept) // kpool, dtype=jnp.int32)
    request = jnp.searchsorted(ends, number, side="right").astype(jnp.int32)
    real = request < requests
    request = jnp.where(real, request, 0)
    pool = first[request] + number - (ends - count)[request]
    members = pool[:, None] * kpool + jnp.arange(kpool, dtype=jnp.int32)
    members = jnp.where(real[:, None], source(members, request[:, None]), 0)
    each, place = jnp.arange(requests, dtype=jnp.int32)[:, None], jnp.arange(kept, dtype=jnp.int32)
    position = lengths.after[:, None] // kpool * kpool + place
    unused = rows + each * kept + place
    opened = jnp.where(position < lengths.after[:, None], source(position, each), unused)
    return PoolRows(request, jnp.where(real, pool, -1), members, opened)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StateRows:
    """Rows of a step in blocks of one request each, and the neighbours of each row.

    Attributes:
      fresh: Whether a request has no token before the step [R] bool.
      taps: Where the token `d` before each row is in the buffer [T, taps] int32, d = 0 first.
      tail: Where the last `taps - 1` tokens of each request are in the buffer, oldest first [R, taps - 1] int32.
      blocks: Row of each token of each block [N, C] int32, -1 for none.
      sequence: Request of each block [N] int32, -1 for none.
      place: Place of each row in the blocks, flattened [T] int32; 0 for padding.
      single: Whether no request has more than one row: block r is then the row of request r.
    """

    fresh: jax.Array
    taps: jax.Array
    tail: jax.Array
    blocks: jax.Array
    sequence: jax.Array
    place: jax.Array
    single: bool = dataclasses.field(metadata={"static": True})


def state_rows(
    query_start_loc: jax.Array, seq_lens: jax.Array, *, rows: int, taps: int, single: bool, block: int = BLOCK
) -> StateRows:
    """Deal the rows of a step into blocks; the cache keeps the last `taps - 1` tokens of each request.

    Args:
      query_start_loc: First row of each request and the number of real rows [R + 1] int32.
      seq_lens: Tokens of each request after the step [R] int32.
      rows: Rows T of the step, padding included.
      taps: Tokens that a row looks at, itself included.
      single: Whether no request has more than one row.
      block: Tokens of a block, a power of two; fewer where the step has fewer rows.
    """
    lengths = _lengths(query_start_loc, seq_lens)
    kept, requests = taps - 1, seq_lens.shape[0]
    each = jnp.arange(requests, dtype=jnp.int32)

    def behind(end: jax.Array, request: jax.Array, distance: jax.Array) -> jax.Array:
        """Where the token `distance` before row `end` of a request is, `end` counted from its first row."""
        row = end - distance
        return jnp.where(row >= 0, lengths.first[request] + row, rows + request * kept + kept + row)

    request = row_requests(query_start_loc, rows)
    real = request >= 0
    request = jnp.where(real, request, 0)
    offset = jnp.where(real, jnp.arange(rows, dtype=jnp.int32) - lengths.first[request], 0)
    neighbours = behind(offset[:, None], request[:, None], jnp.arange(taps, dtype=jnp.int32))
    tail = behind(lengths.rows[:, None], each[:, None], kept - jnp.arange(kept, dtype=jnp.int32))
    block = 1 if single else min(block, 1 << (rows.bit_length() - 1))
    if single:
        count, starts, sequence = requests, each, jnp.where(lengths.rows > 0, each, -1)
    else:
        blocks_of = (lengths.rows + block - 1) // block
        ends = jnp.cumsum(blocks_of, dtype=jnp.int32)
        count, starts = (rows + requests * (block - 1)) // block, ends - blocks_of
        sequence = jnp.searchsorted(ends, jnp.arange(count, dtype=jnp.int32), side="right").astype(jnp.int32)
        sequence = jnp.where(sequence < requests, sequence, -1)
    safe = jnp.where(sequence < 0, 0, sequence)
    token = (jnp.arange(count, dtype=jnp.int32) - starts[safe])[:, None] * block + jnp.arange(block, dtype=jnp.int32)
    inside = (sequence[:, None] >= 0) & (token < lengths.rows[safe][:, None])
    blocks = jnp.where(inside, lengths.first[safe][:, None] + token, -1)
    place = jnp.where(real, starts[request] * block + offset, 0)
    return StateRows(lengths.before == 0, neighbours, tail, blocks, sequence, place, single)
