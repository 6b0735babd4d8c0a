"""The gated delta rule with a decay for each channel (Kimi Delta Attention, arXiv:2510.26692), as pure functions.

A head keeps a state S [K, V]. A token with query q, key k, value v, log-decay g [K] and write strength beta does

    S = exp(g)[:, None] * S;   S = S + k outer (beta * (v - k^T S));   o = q^T S

`decode_step` is that; `chunked` does the same for blocks of tokens with matrix products, in the WY form that DeltaNet
introduced (arXiv:2406.06484). From block to block only the state goes on, in about 2 sqrt(N) steps for N blocks.
"""

import dataclasses
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
    # Sums and not dots: an M of 1 gains nothing from tensor cores, and their rounding would enter the state. The query
    # reads the old state beside the key, and then its share of what is written: one pass over the state less.
    seen, old = (jnp.sum(x[..., None] * state, axis=-2) for x in (k, q))
    written = beta[..., None] * (v - seen)
    # Decayed in a place of its own, the state can be written back to where it was read from.
    state, written = jax.lax.optimization_barrier((state, written))
    state = state + k[..., None] * written[..., None, :]
    return state, old + jnp.sum(q * k, axis=-1, keepdims=True) * written


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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Blocks:
    """What blocks need besides the state S [K, V] before them, [N, h, ...] each.

    Behind a block stands `total[:, None] * S - change[:, :K] @ S + change[:, K:]`.

    Attributes:
      reads: Keys and queries of the tokens, as they read S [2 C, K].
      mixed: How much each token reads of what the others write [C, C].
      values: What each token writes to an empty state [C, V].
      total: Decay of the whole block [K].
      change: [K, K + V].
    """

    reads: jax.Array
    mixed: jax.Array
    values: jax.Array
    total: jax.Array
    change: jax.Array


def _blocks(q, k, v, log_decay, beta, *, max_decay: float, precision) -> _Blocks:
    """Arguments [N, h, C, K or V], beta [N, h, C]."""
    within_k, within_q = decayed_products((k, q), k, log_decay, max_decay=max_decay, precision=precision)
    block, channels = q.shape[-2:]
    below = jnp.tril(jnp.ones((block, block), bool), -1)
    mixed = jnp.where(below | jnp.eye(block, dtype=bool), within_q, 0)
    inverse = unit_lower_inverse(jnp.where(below, within_k * beta[..., None], 0))
    decayed = jnp.exp(jnp.cumsum(log_decay, axis=-2))
    behind = jnp.cumsum(log_decay[..., ::-1, :], axis=-2)[..., ::-1, :][..., 1:, :]
    behind = jnp.concatenate([behind, jnp.zeros_like(log_decay[..., :1, :])], axis=-2)
    solved = jnp.concatenate([k * decayed, v], axis=-1) * beta[..., None]
    solved = _dot("...ij,...jx->...ix", inverse, solved, precision)  # [..., C, K + V]
    change = _dot("...ik,...ix->...kx", k * jnp.exp(behind), solved, precision)
    reads = jnp.concatenate([solved[..., :channels], q * decayed], axis=-2)
    return _Blocks(reads, mixed, solved[..., channels:], decayed[..., -1, :], change)


