"""Cases of the lightning indexer: full rectangles beside DeepGEMM, and causal chunks of a prefill."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from bench_case import Case, Peer

from pallas_kernels.lightning_indexer import lightning_indexer, reference

DIM = 128
CHUNK = 8192
# The tensor cores of Hopper accumulate products of e4m3 with fewer bits than float32 has.
TOLERANCE = {"float8_e4m3fn": 3e-4, "bfloat16": 1e-5}
SAMPLE = 8  # rows that are compared with the reference


def _inputs(rows: int, keys: int, heads: int, dtype, first_position: int | None):
    """Random inputs; rows see all keys, or causally those up to their position."""
    seeds = jax.random.split(jax.random.key(0), 4)
    q = jax.random.normal(seeds[0], (rows, heads, DIM)).astype(dtype)
    k = jax.random.normal(seeds[1], (keys, DIM)).astype(dtype)
    weights = jax.random.normal(seeds[2], (rows, heads))
    k_scale = jax.random.uniform(seeds[3], (keys,)) + 0.5
    end = np.full(rows, keys) if first_position is None else first_position + 1 + np.arange(rows)
    return q, k, weights, jnp.zeros(rows, jnp.int32), jnp.asarray(end, jnp.int32), k_scale


def _error(out, inputs) -> float:
    q, k, weights, start, end, k_scale = inputs
    rows = jnp.asarray(np.linspace(0, q.shape[0] - 1, SAMPLE).astype(np.int32))
    want = np.concatenate(
        [
            reference.lightning_indexer(q[r], k, weights[r], start[r], end[r], k_scale=k_scale)
            for r in rows.reshape(SAMPLE, 1)
        ]
    )
    got, visible = np.asarray(out[rows], np.float64), np.isfinite(want)
    return float(np.linalg.norm(got[visible] - want[visible]) / np.linalg.norm(want[visible].astype(np.float64)))


def _deepgemm(rows: int, keys: int, heads: int) -> Peer:
    import deep_gemm  # pyright: ignore[reportMissingImports]
    import torch  # pyright: ignore[reportMissingImports]

    torch.manual_seed(0)
    q = torch.randn(rows, heads, DIM, device="cuda").to(torch.float8_e4m3fn)
    k = torch.randn(keys, DIM, device="cuda").to(torch.float8_e4m3fn)
    scale = torch.rand(keys, device="cuda") + 0.5
    weights = torch.randn(rows, heads, device="cuda")
    start = torch.zeros(rows, dtype=torch.int32, device="cuda")
    end = torch.full((rows,), keys, dtype=torch.int32, device="cuda")
    return Peer(
        "DeepGEMM fp8_mqa_logits, clean_logits=False",
        lambda: deep_gemm.fp8_mqa_logits(q, (k, scale), weights, start, end, clean_logits=False),
        torch.cuda.synchronize,
    )


def _case(rows, keys, heads, dtype, *, first_position=None, clean=False, with_peer=False) -> Case:
    inputs = _inputs(rows, keys, heads, dtype, first_position)
    score = jax.jit(functools.partial(lightning_indexer, clean_logits=clean))
    q, k, weights, start, end, k_scale = inputs
    pairs = int(np.asarray(end, np.int64).sum())
    name = jnp.dtype(dtype).name
    what = "rectangle" if first_position is None else f"causal from position {first_position}"
    return Case(
        name=f"{name} heads={heads} rows={rows} keys={keys} {what}{' clean' if clean else ''}",
        run=lambda: score(q, k, weights, start, end, k_scale=k_scale),
        error=functools.partial(_error, inputs=inputs),
        tolerance=TOLERANCE[name],
        flops=2.0 * pairs * heads * DIM,
        bytes=4.0 * pairs + q.nbytes + k.nbytes,
        peer=functools.partial(_deepgemm, rows, keys, heads) if with_peer else None,
    )


def cases(options) -> Iterator[Case]:
    """The cases, made one at a time so that only one holds memory."""
    fp8, rows, keys = jnp.float8_e4m3fn, options.rows, options.keys
    for heads in (64, 32):
        yield _case(rows, keys, heads, fp8, with_peer=options.peers is not None)
    yield _case(rows, keys, 64, jnp.bfloat16)
    yield _case(rows, keys, 32, jnp.bfloat16)
    for heads in (16, 8):
        yield _case(rows, keys, heads, fp8)
    for heads in (64, 32) if keys >= CHUNK else ():
        yield _case(CHUNK, keys, heads, fp8, first_position=keys - CHUNK)
        yield _case(CHUNK, CHUNK, heads, fp8, first_position=0)
        yield _case(CHUNK, CHUNK, heads, fp8, first_position=0, clean=True)
