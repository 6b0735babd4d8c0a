"""The gated delta rule: blocks of tokens against one token after another, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsa_jax.layers.delta_rule import (
    chunked,
    decayed_products,
    decode_step,
    recurrence,
    subblock_size,
    unit_lower_inverse,
)

HEADS, WIDTH = 2, 16
compiled = jax.jit(chunked, static_argnames=("max_decay", "workspace_bytes"))


def oracle(state, q, k, v, log_decay, beta):
    """The definition in NumPy float64, tokens on axis 0."""
    state, outputs = np.array(state, np.float64), []
    q, k, v, log_decay, beta = (np.asarray(x, np.float64) for x in (q, k, v, log_decay, beta))
    for t in range(len(q)):
        state = np.exp(log_decay[t])[..., None] * state
        seen = np.einsum("hk,hkv->hv", k[t], state)
        state = state + k[t][..., None] * (beta[t][..., None] * (v[t] - seen))[:, None, :]
        outputs.append(np.einsum("hk,hkv->hv", q[t], state))
    return state, np.stack(outputs)


def tokens(count, seed=0, gate=None, same_keys=False):
    """Normed queries and keys, values of unit size, decays in [-5, 0]: what the layers feed in."""
    rng = np.random.default_rng(seed)
    q, k, v = rng.standard_normal((3, count, HEADS, WIDTH)).astype(np.float32)
    k = np.broadcast_to(k[:1], k.shape) if same_keys else k
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    # Mostly slow decays, some as fast as there are.
    log_decay = -5 / (1 + np.exp(rng.normal(4, 3, (count, HEADS, WIDTH))))
    log_decay = log_decay if gate is None else np.full_like(log_decay, gate)
    beta = 1 / (1 + np.exp(-rng.standard_normal((count, HEADS))))
    beta = np.ones_like(beta) if same_keys else beta
    return tuple(np.asarray(x, np.float32) for x in (q * WIDTH**-0.5, k, v, log_decay, beta))


def blocks(x, block):
    """[T, h, ...] as [N, h, C, ...], zeros behind the end."""
    count = -(-len(x) // block)
    x = np.pad(x, ((0, count * block - len(x)), *((0, 0),) * (x.ndim - 1)))
    return jnp.asarray(np.moveaxis(x.reshape(count, block, *x.shape[1:]), 1, 2))


def run_chunked(state, arguments, block=64, **options):
    state, out = compiled(
        jnp.asarray(state)[None],
        jnp.zeros(-(-len(arguments[0]) // block), jnp.int32),
        *(blocks(x, block) for x in arguments),
        max_decay=5.0,
        **options,
    )
    out = np.moveaxis(np.asarray(out), 2, 1).reshape(-1, HEADS, WIDTH)
    return np.asarray(state[0]), out[: len(arguments[0])]


@pytest.fixture
def state():
    return np.random.default_rng(1).standard_normal((HEADS, WIDTH, WIDTH)).astype(np.float32)


def test_chunked_equals_the_recurrence_over_10k_tokens(state):
    """Float32 blocks against float64 tokens, and the scan of `decode_step` too."""
    arguments = tokens(10_001)
    want_state, want = oracle(state, *arguments)
    got_state, got = run_chunked(state, arguments)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
    np.testing.assert_allclose(got_state, want_state, rtol=0, atol=1e-5)
    scanned_state, scanned = recurrence(jnp.asarray(state), *map(jnp.asarray, arguments))
    np.testing.assert_allclose(scanned, want, rtol=0, atol=1e-5)
    np.testing.assert_allclose(scanned_state, want_state, rtol=0, atol=1e-5)


@pytest.mark.parametrize("gate", [-5.0, -1.3, -1e-4, 0.0])
@pytest.mark.parametrize("same_keys", [False, True])
def test_extreme_gates(state, gate, same_keys):
    """The fastest and the slowest decays, and one key again and again: finite and right."""
    arguments = tokens(300, gate=gate, same_keys=same_keys)
    want_state, want = oracle(state, *arguments)
    got_state, got = run_chunked(state, arguments)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
    np.testing.assert_allclose(got_state, want_state, rtol=0, atol=1e-5)


def test_gates_that_jump(state):
    """Channels that forget at once beside channels that never do, and both in turns."""
    arguments = list(tokens(300))
    arguments[3] = np.where(np.random.default_rng(3).random(arguments[3].shape) < 0.5, -5, 0).astype(np.float32)
    want_state, want = oracle(state, *arguments)
    got_state, got = run_chunked(state, arguments)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
    np.testing.assert_allclose(got_state, want_state, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("block", "workspace"), [(1, 1 << 30), (8, 1 << 15), (128, 1 << 30)])
def test_any_block(state, block, workspace):
    """The block is a matter of speed alone; so is the workspace."""
    arguments = tokens(130)
    want_state, want = oracle(state, *arguments)
    got_state, got = run_chunked(state, arguments, block, workspace_bytes=workspace)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
    np.testing.assert_allclose(got_state, want_state, rtol=0, atol=1e-5)


def test_decays_keep_their_digits():
    """A row next to a key: what both forgot before must not cost the product's digits."""
    rng = np.random.default_rng(4)
    log_decay = np.asarray(-5 + rng.random((64, WIDTH)), np.float32)
    log_decay[1::2] = -1e-3
    q, k = (np.asarray(rng.random((64, WIDTH)), np.float32) for _ in range(2))
    (got,) = decayed_products(
        (jnp.asarray(q),), jnp.asarray(k), jnp.asarray(log_decay), max_decay=5.0, precision="highest"
    )
    upto = np.cumsum(log_decay.astype(np.float64), axis=0)
    want = np.einsum("ic,jc,ijc->ij", q, k, np.exp(np.minimum(upto[:, None] - upto[None], 0)))
    rows, keys = np.tril_indices(64)
    near = rows - keys < 16
    np.testing.assert_allclose(np.asarray(got)[rows, keys][near], want[rows, keys][near], rtol=1e-5)


