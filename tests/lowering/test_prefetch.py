"""The step's gathers of records in the schedule of a program for 8 GPUs, compiled for histories of 512K tokens.

A schedule is what the compiler intends; whether a device overlaps what it is told to is measured elsewhere.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from dsa_jax.batch import Request, build_step
from dsa_jax.cache import CacheGeometry, cache_shapes
from dsa_jax.config import ModelConfig
from dsa_jax.layers.context import StepOptions
from dsa_jax.model import Model, abstract_model, fill_parameters, parameter_specs
from dsa_jax.step import decide_step, plan_rows, run_step
from sharding.mesh import AXES, DATA
from sharding.policy import PrefillPolicy
from tests.lowering.topology import require_cuda_plugin, target_mesh
from tests.support import ORACLE

pytestmark = [pytest.mark.aot, require_cuda_plugin]

QSPLIT, DCP = 2, 4
# Rows of the gathered buffer on a rank: enough bytes that the compiler does not merge gathers as small ones.
ROWS = 131072
# Of the six layers, two are one body of a scan.
TRACED_LAYERS = 5
COLLECTIVE = re.compile(r"(all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute)(-start|-done)?\(")


@dataclasses.dataclass(frozen=True)
class Gather:
    """One gather of records in the schedule.

    Attributes:
      buffers: How many buffers it fills.
      between: Instructions between its start and its end.
    """

    buffers: int
    between: list[str]


def placed(tree, sharding):
    """Arrays as shapes on the target's devices."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def model_on(mesh) -> Model:
    """A checkpoint's model of shapes."""
    model = abstract_model(ModelConfig.from_folder(ORACLE / "glm52_tp8" / "single"), mesh)
    shapes = {
        name: jax.ShapeDtypeStruct(spec.shape, spec.dtype or jnp.float32, sharding=NamedSharding(mesh, spec.spec))
        for name, spec in parameter_specs(model).items()
    }
    return fill_parameters(model, shapes)


@functools.cache
def compiled(prefetch: bool) -> tuple[str, float]:
    """The schedule of a step that gathers records, and its temporaries in buffers of gathered records."""
    mesh = target_mesh("sm_90a", (1, QSPLIT, DCP), AXES)
    model = model_on(mesh)
    geometry = CacheGeometry.for_model(model.config, mesh, jnp.float32, page_size=16)
    step = build_step([Request(np.zeros(100, np.int64), np.arange(4), cached=60)], geometry, groups=1, chunk_size=64)
    assert step is not None
    policy = PrefillPolicy(ckv_gather=True, prefetch=prefetch, query_split=True, token_split=False)
    decision = decide_step(model, geometry, step.lengths, policy)
    plan = plan_rows(decision, step.lengths, len(step.inputs.tokens), qsplit=QSPLIT, dcp=DCP)
    inputs = placed(dataclasses.replace(step.inputs, plan=plan), NamedSharding(mesh, PartitionSpec(DATA)))
    options = StepOptions(decision, ckv_rows=ROWS, index_rows=step.index_rows, implementation="reference")
    cache = cache_shapes(model.config, geometry, 4, mesh)
    traced = run_step.trace(*nnx.split(model), inputs, cache, options)
    program = traced.lower(lowering_platforms=("cuda",)).compile()
    buffer = DCP * ROWS * geometry.ckv.bytes_per_token
    return program.as_text(), program.memory_analysis().temp_size_in_bytes / buffer


def record_gathers(text: str) -> list[Gather]:
    """Gathers whose result is a buffer of records, in the order of the text."""
    gathers, started = [], {}
    buffer = re.compile(rf"f32\[{DCP},{ROWS},\d+\]")
    for number, line in enumerate(lines := text.splitlines()):
        name, _, right = line.strip().removeprefix("ROOT ").partition(" = ")
        found = COLLECTIVE.search(right)
        if found is None or found[1] != "all-gather" or not buffer.search(right[: found.start()]):
            continue
        if found[2] == "-done":
            gathers.append(started.pop(re.search(r"\((%[\w.-]+)\)", right)[1]))
            gathers[-1].between.extend(lines[gathers[-1].between.pop() + 1 : number])
            continue
        gather = Gather(len(buffer.findall(right[: found.start()])), [])
        if found[2] == "-start":
            gather.between.append(number)
            started[name] = gather
        else:
            gathers.append(gather)
    assert not started
    return gathers


def attends(gather: Gather) -> bool:
    """Whether a layer attends while the gather is on its way."""
    return any("/sparse_mla/" in line and "dot_general" in line for line in gather.between)


def test_prefetched_records_travel_while_a_layer_attends():
    """Start, the layer's attention, done, and no other collective in between, which would have to wait for its turn."""
    first, *ahead = sorted(record_gathers(compiled(prefetch=True)[0]), key=attends)
    # The first layer's own history has no layer to hide behind; what the last layer would fetch is not there.
    assert not attends(first) and len(ahead) == TRACED_LAYERS - 1
    for gather in ahead:
        assert attends(gather)
        assert not any(COLLECTIVE.search(line) for line in gather.between)


@pytest.mark.parametrize("prefetch", [False, True], ids=["in its layer", "a layer ahead"])
def test_every_history_is_gathered_once_into_a_buffer_of_its_own(prefetch):
    """Prefetch gathers no byte more, and neither it nor the compiler holds more buffers than the policy counts."""
    text, buffers = compiled(prefetch)
    assert [gather.buffers for gather in record_gathers(text)] == [1] * TRACED_LAYERS
    # And the records that the rank itself sends.
    assert buffers < (2 if prefetch else 1) + 1 / DCP + 0.05
