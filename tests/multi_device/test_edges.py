"""What is rare in the model over 8 devices: shards without keys, scores that are NaN, selections without a merge."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

from dsa_jax.batch import build_step
from dsa_jax.model import Model
from dsa_jax.prefill import Batch, prefill
from dsa_jax.step import Execution, StepRunner
from dsa_jax.testing import users_mesh
from sharding.mesh import DCP
from sharding.policy import PrefillPolicy
from tests.model.paged_cases import bytes_of, foreign_cache, paged_batch
from tests.multi_device.scenario import DEFAULT_TOLERANCE, compare_selections, known, placed_model
from tests.multi_device.test_paths import pad_alike
from tests.support import geometry, prompt, run_prefill

AUTO = AxisType.Auto
STOCK = PrefillPolicy.stock()
GATHER = PrefillPolicy(
    query_split=True, ckv_gather=True, prefetch=True, token_split=True, merge="owner", partition="contiguous"
)


def assert_oracle(result, variant: str, prompts: list[tuple[str, int]]) -> None:
    """Logits and selections of beginnings of the oracle's prompts."""
    for i, (name, length) in enumerate(prompts):
        want = known(variant, name)
        np.testing.assert_allclose(result.logits[i], want.logits[:length], rtol=0, atol=DEFAULT_TOLERANCE)
        compare_selections(result.selected[i], range(length), want)


@pytest.mark.parametrize("policy", [STOCK, GATHER], ids=["stock", "gather"])
def test_fewer_tokens_than_ranks(policy, monkeypatch):
    """Most of 8 ranks hold no key, of the step or of a request; they take part all the same."""
    pad_alike(monkeypatch, rows=8)
    variant = "dsv32_tp8"
    model = placed_model(variant, users_mesh(1, 1, 8, AUTO))
    for lengths in ([("s97", 1)], [("s7", 3), ("s33", 2), ("s97", 1)], [("s33", 7), ("s97", 5)]):
        prompts = [prompt(variant, name)[:length] for name, length in lengths]
        batch = Batch.from_prompts(prompts, model, geometry=geometry(model))
        batch.pages = 4
        runner = StepRunner(model, Execution(policy))
        result = prefill(runner, batch, batch.init_cache(model), chunk_size=3, logits="all", return_selected=True)
        assert_oracle(result, variant, lengths)


