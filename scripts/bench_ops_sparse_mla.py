"""Cases of sparse MLA: prefill over four kinds of selections beside FlashMLA, the gather alone, lists, and decode."""

import functools
from collections.abc import Iterator

import gather_alone
import jax
import jax.numpy as jnp
import numpy as np
from bench_case import Case, Peer

from pallas_kernels import testing
from pallas_kernels.sparse_mla import plan, reference, sparse_mla, union

K, WIDTH, LATENT = 2048, 576, 512
SCALE = WIDTH**-0.5
SAMPLE = 6  # rows that are compared with the reference
TOLERANCE = 5e-3  # of the norm; weights are rounded to bf16, and inputs are not small
FLASH_MLA_HEADS = 64  # it takes 64 or 128: fewer are padded


@functools.cache
def _ids(kind: str, rows: int, keys: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    if kind == "sorted":
        return np.sort(_ids("random", rows, keys), axis=1)
    make = {"random": testing.random_ids, "window": testing.window_ids, "shared": testing.shared_ids}[kind]
    return make(rng, rows, keys, K)


@functools.cache
def _kv(keys: int) -> jax.Array:
    return jax.random.normal(jax.random.key(0), (keys, WIDTH), jnp.bfloat16)


def _error(out, q, kv, ids) -> float:
    rows = np.linspace(0, q.shape[0] - 1, min(SAMPLE, q.shape[0])).astype(np.int32)
    want, _ = reference.sparse_mla(
        q[rows],
        kv,
        ids[rows],
        softmax_scale=SCALE,
        kv_lora_rank=LATENT,
        num_valid=None,
        kv_format=None,
        out_dtype=jnp.dtype(jnp.float32),
        workspace_bytes=1 << 30,
    )
    got, want = np.asarray(out[0][rows].astype(jnp.float32), np.float64), np.asarray(want, np.float64)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def _flash_mla(rows: int, keys: int, heads: int, ids: np.ndarray) -> Peer:
    import inspect

    import flash_mla  # pyright: ignore[reportMissingImports]
    import torch  # pyright: ignore[reportMissingImports]

    run = flash_mla.flash_mla_sparse_fwd
    legacy = {"use_legacy": True} if "use_legacy" in inspect.signature(run).parameters else {}
    padded = max(FLASH_MLA_HEADS, heads)
    torch.manual_seed(0)
    q = torch.randn(rows, padded, WIDTH, device="cuda", dtype=torch.bfloat16)
    kv = torch.randn(keys, 1, WIDTH, device="cuda", dtype=torch.bfloat16)
    listed = torch.tensor(ids, device="cuda")[:, None]
    what = "FlashMLA flash_mla_sparse_fwd" + (f", {heads} heads padded to {padded}" if padded != heads else "")
    return Peer(what, lambda: run(q, kv, listed, SCALE, **legacy), torch.cuda.synchronize)


def _attention(rows, keys, heads, kind, *, chosen=None, with_peer=False) -> Case:
    ids = _ids(kind, rows, keys)
    q = jax.random.normal(jax.random.key(1), (rows, heads, WIDTH), jnp.bfloat16)
    kv, listed = _kv(keys), jnp.asarray(ids)
    chosen = chosen or plan.choose_plan(rows, heads, K)

    @jax.jit
    def attend(q, kv, ids):
        return plan.sparse_mla(
            q,
            kv,
            ids,
            softmax_scale=SCALE,
            num_valid=None,
            out_dtype=jnp.dtype(jnp.bfloat16),
            workspace_bytes=1 << 30,
            plan=chosen,
        )

    return Case(
        name=f"heads={heads} rows={rows} keys={keys} {kind} ids{'' if chosen.ordered else ' as given'}",
        run=lambda: attend(q, kv, listed),
        error=lambda out: _error(out, q, kv, listed),
        tolerance=TOLERANCE,
        flops=2.0 * rows * K * heads * (WIDTH + LATENT),
        bytes=2.0 * rows * (K + heads) * WIDTH + 2.0 * rows * heads * LATENT,
        peer=functools.partial(_flash_mla, rows, keys, heads, ids) if with_peer else None,
        extra={"plan": repr(chosen)},
    )


def _gather(rows, keys, kind) -> Case:
    gather = jax.jit(gather_alone.build(rows, K, keys))
    kv, ids = _kv(keys), jnp.asarray(_ids(kind, rows, keys).reshape(-1))
    return Case(
        name=f"gather alone rows={rows} keys={keys} {kind} ids",
        run=lambda: gather(kv, ids),
        error=lambda out: 0.0 if out.shape == (rows,) else 1.0,
        tolerance=0.0,
        bytes=2.0 * rows * K * WIDTH,
    )


def _lists(rows, keys, group, kind) -> Case:
    ids = _ids(kind, rows, keys)
    make = jax.jit(union.build(rows, K, keys, group))
    listed, lengths = jnp.asarray(ids.reshape(-1)), jnp.full((rows,), K, jnp.int32)

    def error(out) -> float:
        want = np.unique(ids[:group])
        return float(int(out[2][0]) != want.size or not np.array_equal(np.asarray(out[0][: want.size]), want))

    return Case(
        name=f"lists of {group} rows rows={rows} keys={keys} {kind} ids",
        run=lambda: make(listed, lengths),
        error=error,
        tolerance=0.0,
        bytes=4.0 * rows * K,
    )


def _public(rows, keys, heads) -> Case:
    """The public function at a size of decoding, its own choice of everything."""
    ids = jnp.asarray(_ids("random", rows, keys))
    q = jax.random.normal(jax.random.key(1), (rows, heads, WIDTH), jnp.bfloat16)
    kv = _kv(keys)
    attend = jax.jit(lambda q, kv, ids: sparse_mla(q, kv, ids, softmax_scale=SCALE, kv_lora_rank=LATENT))
    return Case(
        name=f"decode heads={heads} rows={rows} keys={keys} random ids",
        run=lambda: attend(q, kv, ids),
        error=lambda out: _error(out, q, kv, ids),
        tolerance=TOLERANCE,
        flops=2.0 * rows * K * heads * (WIDTH + LATENT),
        bytes=2.0 * rows * K * WIDTH,
        extra={"plan": repr(plan.choose_plan(rows, heads, K))},
    )


def cases(options) -> Iterator[Case]:
    """The cases, made one at a time so that only one holds memory."""
    rows, keys, peers = options.rows, options.keys, options.peers is not None
    for kind in ("random", "sorted", "window"):
        yield _gather(rows, keys, kind)
    for heads in (64, 128):
        yield _attention(rows, keys, heads, "random", with_peer=peers)
    yield _attention(rows, keys, 64, "random", chosen=plan.Plan(1, 1, False), with_peer=peers)
    yield _attention(rows, keys, 64, "sorted", chosen=plan.Plan(1, 1, False), with_peer=peers)
    yield _attention(rows, keys, 64, "window", chosen=plan.Plan(1, 1, False), with_peer=peers)
    yield _attention(rows, keys, 64, "shared", with_peer=peers)
    for heads in (32, 16, 8):
        for kind in ("random", "window", "shared"):
            yield _attention(rows, keys, heads, kind)
    for group in (1, 4, 8):
        yield _lists(rows, keys, group, "random")
    for decode_rows in (1, 8, 64):
        for heads in (64, 16):
            yield _public(decode_rows, keys, heads)
