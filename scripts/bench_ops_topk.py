"""Cases of the exact top-k: random rows beside torch.topk and lax.top_k, hard rows, long rows, and few rows."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from bench_case import Case, Peer  # pyright: ignore[reportMissingImports]

from pallas_kernels.topk import topk
from pallas_kernels.topk.arg_specs import KINDS, SPECS, TopkSpec, expected_ids, score_row

SAMPLE = 8  # rows that are compared with a stable sort
DISTINCT = 8  # rows of a hard kind, repeated to fill the call
LOOPS = 32  # calls of a few rows are shorter than what it takes to start one


def _scores(spec: TopkSpec, kind: str | None) -> jax.Array:
    if kind is None:
        return jax.jit(lambda: jax.random.normal(jax.random.key(0), (spec.rows, spec.columns)))()
    rng = np.random.default_rng(0)
    rows = np.stack([score_row(rng, kind, spec.columns) for _ in range(DISTINCT)])
    return jnp.tile(jnp.asarray(rows), (spec.rows // DISTINCT, 1))


def _error(ids, scores: jax.Array, k: int) -> float:
    """Share of the sampled rows that are not those of a stable sort."""
    rows = np.unique(np.linspace(0, scores.shape[0] - 1, SAMPLE).astype(np.int32))
    wrong = 0
    for row in rows:
        want = expected_ids(np.asarray(scores[row]), k, 0, scores.shape[1])
        wrong += not np.array_equal(np.sort(np.asarray(ids[row])), np.sort(want))
    return wrong / len(rows)


def _lax(scores: jax.Array, k: int) -> Peer:
    select = jax.jit(lambda x: jax.lax.top_k(x, k))
    last = []

    def run():
        last[:] = select(scores)
        return last

    return Peer("jax.lax.top_k (sorted; NaN first)", run, lambda: jax.block_until_ready(last))


def _torch(scores: jax.Array, k: int) -> Peer:
    import torch  # pyright: ignore[reportMissingImports]

    copy = torch.from_dlpack(scores)
    return Peer("torch.topk(sorted=False)", lambda: torch.topk(copy, k, dim=-1, sorted=False), torch.cuda.synchronize)


@functools.cache
def _select(k: int):
    return jax.jit(functools.partial(topk, k=k))


def _case(name: str, spec: TopkSpec, *, kind: str | None = None, peer=None) -> Case:
    scores = _scores(spec, kind)
    select = _select(spec.k)
    return Case(
        name=f"{name} rows={spec.rows} columns={spec.columns} k={spec.k} {kind or 'normal'}",
        run=lambda: select(scores),
        error=functools.partial(_error, scores=scores, k=spec.k),
        tolerance=0.0,
        bytes=4.0 * spec.rows * spec.columns,
        peer=peer and functools.partial(peer, scores, spec.k),
    )


def _looped(name: str, spec: TopkSpec) -> Case:
    """Calls that depend on each other inside one program, because one alone is shorter than its start."""
    scores = _scores(spec, None)
    end = jnp.full((spec.rows,), spec.columns, jnp.int32)

    @jax.jit
    def run(scores, start):
        def once(_, state):
            start, _ = state
            ids = jnp.asarray(topk(scores, spec.k, start, end))
            return jnp.minimum(ids[:, 0], 0), ids

        none = jnp.zeros((spec.rows, spec.k), jnp.int32)
        return jax.lax.fori_loop(0, LOOPS, once, (start, none))[1]

    return Case(
        name=f"{name} rows={spec.rows} columns={spec.columns} k={spec.k} normal, {LOOPS} calls in a loop",
        run=lambda: run(scores, jnp.zeros((spec.rows,), jnp.int32)),
        error=functools.partial(_error, scores=scores, k=spec.k),
        tolerance=0.0,
        bytes=4.0 * spec.rows * spec.columns * LOOPS,
        extra={"calls": LOOPS},
    )


def cases(options) -> Iterator[Case]:
    """The cases, made one at a time so that only one holds memory."""
    tile = SPECS["tile_128k"]
    if options.peers is not None:
        yield _case("tile_128k", tile, peer=_torch)
    yield _case("tile_128k", tile, peer=_lax)
    for kind in KINDS:
        yield _case("tile_128k", tile, kind=kind)
    for name in ("glm_v32_128k", "tile_1m"):
        yield _case(name, SPECS[name])
    for name in ("decode_128k", "decode_1m"):
        yield _looped(name, SPECS[name])