@pytest.mark.parametrize("policy", [STOCK, GATHER], ids=["stock", "gather"])
def test_foreign_pages_stay_as_they_are(policy, monkeypatch):
    """Pages drawn at random out of NaN bytes, page 0 not among them: no rank writes any other page, nor reads one."""
    pad_alike(monkeypatch, rows=64)
    variant, names = "glm52_tp8", ["s7", "s97", "s33"]
    model = placed_model(variant, users_mesh(1, 2, 4, AUTO))
    pages = geometry(model, page_size=16)
    batch = paged_batch(model, [prompt(variant, name) for name in names], pages, seed=2)
    runner, cache = StepRunner(model, Execution(policy)), foreign_cache(model, pages, batch.pages)
    result = prefill(runner, batch, cache, chunk_size=40, logits="all", return_selected=True)
    assert_oracle(result, variant, [(name, len(prompt(variant, name))) for name in names])
    written = {p for r in batch.requests for p in r.pages[: -(-len(r.tokens) // pages.tokens_per_page)].tolist()}
    foreign = [page for page in range(batch.pages) if page not in written]
    assert 0 in foreign
    for array in (result.cache.ckv, result.cache.index_keys):
        assert (bytes_of(array)[:, foreign] == 0xFF).all()


def test_a_step_reads_the_cache_it_is_given(monkeypatch):
    """Two batches take turns in one program: what is gathered ahead comes from the cache that the step is given."""
    pad_alike(monkeypatch, rows=8)
    variant = "dsv32_tp8"
    model = placed_model(variant, users_mesh(1, 1, 8, AUTO))
    runner = StepRunner(model, Execution(GATHER))
    names, batches, caches = ["s33", "s97"], [], []
    for name in names:
        batch = Batch.from_prompts([prompt(variant, name)[:6]], model, geometry=geometry(model), max_new_tokens=9)
        batch.pages = 4
        batches.append(batch)
        caches.append(batch.init_cache(model))
    for length in (6, 10, 15):
        for i, name in enumerate(names):
            request = batches[i].requests[0]
            request.tokens = np.array(prompt(variant, name)[:length])
            done = request.cached
            result = prefill(runner, batches[i], caches[i], logits="all", return_selected=True)
            caches[i] = result.cache
            want = known(variant, name)
            np.testing.assert_allclose(result.logits[0], want.logits[done:length], rtol=0, atol=DEFAULT_TOLERANCE)
            compare_selections(result.selected[0], range(done, length), want)


def with_index_weights(model: Model, value: float) -> Model:
    """The model with every weight of the indexer's heads replaced."""
    graphdef, state = nnx.split(model)
    flat = [
        (path, variable.replace(jnp.full_like(variable[...], value)) if "weights_proj" in path else variable)
        for path, variable in nnx.to_flat_state(state)
    ]
    assert any("weights_proj" in path for path, _ in flat)
    return nnx.merge(graphdef, nnx.from_flat_state(flat))


def test_scores_that_are_nan_or_equal_select_the_lowest_ids():
    """NaN scores rank alike, and so do zeros: every rank of every path takes the first keys of the row."""
    variant = "glm52_tp8"
    model = placed_model(variant, users_mesh(1, 2, 4, AUTO))
    prompts = [prompt(variant, "s33"), prompt(variant, "s7")]
    top_k = model.config.indexer.topk
    for value in (np.nan, 0.0):
        policy = dataclasses.replace(GATHER, ckv_gather=False, prefetch=False, merge="replicated")
        result = run_prefill(with_index_weights(model, value), prompts, execution=Execution(policy))
        for tokens, selected, logits in zip(prompts, result.selected, result.logits, strict=True):
            for row in range(len(tokens)):
                valid = min(top_k, row + 1)
                first = np.broadcast_to(np.arange(valid), (selected.shape[0], valid))
                np.testing.assert_array_equal(np.sort(selected[:, row, :valid]), first)
                assert (selected[:, row, valid:] == -1).all()
            assert np.isfinite(logits).all()


def test_union_adds_keys_and_takes_none():
    """Without a merge a rank attends to its own best keys: all of the exact selection, and more, but nothing else."""
    variant, interleave = "glm52_tp8", 4
    model = placed_model(variant, users_mesh(1, 2, 4, AUTO))
    names = ["s7", "s33"]
    batch = Batch.from_prompts([prompt(variant, n) for n in names], model, geometry=geometry(model, interleave=4))
    runner = StepRunner(model, Execution(dataclasses.replace(STOCK, merge="union", query_split=True)))
    step = build_step(batch.requests, batch.geometry, groups=1, chunk_size=64, logits="all")
    outputs = runner(step, batch.init_cache(model), return_selected=True)
    ranks, dcp = {}, model.mesh.shape[DCP]
    for shard in outputs.selected.addressable_shards:
        _, _, rank = (int(x[0]) for x in np.nonzero(model.mesh.devices == shard.device))
        ranks.setdefault(rank, []).append(np.asarray(shard.data))
    logits = np.asarray(outputs.logits)
    for copies in ranks.values():
        np.testing.assert_array_equal(*copies, "ranks with the same keys differ")
    for piece, name in zip(step.pieces, names, strict=True):
        want = known(variant, name)
        for layer in range(model.config.num_layers):
            for row in range(piece.count):
                union = set()
                for rank, (ids, _) in ranks.items():
                    line = ids[layer, piece.first_row + row]
                    own = [t for t in range(row + 1) if t // interleave % dcp == rank]
                    valid = min(len(own), len(line))
                    assert set(line[:valid]) <= set(own) and len(set(line[:valid])) == valid
                    assert (line[valid:] == -1).all()
                    union |= set(line[:valid].tolist())
                # Behind the first layers the residual stream is another, and with it the exact selection.
                assert layer > 0 or union >= want.selected[layer][row]
        few = min(piece.count, model.config.indexer.topk)
        got = logits[piece.first_row : piece.first_row + few, : want.logits.shape[1]]
        np.testing.assert_allclose(got, want.logits[:few], rtol=0, atol=DEFAULT_TOLERANCE)
    # s33 has rows that attend to more keys than the exact selection: the mode acts.
    last = logits[step.pieces[1].first_row + 32, :208]
    assert np.isfinite(logits).all() and np.abs(last - known(variant, "s33").logits[32]).max() > DEFAULT_TOLERANCE


def test_data_groups_never_mix():
    """Two groups with prompts of one length: exchanging the prompts exchanges the answers, to the bit."""
    variant = "glm5_tp8"
    model = placed_model(variant, users_mesh(2, 2, 2, AUTO))
    lengths = [("s33", 33), ("s97", 33)]
    prompts = [prompt(variant, name)[:length] for name, length in lengths]
    policy = dataclasses.replace(GATHER, partition="balanced")
    orders = (prompts, prompts[::-1])
    results = [run_prefill(model, order, execution=Execution(policy), chunk_size=11) for order in orders]
    assert_oracle(results[0], variant, lengths)
    for i in range(2):
        np.testing.assert_array_equal(results[0].logits[i], results[1].logits[1 - i])
        np.testing.assert_array_equal(results[0].selected[i], results[1].selected[1 - i])
    for array in jax.tree.leaves(results[0].cache):
        halves = np.split(np.asarray(array), 2, axis=1)
        assert not np.array_equal(*halves)
