"""Every row reaches its experts and comes back to its place, however uneven the routes are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from sharding.expert_exchange import exchange_rows
from sharding.mesh import TP_AXES, make_mesh
from tests.lowering.topology import require_cuda_plugin, target_mesh
from tests.sharding.harness import run_on_every_rank

ROWS, WIDTH, CHOICES, LOCAL = 5, 3, 2, 3


def routes(kind: str, ranks: int) -> np.ndarray:
    """Experts of each row of each rank [ranks * ROWS, CHOICES], distinct within a row."""
    rng, total = np.random.default_rng(7), ranks * LOCAL
    random = np.stack([rng.permutation(total)[:CHOICES] for _ in range(ranks * ROWS)])
    if kind == "one rank":  # All rows of all ranks, twice: the receive buffer is full.
        return np.tile([total - 1, total - 3], (ranks * ROWS, 1))
    if kind == "own rank":
        return np.repeat(np.arange(ranks) * LOCAL, ROWS)[:, None] + np.array([2, 0])
    if kind == "padding":
        random[rng.random(ranks * ROWS) < 0.5] = -1
        random[:ROWS] = -1  # A rank without rows.
    return random


@pytest.mark.parametrize(
    ("kind", "tp", "dcp"),
    [("random", 8, 2), ("one rank", 8, 8), ("own rank", 4, 1), ("padding", 8, 4), ("random", 1, 1)],
)
def test_rows_reach_their_experts(kind, tp, dcp):
    """An expert's result names the expert and the row, so that no mistake cancels out."""
    experts = routes(kind, tp)
    rng = np.random.default_rng(0)
    x = rng.integers(-8, 8, (tp * ROWS, WIDTH)).astype(np.float32)
    weights = rng.integers(1, 4, experts.shape).astype(np.float32)

    def rank(x, experts, weights):
        first = jax.lax.axis_index(TP_AXES) * LOCAL

        def serve(rows, sizes):
            ends = jnp.cumsum(sizes)
            expert = jnp.searchsorted(ends, jnp.arange(rows.shape[0]), side="right") + first
            served = rows * (expert[:, None] + 1).astype(rows.dtype)
            # What a grouped matmul leaves behind its last group is anything.
            return jnp.where(jnp.arange(rows.shape[0])[:, None] < ends[-1], served, jnp.nan)

        return exchange_rows(x, experts, weights, serve, local_experts=LOCAL)

    spec = P(TP_AXES)
    got = run_on_every_rank(
        rank, make_mesh(tp=tp, dcp=dcp), (spec,) * 3, (x, experts.astype(np.int32), weights), check_vma=False
    )
    factor = np.where(experts >= 0, weights * (experts + 1), 0).sum(axis=1)
    np.testing.assert_array_equal(got.reshape(-1, WIDTH), x * factor[:, None])


@pytest.mark.aot
@require_cuda_plugin
def test_ragged_on_gpus():
    """Eight GPUs exchange GLM-5.2's rows in two ragged transfers, one buffer of the worst case each way."""
    mesh = target_mesh(shape=(1, 1, 8), names=("data", "qsplit", "dcp"))
    spec = P(TP_AXES)

    def rank(x, experts, weights):
        return exchange_rows(x, experts, weights, lambda rows, sizes: rows, local_experts=32)

    program = jax.jit(jax.shard_map(rank, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=False))
    sharding = jax.sharding.NamedSharding(mesh, spec)
    arguments = [
        jax.ShapeDtypeStruct((8192, *shape), dtype, sharding=sharding)
        for shape, dtype in (((6144,), jnp.bfloat16), ((8,), jnp.int32), ((8,), jnp.float32))
    ]
    compiled = program.trace(*arguments).lower(lowering_platforms=("cuda",)).compile()
    text = compiled.as_text()
    assert text.count("ragged-all-to-all") >= 2 and " all-to-all(" not in text
    assert compiled.memory_analysis().temp_size_in_bytes < 3.5 * 65536 * 6144 * 2
