"""The gated delta rule with a decay for each channel (Kimi Delta Attention, arXiv:2510.26692), as pure functions.

A head keeps a state S [K, V]. A token with query q, key k, value v, log-decay g [K] and write strength beta does

    S = exp(g)[:, None] * S;   S = S + k outer (beta * (v - k^T S));   o = q^T S

`decode_step` is that; `chunked` does the same for blocks of tokens with matrix products, in the WY form that DeltaNet
introduced (arXiv:2406.06484): only the state goes from block to block one after another.
"""

import functools

import jax
import jax.numpy as jnp

# exp of this is finite in float32 and bfloat16, with room for a sum over the channels.
MAX_EXPONENT = 80.0
# Rows whose decays are taken relative to one point: what the tensor cores multiply at least.
MAX_SUBBLOCK = 16


def decode_step(
    state: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array, beta: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One token of many independent heads.

    Args:
      state: [..., K, V].
      q: [..., K].
      k: [..., K].
      v: [..., V].
      log_decay: Not positive [..., K].
      beta: In [0, 1] [...].

    Returns:
      The state behind the token, and the output [..., V]. The dtype is that of the arguments.
    """
    state = jnp.exp(log_decay)[..., None] * state
    # Sums and not dots: an M of 1 gains nothing from tensor cores, and their rounding would enter the state.
    seen = jnp.sum(k[..., None] * state, axis=-2)
    state = state + k[..., None] * (beta[..., None] * (v - seen))[..., None, :]
    return state, jnp.sum(q[..., None] * state, axis=-2)


def recurrence(
    state: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array, beta: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`decode_step` over the tokens of axis 0, the definition of `chunked`: final state, outputs [T, ..., V]."""

    def step(state, token):
        return decode_step(state, *token)

    return jax.lax.scan(step, state, (q, k, v, log_decay, beta))


def subblock_size(block: int, max_decay: float) -> int:
    """Rows within which decays of at most `max_decay` a token, as a logarithm, stay finite when inverted.

    Raises:
      ValueError: Not even one row does.
    """
    size = min(MAX_SUBBLOCK, block)
    while size > 1 and (size * max_decay > MAX_EXPONENT or block % size):
        size //= 2
    if size * max_decay > MAX_EXPONENT:
        raise ValueError(f"{max_decay=} must not exceed {MAX_EXPONENT}")
    return size


def _dot(subscripts: str, a: jax.Array, b: jax.Array, precision) -> jax.Array:
    return jnp.einsum(subscripts, a, b, precision=precision, preferred_element_type=a.dtype)


def decayed_products(
    rows: tuple[jax.Array, ...], k: jax.Array, log_decay: jax.Array, *, max_decay: float, precision=None
) -> list[jax.Array]:
    """`sum_c r[i, c] * k[j, c] * exp(sum of log_decay[m, c] over j < m <= i)` for j <= i, unspecified above.

    The decay up to a row times the inverse of the decay up to a key overflows within a block, so each subblock of rows
    takes its decays relative to its own middle: keys before it then shrink, and its own grow by a bounded factor, as
    its rows shrink by one that does not underflow. Sums start at that middle or end there: differences of sums over
    the whole block would lose digits that the exponential turns into relative errors.

    Args:
      rows: Queries, keys or both, each [..., C, K].
      k: [..., C, K].
      log_decay: [..., C, K].
      max_decay: Bound of a token's log-decay, as a positive number.
      precision: Of the products.

    Returns:
      For each of `rows` [..., C, C], finite everywhere.
    """
    block, channels = k.shape[-2:]
    size = subblock_size(block, max_decay)
    count, lead = block // size, k.shape[:-2]
    by_part = (*lead, count, size, channels)
    upto = jnp.cumsum(log_decay.reshape(by_part), axis=-2)
    total = upto[..., -1, :]  # [..., S, K]
    from_middle = upto - total[..., None, :] / 2
    # Decay from the middle of each key's subblock to the middle of each row's: [..., S, S', K].
    s = jnp.arange(count)
    inner = (s[None, None] > s[None, :, None]) & (s[None, None] < s[:, None, None])
    between = _dot("...rk,sur->...suk", total, inner.astype(total.dtype), jax.lax.Precision.HIGHEST)
    between += (total[..., :, None, :] + total[..., None, :, :]) / 2
    earlier = (s[:, None] > s[None])[..., None]
    between = jnp.where(earlier, between, 0)
    exponent = between[..., None, :] - from_middle[..., None, :, :, :]  # [..., S, S', C', K]
    # Keys behind the subblock, which nothing reads, would overflow.
    exponent = jnp.minimum(exponent, MAX_EXPONENT / 2 + 1)
    right = (k.reshape(by_part)[..., None, :, :, :] * jnp.exp(exponent)).reshape(*lead, count, block, channels)
    shrunk = jnp.exp(from_middle)
    left = [r.reshape(by_part) * shrunk for r in rows]
    return [_dot("...sic,...sjc->...sij", x, right, precision).reshape(*lead, block, block) for x in left]


def unit_lower_inverse(lower: jax.Array, precision=jax.lax.Precision.HIGHEST) -> jax.Array:
    """Inverse of I + `lower` [..., C, C], strictly lower triangular, by forward substitution and block merges.

    A power series of `lower` needs fewer steps and loses all digits when keys repeat.
    """
    block = lower.shape[-1]
    size = subblock_size(block, 1.0)
    lead = lower.shape[:-2]
    count = block // size
    diagonal = lower.reshape(*lead, count, size, count, size)
    index = jnp.arange(count)
    diagonal = jnp.moveaxis(diagonal[..., index, :, index, :], 0, -3)  # [..., count, size, size]
    inverse = jnp.broadcast_to(jnp.eye(size, dtype=lower.dtype), diagonal.shape)
    for row in range(1, size):
        known = -_dot("...j,...jk->...k", diagonal[..., row, :row], inverse[..., :row, :], precision)
        inverse = inverse.at[..., row, :].add(known)
    while size < block:
        # [[A, 0], [B, D]]^-1 = [[A^-1, 0], [-D^-1 B A^-1, D^-1]]
        pairs = lower.reshape(*lead, block // (2 * size), 2 * size, block // (2 * size), 2 * size)
        index = jnp.arange(pairs.shape[-4])
        pairs = jnp.moveaxis(pairs[..., index, :, index, :], 0, -3)
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        below = _dot("...ij,...jk->...ik", pairs[..., size:, :size], first, precision)
        below = -_dot("...ij,...jk->...ik", second, below, precision)
        top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        inverse = jnp.concatenate([top, jnp.concatenate([below, second], axis=-1)], axis=-2)
        size *= 2
    return inverse[..., 0, :, :]


def _within_blocks(q, k, v, log_decay, beta, *, max_decay: float, precision):
    """What a block needs besides the state before it; every argument [..., C, K or V], beta [..., C]."""
    within_k, within_q = decayed_products((k, q), k, log_decay, max_decay=max_decay, precision=precision)
    block = q.shape[-2]
    below = jnp.tril(jnp.ones((block, block), bool), -1)
    mixed = jnp.where(below | jnp.eye(block, dtype=bool), within_q, 0)  # [..., C, C]
    inverse = unit_lower_inverse(jnp.where(below, within_k * beta[..., None], 0))
    decayed = jnp.exp(jnp.cumsum(log_decay, axis=-2))
    behind = jnp.cumsum(log_decay[..., ::-1, :], axis=-2)[..., ::-1, :][..., 1:, :]
    behind = jnp.concatenate([behind, jnp.zeros_like(log_decay[..., :1, :])], axis=-2)
    values = _dot("...ij,...jv->...iv", inverse, v * beta[..., None], precision)
    keys = _dot("...ij,...jk->...ik", inverse, k * decayed * beta[..., None], precision)
    return q * decayed, mixed, values, keys, k * jnp.exp(behind), decayed[..., -1, :]


def chunked(
    states: jax.Array,
    sequence: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    *,
    max_decay: float,
    precision: jax.lax.PrecisionLike = jax.lax.Precision.HIGHEST,
    workspace_bytes: int = 1 << 30,
) -> tuple[jax.Array, jax.Array]:
    """The recurrence over blocks of tokens of several sequences.

    Blocks run in order; those of one sequence follow one another. A token that pads a block has k, log_decay and beta
    of 0, which leave the state as it is.

    Args:
      states: State of each sequence before its first block [R, h, K, V] float32.
      sequence: Sequence of each block [N] int32; one outside [0, R) leaves all states as they are.
      q: [N, h, C, K] float32, C a power of two.
      k: [N, h, C, K].
      v: [N, h, C, V].
      log_decay: [N, h, C, K], in [-max_decay, 0].
      beta: [N, h, C].
      max_decay: Bound of the log-decays of a token, as a positive number.
      precision: Of the products; the inverse of a block is always computed in full float32.
      workspace_bytes: Bound on the temporaries that the blocks' products take at once.

    Returns:
      The states behind the last blocks, and the outputs [N, h, C, V].

    Raises:
      ValueError: `max_decay` is too large, or the block is no power of two.
    """
    block, channels = q.shape[-2:]
    if block & (block - 1):
        raise ValueError(f"a block must hold a power of two of tokens, got {block}")
    within = functools.partial(_within_blocks, max_decay=max_decay, precision=precision)
    arguments = (q, k, v, log_decay, beta)
    # The largest temporary holds the keys once for each subblock.
    copies = 2 * (block // subblock_size(block, max_decay)) + 8
    nbytes = copies * q.shape[1] * block * channels * q.dtype.itemsize
    batch = max(1, workspace_bytes // nbytes)
    if batch < q.shape[0]:
        prepared = jax.lax.map(lambda x: within(*x), arguments, batch_size=batch)
    else:
        prepared = within(*arguments)
    dot = functools.partial(_dot, precision=precision)

    def step(states, scanned):
        sequence, queries, mixed, values, keys, later_keys, total = scanned
        state = jax.lax.dynamic_index_in_dim(states, sequence, keepdims=False)
        written = values - dot("hik,hkv->hiv", keys, state)
        out = dot("hik,hkv->hiv", queries, state) + dot("hij,hjv->hiv", mixed, written)
        state = total[..., None] * state + dot("hik,hiv->hkv", later_keys, written)
        return jax.lax.dynamic_update_index_in_dim(states, state, sequence, 0), out

    # One more state takes what blocks without a sequence write.
    count = states.shape[0]
    sequence = jnp.where((sequence < 0) | (sequence >= count), count, sequence)
    states = jnp.concatenate([states, jnp.zeros_like(states[:1])])
    states, out = jax.lax.scan(step, states, (sequence, *prepared))
    return states[:count], out
