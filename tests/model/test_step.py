"""The jitted step: its memory, its donation, its programs, and prefill against decode."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsa_jax import Batch, Execution, SamplingConfig, StepRunner, generate, make_mesh
from dsa_jax.batch import build_step
from dsa_jax.cache import cache_shapes, init_cache
from dsa_jax.config import ModelConfig
from dsa_jax.generate import GenerateOptions, make_engine
from dsa_jax.model import abstract_model, parameter_specs
from dsa_jax.prefill import prefill
from dsa_jax.step import compile_step
from tests.support import ORACLE, SMALL_PAGES, geometry, load_model, prompt, run_prefill


def compiled_step(model, batch, *, workspace: int = 1 << 30):
    """The compiled step over all pending tokens of a batch, and its step."""
    step = build_step(batch.requests, batch.geometry, groups=1, chunk_size=1 << 20)
    inputs, options = StepRunner(model, Execution(workspace_bytes=workspace)).prepare(step, batch.geometry)
    cache = cache_shapes(model.config, batch.geometry, batch.pages, model.mesh)
    return compile_step(model, inputs, cache, options), step


def temporary_bytes(tokens: int, workspace: int) -> int:
    """Temporaries of the compiled step that prefills one prompt of `tokens` tokens at once."""
    model = load_model("glm52")
    batch = Batch.from_prompts([[1] * tokens], model, geometry=geometry(model))
    compiled, _ = compiled_step(model, batch, workspace=workspace)
    return compiled.memory_analysis().temp_size_in_bytes


def test_memory_grows_with_tokens_not_with_their_square():
    """8 times the rows and keys take at most about 8 times the temporaries; a [T, S] array would take 64 times."""
    short, long = temporary_bytes(512, 1 << 18), temporary_bytes(4096, 1 << 18)
    assert long <= 9 * short
    # and the longer one stays below a single float32 [T, S]
    assert long < 4096 * 4096 * 4


def test_workspace_bounds_the_temporaries():
    """A larger workspace is used: the option acts."""
    assert temporary_bytes(512, 1 << 26) > 2 * temporary_bytes(512, 1 << 18)


@pytest.mark.parametrize("pending", [1, 512])
def test_decoding_reads_the_selected_records_only(pending):
    """A decode step makes no buffer of the history's records; a chunk does."""
    model = load_model("glm52")
    batch = Batch.from_prompts([[1] * 1024], model, geometry=geometry(model))
    batch.requests[0].cached = 1024 - pending
    compiled, step = compiled_step(model, batch)
    buffer = f"f32[{step.ckv_rows},{batch.geometry.ckv.record_width}]"
    assert (buffer in compiled.as_text()) == (pending > 1)


@pytest.mark.quick
def test_decode_equals_one_shot_prefill():
    """Feeding a prompt token by token gives the logits and the selections of prefilling it at once."""
    model = load_model("glm52")
    tokens = prompt("glm52", "s33")
    whole = run_prefill(model, [tokens])
    batch = Batch.from_prompts([tokens[:20]], model, max_new_tokens=13, geometry=geometry(model))
    runner = StepRunner(model)
    result = prefill(runner, batch, batch.init_cache(model), logits="all", return_selected=True)
    logits, selected = [result.logits[0]], [result.selected[0]]
    for token in tokens[20:]:
        batch.requests[0].append(token)
        result = prefill(runner, batch, result.cache, logits="all", return_selected=True)
        logits.append(result.logits[0])
        selected.append(result.selected[0])
    np.testing.assert_allclose(np.concatenate(logits), whole.logits[0], rtol=0, atol=2e-5)
    np.testing.assert_array_equal(np.sort(np.concatenate(selected, axis=1)), np.sort(whole.selected[0]))


