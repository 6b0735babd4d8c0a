"""The compiled step reads the cache where it is and writes it in place: nothing of a cache's size is made.

The alias figure of `memory_analysis` looks the same with and without copies: what counts is the program itself, and
that the temporaries do not grow with the cache.
"""

import dataclasses
import math
import re

import jax
import numpy as np
import pytest

from dsa_jax.batch import Request, build_step
from dsa_jax.cache import PagedCache, cache_shapes
from dsa_jax.config import ModelConfig
from dsa_jax.gpu_target import H200, target_devices
from dsa_jax.plan import PlanOptions, abstract_step
from dsa_jax.plan_compile import compile_abstract_step
from dsa_jax.step import Execution, StepRunner, compile_step
from sharding.mesh import DCP, make_mesh
from sharding.policy import PrefillPolicy
from tests.lowering.topology import require_cuda_plugin
from tests.support import ORACLE, geometry, load_model

PAGES = 4099  # a prime that no other dimension of a step has
# What an array of a cache's size may come from: it is named, handed on, viewed, or written in place.
FREE = {"parameter", "get-tuple-element", "tuple", "bitcast", "while", "scatter", "optimization-barrier"}
_RESULT = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*)$")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{$")


def makers_of_cache_sized_arrays(text: str) -> list[str]:
    """Instructions of a compiled program that make an array with a dimension of `PAGES` other than in place."""
    roots, computation, found = {}, "", []
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            computation = header[1]
        elif (result := _RESULT.match(line)) and line.lstrip().startswith("ROOT"):
            roots[computation] = result[3]
    for line in text.splitlines():
        result = _RESULT.match(line)
        if result is None or not re.search(rf"[\[,]{PAGES}[\],]", result[2]):
            continue
        called = re.search(r"calls=%?([\w.-]+)", line)
        operation = roots[called[1]] if result[3] == "fusion" and called else result[3]
        if operation not in FREE:
            found.append(line.strip()[:200])
    return found


def rank_bytes(cache: PagedCache) -> int:
    """Bytes of the smaller of the two caches on one rank."""
    return min(math.prod(x.shape) * x.dtype.itemsize for x in (cache.ckv, cache.index_keys)) // cache.geometry.dcp


def assert_cache_stays(compiled: jax.stages.Compiled, cache: PagedCache) -> None:
    """No array of the cache's size, temporaries far below it, and all of it aliased."""
    text = compiled.as_text()
    assert re.search(rf"[\[,]{PAGES},", text), "the cache is not in the program: the search would find nothing"
    assert makers_of_cache_sized_arrays(text) == []
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < rank_bytes(cache)
    whole = sum(math.prod(x.shape) * x.dtype.itemsize for x in (cache.ckv, cache.index_keys))
    assert memory.alias_size_in_bytes >= whole // cache.geometry.dcp


def test_the_search_finds_copies():
    """A step that copies is told from one that does not."""
    text = f"""
%fused (p: f32[2,{PAGES},4]) -> f32[2,{PAGES},4] {{
  ROOT %scatter.1 = f32[2,{PAGES},4]{{2,1,0}} scatter(%p, %i, %u), to_apply=%add
}}
%view (p: u8[2,{PAGES},16]) -> u32[2,{PAGES},4] {{
  ROOT %or.1 = u32[2,{PAGES},4]{{2,1,0}} or(%a, %b)
}}
ENTRY %main (c: f32[2,{PAGES},4]) -> (f32[2,{PAGES},4], s32[3]) {{
  %c = f32[2,{PAGES},4]{{2,1,0}} parameter(0)
  %good = f32[2,{PAGES},4]{{2,1,0}} fusion(%c, %i, %u), kind=kInput, calls=%fused
  %bad.1 = f32[2,{PAGES},4]{{2,1,0}} copy(%c)
  %bad.2 = u32[2,{PAGES},4]{{2,1,0}} fusion(%c), kind=kLoop, calls=%view
  %small = f32[2,8,4]{{2,1,0}} copy(%d)
  ROOT %tuple.1 = (f32[2,{PAGES},4]{{2,1,0}}, s32[3]{{0}}) tuple(%good, %e)
}}
"""
    found = [line.split(" ")[0] for line in makers_of_cache_sized_arrays(text) if not line.startswith("ROOT")]
    assert found == ["%bad.1", "%bad.2"]


@pytest.mark.parametrize(("kv_format", "index_format"), [("float32", "float32"), ("fp8_ds_mla", "fp8")])
def test_cache_is_not_copied_on_cpus(kv_format, index_format):
    """A checkpoint whose layers run in one loop; XLA's CPU backend copies a cache that several loops read."""
    model = load_model("glm5_wide")
    pages = geometry(model, kv_format=kv_format, index_format=index_format)
    request = Request(np.ones(40, np.int64), np.arange(3))
    step = build_step([request], pages, groups=1, chunk_size=64)
    assert step is not None
    inputs, options = StepRunner(model, Execution(workspace_bytes=1 << 18)).prepare(step, pages)
    cache = cache_shapes(model.config, pages, PAGES, model.mesh)
    assert_cache_stays(compile_step(model, inputs, cache, options), cache)


@pytest.fixture
def compiled_anew():
    """Programs for devices that are not there are kept out of the compilation cache."""
    previous = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", previous)


GATHERED = PrefillPolicy(ckv_gather=True, prefetch=True)


@pytest.mark.aot
@require_cuda_plugin
@pytest.mark.parametrize(
    ("checkpoint", "dcp", "policy", "formats"),
    [
        ("glm52_tp8", 1, PrefillPolicy(), {"dtype": "float32"}),
        ("glm5_wide", 4, GATHERED, {"kv_format": "fp8_ds_mla", "index_format": "fp8"}),
        ("glm5_wide", 2, PrefillPolicy.stock(), {"kv_format": "nvfp4_ds_mla"}),
    ],
)
def test_cache_is_not_copied_on_eight_gpus(checkpoint, dcp, policy, formats, compiled_anew):
    """One rank's program of eight H200s: local pages, gathered history a layer ahead, and the stock path."""
    config = ModelConfig.from_folder(ORACLE / checkpoint / "single")
    execution = Execution(policy=policy, implementation="reference", workspace_bytes=1 << 20)
    options = PlanOptions(tp=8, dcp=dcp, context=1024, chunk_size=128, page_size=16, execution=execution, **formats)
    mesh = make_mesh(tp=8, dcp=dcp, devices=target_devices(H200, 8))
    assert mesh.shape[DCP] == dcp
    step = abstract_step(config, options, mesh)
    cache = cache_shapes(config, step.cache.geometry, PAGES, mesh)
    assert step.options.decision.prefetch == (policy is GATHERED)
    assert_cache_stays(compile_abstract_step(dataclasses.replace(step, cache=cache), H200), cache)
