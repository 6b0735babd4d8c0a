"""Ranks cannot run different programs: what chooses the program is a pure function of what every process knows."""

import ast
import dataclasses
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dsa_jax.batch import GroupLengths
from dsa_jax.step import decide_step, plan_rows
from dsa_jax.testing import users_mesh
from sharding.cost_model import AttentionFacts
from sharding.policy import Decision, PrefillPolicy, decide
from tests.multi_device.scenario import placed_model
from tests.multi_device.test_paths import AUTO
from tests.support import geometry

ROOT = Path(__file__).parents[2]
MODEL = AttentionFacts(heads=64, index_heads=32, index_dim=128, top_k=2048, record_bytes=656)
# Tokens and new tokens of the requests of a step: long and short, decode rows beside a prompt, all empty ranks.
STEPS = [([131072], [8192]), ([9000, 40, 1 << 20], [1, 40, 4096]), ([3], [3]), ([70, 70, 70], [1, 1, 1])]
POLICIES = [{}, {"partition": "contiguous"}, {"query_split": True, "ckv_gather": True, "prefetch": True}]
# Names of what a rank knows alone, or of what differs from run to run.
RANK_LOCAL = {
    "process_index", "local_devices", "local_device_count", "addressable_shards", "addressable_data", "axis_index",
    "environ", "getenv", "random", "time", "perf_counter", "id", "hash", "set", "frozenset",
}  # fmt: skip
PLANNERS = ["sharding/policy.py", "sharding/cost_model.py", "sharding/row_partition.py", "dsa_jax/batch.py"]


def decisions(order: list[int]) -> dict[str, str]:
    """Everything that is decided for each step and policy, in words; taken in the given order."""
    cases = list(itertools.product(range(len(STEPS)), range(len(POLICIES))))
    found = {}
    for i in order:
        step, policy = cases[i]
        decision = decide(PrefillPolicy(**POLICIES[policy]), *STEPS[step], MODEL, qsplit=2, dcp=4)
        found[f"{step} {policy}"] = repr(decision)
    return found


def test_another_process_decides_the_same():
    """Another process, another order of the calls, another seed of Python's hashes: the same words."""
    order = list(range(len(STEPS) * len(POLICIES)))
    module = "tests.multi_device.test_one_program"
    code = f"import json, {module} as test; print(json.dumps(test.decisions({order[::-1]})))"
    other = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "7", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(other.stdout) == decisions(order)
    assert len(set(decisions(order).values())) > len(STEPS)


@pytest.mark.parametrize("file", PLANNERS)
def test_planners_use_nothing_that_a_rank_knows_alone(file):
    """Neither the device or process, nor clocks, chance, the environment, or the order of a set."""
    tree = ast.parse((ROOT / file).read_text())
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not names & RANK_LOCAL


def test_decisions_that_run_alike_are_one_key():
    """What explains a decision is no part of it, so longer requests on the same path keep the program."""
    short, long = (decide(PrefillPolicy(), [n], [4096], MODEL, qsplit=2, dcp=4) for n in (200_000, 210_000))
    assert short.facts != long.facts and short.explain() != long.explain()
    assert short == long and hash(short) == hash(long)
    assert {field.name for field in dataclasses.fields(Decision) if not field.compare} == {
        "candidates",
        "facts",
        "buffer_bytes",
    }


def lengths(*groups: tuple[list[int], list[int]]) -> tuple[GroupLengths, ...]:
    """Lengths of data groups."""
    return tuple(GroupLengths(np.array(seq), np.array(query)) for seq, query in groups)


def test_a_policy_that_does_not_fit_the_cache_is_refused_before_anything_runs():
    """On the host, from what all processes know: never on some ranks alone, never by another path in silence."""
    model = placed_model("glm5_tp8", users_mesh(1, 2, 4, AUTO))
    policy = PrefillPolicy(query_split=True, index_replicas=2)
    with pytest.raises(ValueError, match=r"the policy has index_replicas=2, the cache has 1"):
        decide_step(model, geometry(model), lengths(([64], [64])), policy)
    decision = decide_step(model, geometry(model, index_replicas=2), lengths(([64], [64])), policy)
    assert decision.query_split and decision.index_shards == 2


def test_all_data_groups_take_one_path():
    """One decision for the step, whichever group is the heavy one; each group has rows of its own in the plan."""
    model = placed_model("glm5_tp8", users_mesh(2, 2, 2, AUTO))
    heavy, light = ([400, 3], [40, 3]), ([5], [5])
    policy = PrefillPolicy(query_split=True, query_split_min_rows=0, ckv_gather=True, ckv_gather_min_tokens=8)
    plans = []
    for groups in (lengths(heavy, light), lengths(light, heavy)):
        decision = decide_step(model, geometry(model), groups, policy)
        assert decision.query_split and decision.ckv_gather
        plan = plan_rows(decision, groups, 64, qsplit=2, dcp=2)
        assert plan is not None
        plans.append([np.split(np.asarray(part), 2) for part in (plan.rows, plan.source)])
    for first, second in zip(*plans, strict=True):
        np.testing.assert_array_equal(first[0], second[1])
        np.testing.assert_array_equal(first[1], second[0])
    assert not decide_step(model, geometry(model), lengths(light, light), policy).ckv_gather


@pytest.mark.parametrize("partition", ["contiguous", "balanced"])
def test_a_plan_of_any_step_has_one_shape(partition):
    """Prompts, decode rows, both, and groups without a row: plans differ in their values alone, and hold every row."""
    model = placed_model("glm5_tp8", users_mesh(1, 4, 2, AUTO))
    policy = PrefillPolicy(query_split=True, query_split_min_rows=0, partition=partition)
    steps = [([64], [64]), ([90, 30, 31], [1, 1, 31]), ([50, 40, 9], [1, 1, 1]), ([200, 33], [31, 33]), ([1], [1])]
    shapes, values = set(), set()
    for seq, query in steps:
        groups = lengths((seq, query))
        plan = plan_rows(decide_step(model, geometry(model), groups, policy), groups, 64, qsplit=4, dcp=2)
        assert plan is not None
        rows = np.asarray(plan.rows)
        assert sorted(rows[rows >= 0].tolist()) == list(range(sum(query)))
        shapes.add((rows.shape, rows.dtype, np.asarray(plan.source).shape))
        values.add(rows.tobytes())
    assert len(shapes) == 1 and len(values) == len(steps)
