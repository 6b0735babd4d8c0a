"""Cases of the whole index_topk, beside DeepGEMM's logits alone: the peer has not selected anything yet."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from bench_case import Case, Peer  # pyright: ignore[reportMissingImports]

from pallas_kernels.index_topk import index_topk
from pallas_kernels.lightning_indexer import lightning_indexer
from pallas_kernels.topk.arg_specs import expected_ids

DIM = 128
TOP_K = 2048
SAMPLE = 8  # rows that are compared with a stable sort of the same scores
LONG = 1 << 20


def _inputs(rows: int, keys: int, heads: int, dtype):
    seeds = jax.random.split(jax.random.key(0), 4)
    q = jax.random.normal(seeds[0], (rows, heads, DIM)).astype(dtype)
    k = jax.random.normal(seeds[1], (keys, DIM)).astype(dtype)
    weights = jax.random.normal(seeds[2], (rows, heads))
    k_scale = jax.random.uniform(seeds[3], (keys,)) + 0.5
    return q, k, weights, jnp.zeros(rows, jnp.int32), jnp.full((rows,), keys, jnp.int32), k_scale


def _error(ids, inputs) -> float:
    """Share of the sampled rows that are not a stable sort of the scores of that row."""
    q, k, weights, start, end, k_scale = inputs
    rows = jnp.asarray(np.linspace(0, q.shape[0] - 1, SAMPLE).astype(np.int32))
    scores = lightning_indexer(q[rows], k, weights[rows], start[rows], end[rows], k_scale=k_scale)
    wrong = 0
    for row, found in zip(np.asarray(scores), np.asarray(ids[rows]), strict=True):
        wrong += not np.array_equal(np.sort(found), np.sort(expected_ids(row, TOP_K, 0, k.shape[0])))
    return wrong / SAMPLE


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
        "DeepGEMM fp8_mqa_logits, clean_logits=False, without any selection",
        lambda: deep_gemm.fp8_mqa_logits(q, (k, scale), weights, start, end, clean_logits=False),
        torch.cuda.synchronize,
    )


def _case(rows, keys, heads, dtype, *, with_peer=False) -> Case:
    inputs = _inputs(rows, keys, heads, dtype)
    q, k, weights, start, end, k_scale = inputs
    select = jax.jit(functools.partial(index_topk, top_k=TOP_K))
    return Case(
        name=f"{jnp.dtype(dtype).name} heads={heads} rows={rows} keys={keys} k={TOP_K}",
        run=lambda: select(q, k, weights, start, end, k_scale=k_scale),
        error=functools.partial(_error, inputs=inputs),
        tolerance=0.0,
        flops=2.0 * rows * keys * heads * DIM,
        peer=functools.partial(_deepgemm, rows, keys, heads) if with_peer else None,
    )


def cases(options) -> Iterator[Case]:
    """The cases, made one at a time so that only one holds memory."""
    fp8, rows, keys = jnp.float8_e4m3fn, options.rows, options.keys
    for heads in (32, 64):
        yield _case(rows, keys, heads, fp8, with_peer=options.peers is not None)
    yield _case(rows, keys, 64, jnp.bfloat16)
    yield _case(rows, LONG, 32, fp8)
