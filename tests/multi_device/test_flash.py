"""GLM-5.3-Flash over 8 devices against the oracle, whose answers come from one: pools dealt to ranks, heads split."""

import numpy as np
import pytest
from jax.sharding import AxisType

from dsa_jax.cache import CacheGeometry
from dsa_jax.engine import EngineOptions
from dsa_jax.step import Execution, plan_rows
from dsa_jax.testing import users_mesh
from sharding.policy import PrefillPolicy
from tests.multi_device.scenario import TOKENS_PER_PAGE, placed_model, run_scenario
from tests.support import load_model

VARIANT = "flash_tp8"
# (data, qsplit, dcp), interleave, copies of the index keys, policy, type of the mesh's axes
CASES = [
    ((1, 8, 1), 4, 1, {"query_split": True, "partition": "contiguous"}, AxisType.Explicit),
    ((1, 4, 2), 8, 1, {"query_split": True, "ckv_gather": True, "merge": "owner"}, AxisType.Auto),
    ((1, 2, 4), 4, 2, {"query_split": True, "ckv_gather": True, "prefetch": True, "token_split": True}, AxisType.Auto),
    ((1, 1, 8), 8, 1, {"merge": "replicated"}, AxisType.Auto),
]


@pytest.mark.parametrize(("mesh", "interleave", "replicas", "switches", "axes"), CASES)
def test_path_equals_the_oracle(mesh, interleave, replicas, switches, axes, monkeypatch):
    """Chunks that start inside pools, decode beside prefill: selections and tokens exactly, logits to 5e-4."""
    # One program serves all steps but those of decode rows alone.
    monkeypatch.setattr("dsa_jax.batch.MIN_ROWS", 64)
    monkeypatch.setattr("dsa_jax.batch.MIN_KEYS", 512)
    dcp = mesh[2]
    off = {"query_split_min_rows": 0, "ckv_gather_min_tokens": 0}
    policy = PrefillPolicy.stock(index_replicas=replicas, **off, **switches)
    options = EngineOptions(
        chunk_size=46,
        page_size=TOKENS_PER_PAGE // dcp,
        interleave=interleave,
        index_replicas=replicas,
        execution=Execution(policy=policy),
    )
    run_scenario(placed_model(VARIANT, users_mesh(*mesh, axes)), VARIANT, options)


def test_runs_hold_whole_pools():
    """A pool is never split over ranks."""
    model = placed_model(VARIANT, users_mesh(1, 4, 2, AxisType.Auto))
    with pytest.raises(ValueError, match=r"interleave=2 must be divisible by kpool=4"):
        CacheGeometry.for_model(model.config, model.mesh, model.dtype, interleave=2)


def test_buffers_of_index_keys_hold_pools():
    """A rank's buffer of index keys has a row for each pool that it holds, a fourth of its tokens."""
    from dsa_jax.batch import Request, build_step
    from tests.support import geometry

    model = placed_model(VARIANT, users_mesh(1, 4, 2, AxisType.Auto))
    pages = geometry(model, interleave=4, page_size=64)
    step = build_step([Request(np.zeros(4096, np.int64), np.arange(32))], pages, groups=1, chunk_size=4096)
    assert step is not None and (step.ckv_rows, step.index_rows) == (2048, 512)


def test_rows_are_planned_by_pools():
    """A row costs the pools it scores: one with 4 tokens per key weighs a long context's rows as vLLM's plan does."""
    from dsa_jax.batch import GroupLengths
    from dsa_jax.step import decide_step
    from sharding.row_partition import plan_contiguous
    from tests.support import geometry

    model = load_model(VARIANT)
    lengths = (GroupLengths(np.array([4099]), np.array([4099])),)
    policy = PrefillPolicy(query_split=True, partition="contiguous", query_split_min_rows=0)
    decision = decide_step(placed_model(VARIANT, users_mesh(1, 8, 1, AxisType.Auto)), geometry(model), lengths, policy)
    plan = plan_rows(decision, lengths, 8192, qsplit=8, dcp=1, kpool=4)
    want = plan_contiguous([4099], [4099], ratio=4, ranks=8, min_rows_per_rank=1)
    assert plan is not None and tuple((np.asarray(plan.rows) >= 0).sum(axis=1)) == want
    assert want != plan_contiguous([4099], [4099], ratio=1, ranks=8, min_rows_per_rank=1)