def test_sequences_keep_their_states(state):
    """Blocks of three sequences; a block of none, and a sequence without blocks."""
    lengths = {0: 20, 2: 33}
    arguments = {r: tokens(n, seed=r) for r, n in lengths.items()}
    parts = [[blocks(x, 16) for x in arguments[r]] for r in lengths]
    joined = [jnp.concatenate([*xs, xs[0][:1]]) for xs in zip(*parts, strict=True)]
    sequence = jnp.array([0, 0, 2, 2, 2, -1], jnp.int32)
    start = np.stack([state, 2 * state, 3 * state])
    got, out = compiled(jnp.asarray(start), sequence, *joined, max_decay=5.0)
    np.testing.assert_array_equal(got[1], start[1])
    out = np.moveaxis(np.asarray(out), 2, 1)
    for r, first, count in ((0, 0, 2), (2, 2, 3)):
        want_state, want = oracle(start[r], *arguments[r])
        np.testing.assert_allclose(got[r], want_state, rtol=0, atol=1e-5)
        rows = out[first : first + count].reshape(-1, HEADS, WIDTH)[: lengths[r]]
        np.testing.assert_allclose(rows, want, rtol=0, atol=1e-5)


def test_unit_lower_inverse():
    """Against NumPy, for a matrix whose power series would lose every digit."""
    lower = np.tril(np.full((64, 64), 0.9), -1)
    got = unit_lower_inverse(jnp.asarray(lower, jnp.float32))
    np.testing.assert_allclose(got, np.linalg.inv(np.eye(64) + lower), rtol=0, atol=1e-5)


def test_decays_beyond_float32_are_refused():
    """A single step that no float32 can undo."""
    assert subblock_size(64, 5.0) == 16 and subblock_size(64, 10.0) == 8 and subblock_size(4, 1.0) == 4
    with pytest.raises(ValueError, match=r"max_decay=81\.0 must not exceed 80"):
        subblock_size(64, 81.0)
    with pytest.raises(ValueError, match="power of two of tokens, got 48"):
        run_chunked(np.zeros((HEADS, WIDTH, WIDTH), np.float32), tokens(50), block=48)


def test_decode_step_is_one_token(state):
    """Many heads at once, float64 where asked for."""
    arguments = tokens(1, seed=5)
    with jax.enable_x64(True):
        got_state, got = decode_step(*(jnp.asarray(x, jnp.float64) for x in (state, *(x[0] for x in arguments))))
    want_state, want = oracle(state, *arguments)
    np.testing.assert_allclose(got, want[0], rtol=0, atol=1e-12)
    np.testing.assert_allclose(got_state, want_state, rtol=0, atol=1e-12)