def test_cache_is_donated_and_written_in_place():
    """The step aliases the whole cache, and the donated one is gone."""
    model = load_model("glm5")
    batch = Batch.from_prompts([prompt("glm5", "s7")], model, geometry=geometry(model))
    cache = batch.init_cache(model)
    compiled, step = compiled_step(model, batch)
    assert compiled.memory_analysis().alias_size_in_bytes >= cache.ckv.nbytes + cache.index_keys.nbytes
    StepRunner(model)(step, cache)
    assert cache.ckv.is_deleted() and cache.index_keys.is_deleted()


def test_step_writes_only_its_slots():
    """Pages of other requests, page 0 among them, stay as they were."""
    model = load_model("glm5")
    tokens = prompt("glm5", "s7")
    batch = Batch.from_prompts([tokens], model, geometry=geometry(model))
    batch.requests[0].pages = np.array([2])
    empty = init_cache(model.config, batch.geometry, 4, model.mesh)
    filled = jax.tree.map(lambda x: jnp.full(x.shape, 7, x.dtype), empty)
    step = build_step(batch.requests, batch.geometry, groups=1, chunk_size=64)
    cache = StepRunner(model)(step, filled).cache
    for pages in (np.asarray(cache.ckv), np.asarray(cache.index_keys)):
        assert (pages[:, [0, 1, 3]] == 7).all()
        assert (pages[:, 2, len(tokens) :] == 7).all()
        assert not (pages[:, 2, : len(tokens)] == 7).any()


def test_decode_compiles_once():
    """A growing request keeps one program: steps after the first decode step compile nothing."""
    model = load_model("glm5")
    options = GenerateOptions(max_new_tokens=64, ignore_eos=True, engine=SMALL_PAGES)
    engine = make_engine(model, [prompt("glm5", "s33")], options)
    engine.step(), engine.step()
    spent = engine.runner.compile_seconds
    for _ in range(60):
        engine.step()
    assert engine.running[0].drawn == 62
    assert engine.runner.compile_seconds - spent < 0.5


def test_index_sharing_builds_no_indexer():
    """Shared layers have no indexer parameters and no index cache."""
    config = ModelConfig.from_folder(ORACLE / "glm52" / "single")
    model = abstract_model(config, make_mesh())
    sources = [s for name, spec in parameter_specs(model).items() if ".indexer." in name for s in spec.sources]
    assert {source.name.split(".")[2] for source in sources} == {"0", "1", "4"}
    cache = cache_shapes(config, geometry(load_model("glm52")), 1, make_mesh())
    assert cache.index_keys.shape[0] == 3 and cache.ckv.shape[0] == 6


def test_seeded_sampling_repeats_and_seeds_differ():
    """The same seed draws the same tokens alone and in a batch; another seed draws others."""
    model = load_model("glm5")
    a, b = prompt("glm5", "s33"), prompt("glm5", "s7")
    options = {"max_new_tokens": 12, "ignore_eos": True, "engine": SMALL_PAGES}
    alone = generate(model, [a], sampling=SamplingConfig(temperature=1.0, seed=5), **options).tokens[0]
    both = generate(model, [a, b], sampling=SamplingConfig(temperature=1.0, seed=5), **options).tokens
    other = generate(model, [a], sampling=SamplingConfig(temperature=1.0, seed=6), **options).tokens[0]
    assert alone == both[0]
    assert alone != other


def test_eos_ends_a_request(monkeypatch):
    """Generation stops behind an end-of-sequence token, which is returned; the others go on."""
    model = load_model("glm5")
    a, b = prompt("glm5", "s33"), prompt("glm5", "s7")
    free = generate(model, [a, b], max_new_tokens=8, ignore_eos=True, engine=SMALL_PAGES).tokens
    eos = free[0][2]
    monkeypatch.setattr(model, "config", dataclasses.replace(model.config, eos_token_ids=(eos,)))
    stopped = generate(model, [a, b], max_new_tokens=8, engine=SMALL_PAGES)
    for got, want in zip(stopped.tokens, free, strict=True):
        assert got == (want[: want.index(eos) + 1] if eos in want else want)
    assert stopped.finished[0] == "eos"