def _group_size(blocks: int) -> int:
    """Blocks of a group, so that the blocks of a group and the groups one after another are the fewest steps."""
    sizes = [1 << i for i in range(blocks.bit_length())]
    return min(sizes, key=lambda size: size + -(-blocks // size))


def _states_before(states, sequence, fresh, total, change, *, precision) -> jax.Array:
    """State before each block; the blocks of a group lie along the first axis.

    One block after another is N small products in a row, which leave most of a GPU idle. So all groups of blocks step
    together through what they would do to any state, a map that is kept as `decay * S + map[:, :K] @ S + map[:, K:]`:
    what decays alone is then never rounded by a product. Then the groups' own states follow one another, and all blocks
    apply their maps at once.

    Args:
      states: State of each sequence before the step [R, h, K, V].
      sequence: Sequence of each block [size, groups], in [0, R).
      fresh: Whether a block is the first of its sequence, or has none [size, groups].
      total: Of `_Blocks` [size, groups, h, K].
      change: Of `_Blocks` [size, groups, h, K, K + V].
      precision: Of the products.

    Returns:
      [size, groups, h, K, V].
    """
    channels = total.shape[-1]

    def within(carry, block):
        sequence, fresh, total, change = block
        opened = states[sequence]
        opened = jnp.concatenate([jnp.zeros((*opened.shape[:-1], channels), opened.dtype), opened], axis=-1)
        decay = jnp.where(fresh[:, None, None], 0, carry[0])
        mapped = jnp.where(fresh[:, None, None, None], opened, carry[1])
        lost = change[..., :channels]
        own = jnp.concatenate([-lost * decay[..., None, :], change[..., channels:]], axis=-1)
        after = total[..., None] * mapped - _dot("ghij,ghjx->ghix", lost, mapped, precision) + own
        return (total * decay, after), (decay, mapped)

    start = (jnp.ones_like(total[0]), jnp.zeros_like(change[0]))
    whole, (decay, mapped) = jax.lax.scan(within, start, (sequence, fresh, total, change))

    def across(state, group):
        decay, mapped = group
        behind = decay[..., None] * state + mapped[..., channels:]
        return behind + _dot("hij,hjv->hiv", mapped[..., :channels], state, precision), state

    _, before = jax.lax.scan(across, jnp.zeros_like(change[0, 0, ..., channels:]), whole)
    before = jnp.broadcast_to(before, (len(total), *before.shape))
    applied = _dot("sghij,sghjv->sghiv", mapped[..., :channels], before, precision)
    return applied + decay[..., None] * before + mapped[..., channels:]


def _tile(states, sequence, q, k, v, log_decay, beta, *, max_decay: float, precision):
    """`chunked` for blocks that fit the workspace."""
    count, _, block, channels = q.shape
    size = _group_size(count)
    groups = -(-count // size)

    def by_step(x: jax.Array) -> jax.Array:
        """Blocks in the order in which they step, the first of each group first; 0 fills the last group."""
        x = jnp.pad(x, [(0, groups * size - count), *[(0, 0)] * (x.ndim - 1)])
        return jnp.swapaxes(x.reshape(groups, size, *x.shape[1:]), 0, 1).reshape(x.shape)

    blocks = _blocks(*map(by_step, (q, k, v, log_decay, beta)), max_decay=max_decay, precision=precision)
    real = (sequence >= 0) & (sequence < states.shape[0])
    fresh = ~real | (jnp.roll(sequence, 1) != sequence) | (jnp.arange(count) == 0)
    sequence = jnp.where(real, sequence, 0)
    by_group = [x.reshape(size, groups, *x.shape[1:]) for x in (by_step(fresh), blocks.total, blocks.change)]
    before = _states_before(states, by_step(sequence).reshape(size, groups), *by_group, precision=precision)
    before = before.reshape(-1, *states.shape[1:])
    read = _dot("nhik,nhkv->nhiv", blocks.reads, before, precision)
    written = blocks.values - read[..., :block, :]
    out = read[..., block:, :] + _dot("nhij,nhjv->nhiv", blocks.mixed, written, precision)
    out = jnp.swapaxes(out.reshape(size, groups, *out.shape[1:]), 0, 1).reshape(out.shape)[:count]
    mine = real & (sequence == jnp.arange(states.shape[0], dtype=sequence.dtype)[:, None])  # [R, N]
    last = count - 1 - jnp.argmax(mine[:, ::-1], axis=1)
    last = last % size * groups + last // size
    total, change, state = blocks.total[last], blocks.change[last], before[last]
    lost = _dot("rhij,rhjv->rhiv", change[..., :channels], state, precision)
    behind = total[..., None] * state - lost + change[..., channels:]
    return jnp.where(jnp.any(mine, axis=1)[:, None, None, None], behind, states), out


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
    count, heads, block, channels = q.shape
    if block & (block - 1):
        raise ValueError(f"a block must hold a power of two of tokens, got {block}")
    tile = functools.partial(_tile, max_decay=max_decay, precision=precision)
    # The largest temporaries hold the keys once for each subblock, and a block's change, map and state.
    copies = 2 * (block // subblock_size(block, max_decay)) + 8
    nbytes = heads * channels * (copies * block + 3 * (channels + v.shape[-1])) * q.dtype.itemsize
    blocks = min(count, max(1, workspace_bytes // nbytes))
    tiles = -(-count // blocks)
    if tiles == 1:
        return tile(states, sequence, q, k, v, log_decay, beta)

    def by_tile(x: jax.Array, fill: int = 0) -> jax.Array:
        x = jnp.pad(x, [(0, tiles * blocks - count), *[(0, 0)] * (x.ndim - 1)], constant_values=fill)
        return x.reshape(tiles, blocks, *x.shape[1:])

    arguments = (by_tile(sequence, -1), *map(by_tile, (q, k, v, log_decay, beta)))
    states, out = jax.lax.scan(lambda states, each: tile(states, *each), states, arguments)
    return states, out.reshape(tiles * blocks, *out.shape[2:])[:count]
