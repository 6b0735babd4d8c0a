"""Steps of GLM-5.3-Flash at its published widths, compiled for eight H200s: which kernels run, what is held.

Five layers have every kind of body: dense and linear, sparse with experts, linear with experts.
"""

import dataclasses
import functools
import json
import math
import re

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dsa_jax.batch import Request, build_step
from dsa_jax.cache import PagedCache, cache_shapes
from dsa_jax.config import ModelConfig
from dsa_jax.gpu_target import H200, target_devices
from dsa_jax.layers.context import StepOptions
from dsa_jax.plan import AbstractStep, PlanOptions, abstract_step
from dsa_jax.plan_compile import compile_abstract_step
from dsa_jax.step import decide_step
from sharding.mesh import DATA, make_mesh
from sharding.policy import PrefillPolicy
from tests.lowering.topology import require_cuda_plugin
from tests.support import FIXTURES

pytestmark = [pytest.mark.aot, require_cuda_plugin, pytest.mark.timeout(900)]

LAYERS, TP, ROWS, HISTORY = 5, 8, 8192, 131072
POOL, POOLS, WIDTH = 4, 512, 2051
HEADS = 64 // TP
SLOTS, REQUESTS = 17, 16  # a prime that no other dimension of a step has
# What an array of the states' size may come from: it is named, handed on, viewed, or written in place.
FREE = {"parameter", "get-tuple-element", "tuple", "bitcast", "while", "scatter", "optimization-barrier"}
NO_KERNEL = {"parameter", "get-tuple-element", "tuple", "bitcast", "constant"}
_RESULT = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*)$")


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled step.

    Attributes:
      text: Its instructions.
      temp_bytes: Its temporaries.
      cache: The cache it was compiled for.
    """

    text: str
    temp_bytes: int
    cache: PagedCache

    @functools.cached_property
    def instructions(self) -> dict[str, list[tuple[str, str, str, str]]]:
        """Name, result, operation and line of each instruction, by computation."""
        found, computation = {}, ""
        for line in self.text.splitlines():
            if header := re.match(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{$", line):
                computation = header[1]
                found[computation] = []
            elif result := _RESULT.match(line):
                found[computation].append((result[1], result[2], result[3], line))
        return found

    def mosaic(self, scope: str) -> list[str]:
        """Lines of the Mosaic kernels of a part of the model; those that read a slice of a stack are fusions."""
        lines = (line for lines in self.instructions.values() for *_, line in lines)
        return [line for line in lines if "mosaic_gpu" in line and f"/{scope}/" in line]

    def loops(self, scope: str) -> list[int]:
        """Trips of the loops in a part of the model."""
        names = re.compile(rf'op_name="[^"]*/{scope}/[^"]*while"')
        lines = (line for lines in self.instructions.values() for *_, op, line in lines if op == "while")
        return [int(re.search(r'"known_trip_count":\{"n":"(\d+)"', x)[1]) for x in lines if names.search(x)]

    def bodies(self) -> list[tuple[int, list[tuple[str, str, str, str]]]]:
        """Trips and body of every loop that makes a known number of turns."""
        found = []
        for line in (line for lines in self.instructions.values() for *_, op, line in lines if op == "while"):
            if trips := re.search(r'"known_trip_count":\{"n":"(\d+)"', line):
                found.append((int(trips[1]), self.instructions[re.search(r"body=%?([\w.-]+)", line)[1]]))
        return found

    def run(self) -> list[list[tuple[str, str, str, str]]]:
        """Computations whose instructions are run one by one: those of no fusion."""
        fused = set(re.findall(r"(?:calls|to_apply)=%?([\w.-]+)", self.text))
        return [body for name, body in self.instructions.items() if name not in fused]

    def shapes(self) -> set[tuple[int, ...]]:
        """Every shape, those inside fusions too."""
        return {tuple(map(int, dims.split(","))) for dims in re.findall(r"\b[a-z]+[0-9a-z]*\[([\d,]+)\]", self.text)}


def small(config: ModelConfig) -> ModelConfig:
    """The first layers of a model."""
    kinds = {name: getattr(config, name)[:LAYERS] for name in ("indexer_types", "mlp_types")}
    return dataclasses.replace(config, num_layers=LAYERS, **kinds)


def published() -> ModelConfig:
    return ModelConfig.from_dict(json.loads((FIXTURES / "configs" / "glm-5.3-flash.json").read_text()))


def compiled(step: AbstractStep) -> Program:
    previous = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        program = compile_abstract_step(step, H200)
    finally:
        jax.config.update("jax_enable_compilation_cache", previous)
    return Program(program.as_text() or "", program.memory_analysis().temp_size_in_bytes, step.cache)


def bucket(keys: int) -> int:
    """Rows of the buffer that holds so many keys."""
    return 1 << math.ceil(math.log2(keys))


def options(dcp: int, **sizes) -> PlanOptions:
    return PlanOptions(tp=TP, dcp=dcp, interleave=POOL if dcp > 1 else 1, index_format="fp8", **sizes)


@functools.cache
def prefill(dcp: int) -> Program:
    """A chunk of a long prompt."""
    mesh = make_mesh(tp=TP, dcp=dcp, devices=target_devices(H200, TP))
    chunk = options(dcp, context=HISTORY + ROWS, chunk_size=ROWS)
    return compiled(abstract_step(small(published()), chunk, mesh))


@functools.cache
def decode() -> Program:
    """One row of each of 16 requests with 8K tokens."""
    config, mesh = small(published()), make_mesh(tp=TP, devices=target_devices(H200, TP))
    plain = abstract_step(config, options(1, context=ROWS, chunk_size=1), mesh)
    geometry, model = plain.cache.geometry, plain.model
    pages = ROWS // geometry.tokens_per_page
    requests = [
        Request(np.zeros(ROWS, np.int64), np.arange(r * pages, (r + 1) * pages), cached=ROWS - 1, slot=r)
        for r in range(REQUESTS)
    ]
    step = build_step(requests, geometry, groups=1, chunk_size=ROWS)
    assert step is not None
    sharding = NamedSharding(mesh, PartitionSpec(DATA))
    inputs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), step.inputs)
    decision = decide_step(model, geometry, step.lengths, PrefillPolicy.stock())
    one = StepOptions(decision, ckv_rows=step.ckv_rows, index_rows=step.index_rows, single_rows=True)
    cache = cache_shapes(config, geometry, pages * REQUESTS, mesh, requests=SLOTS)
    return compiled(AbstractStep(model, cache, inputs, one))


@pytest.mark.parametrize(("dcp", "index_kernels"), [(1, 2), (2, 4)])
def test_prefill_runs_the_kernels(dcp, index_kernels):
    """Pools are scored and selected, tokens attended to, by Mosaic kernels: nothing falls back to the plain forms."""
    program = prefill(dcp)
    # Score and select; between ranks, the candidates of each are selected from twice more: by the owner of the rows.
    scorer, selector, *_ = found = program.mosaic("indexer")
    assert len(found) == index_kernels
    keys, rows = bucket((HISTORY + ROWS) // POOL // dcp), ROWS * dcp // TP
    assert f"f32[{rows},{keys}]" in scorer and f"s32[{rows * POOLS}]" in selector
    # A rank attends for its share of the rows with the heads of all: queries of 512 columns, lists of 2051 tokens.
    lists, attention = program.mosaic("sparse_mla")
    assert f"s32[{ROWS // TP * WIDTH}]" in lists and f"bf16[{ROWS // TP * 64},512]" in attention
    # What the plain form would gather: rows times ids times the width of a record.
    assert not [shape for shape in program.shapes() if WIDTH in shape and 512 in shape]
    assert len(program.mosaic("mlp")) == 3 * 2


@pytest.mark.parametrize("dcp", [1, 2])
def test_prefill_holds_nothing_quadratic(dcp):
    """No array of rows times tokens or pools, but for the scores of a tile of rows."""
    program = prefill(dcp)
    keys = {size // n for size in (bucket(HISTORY + ROWS), HISTORY + ROWS) for n in (1, dcp, POOL, POOL * dcp)}
    assert not [shape for shape in program.shapes() if ROWS in shape and keys & set(shape)]
    # 1.86 GB, of which one copy of the residual streams is 0.27.
    assert program.temp_bytes < 2.1e9


@pytest.mark.parametrize("dcp", [1, 2])
def test_linear_attention_steps_in_groups(dcp):
    """128 blocks of 64 tokens: 8 steps within 16 groups and 16 across, in each of the two bodies, not 128 or 8192."""
    assert sorted(prefill(dcp).loops("linear_attention")) == [8, 8, 16, 16]
    # The product of a step: all groups and heads at once.
    assert (16 * HEADS, 128, 256) in prefill(dcp).shapes()


def test_residual_streams_take_few_kernels():
    """20 rounds of Sinkhorn are 6 turns of a loop over one kernel; no stream becomes float32 in memory."""
    program = prefill(1)
    turns = [body for trips, body in program.bodies() if trips == 6]
    assert len(turns) == 2 * 3  # two sublayers of each of three bodies
    for body in turns:
        # The rounds, and the count of turns.
        assert sorted(op for _, _, op, _ in body if op not in NO_KERNEL) == ["fusion", "fusion"]
    streams = re.compile(rf"f32\[{ROWS},4,4096\]")
    assert not [line for body in program.run() for _, shape, _, line in body if streams.search(shape)]


def test_decode_writes_states_in_place():
    """States are read once, decayed in a buffer of the step's requests, and written where they were."""
    program = decode()
    roots = {}
    for name, body in program.instructions.items():
        roots.update((name, op) for _, _, op, line in body if line.lstrip().startswith("ROOT"))
    states, made = re.compile(rf"\[\d+,{SLOTS},"), []
    assert states.search(program.text), "the states are not in the program: nothing is searched"
    for body in program.instructions.values():
        for _, shape, op, line in body:
            called = re.search(r"calls=%?([\w.-]+)", line)
            operation = roots[called[1]] if op == "fusion" and called else op
            if states.search(shape) and operation not in FREE:
                made.append(line.strip()[:200])
    assert made == []
    # Nor are the states of several layers collected to be written later.
    one = (REQUESTS, HEADS, 128, 128)
    assert one in {shape[-4:] for shape in program.shapes()}
    assert not [shape for shape in program.shapes() if shape[-4:] == one and math.prod(shape[:-4]) > 1]
    assert program.temp_bytes < 120e6


def test_decode_runs_the_kernels():
    """Scores, selection, the lists and attention, experts; no loop over blocks."""
    program = decode()
    scopes = ("indexer", "sparse_mla", "mlp")
    assert [len(program.mosaic(scope)) for scope in scopes] == [2, 2, 3 * 2]
    assert not program.loops("linear_attention")
