"""GLM-5.3-Flash in float32 against transformers' answers: linear attention, pooled index keys, residual streams."""

import dataclasses
import json
import logging

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import dsa_jax.layers.decoder
from dsa_jax import make_mesh
from dsa_jax.api import _check_unread, from_pretrained
from dsa_jax.config import ModelConfig
from dsa_jax.engine import Engine, EngineOptions
from dsa_jax.layers.kpool import PooledIndexer
from dsa_jax.segments import plan_segments
from dsa_jax.step import Execution
from dsa_jax.testing import selected_sets
from dsa_jax.tiny import write_tiny
from tests.model.paged_cases import foreign_cache
from tests.support import (
    FIXTURES,
    ORACLE,
    answers,
    assert_selected,
    load_model,
    prompt,
    prompt_names,
    run_prefill,
    selecting_layers,
)

VARIANT = "glm53_flash"
TOLERANCE = 5e-4
PAGE_SIZE = 128


@pytest.fixture(autouse=True)
def one_program(monkeypatch):
    """One page holds any prompt and one bucket any step: these tests spend their time on compiling."""
    monkeypatch.setattr("dsa_jax.batch.MIN_ROWS", 256)
    monkeypatch.setattr("dsa_jax.batch.MIN_KEYS", 256)


@pytest.mark.parametrize("chunk", [1, pytest.param(3, marks=pytest.mark.quick), 4, 7, 32])
def test_chunks_equal_the_oracle(chunk):
    """Steps begin and end at every place of a pool and of a block, or are one token each."""
    result = run_prefill(load_model(VARIANT), [prompt(VARIANT, "s97")], chunk_size=chunk, page_size=PAGE_SIZE)
    np.testing.assert_allclose(result.logits[0], answers(VARIANT)["s97_logits"][0], rtol=0, atol=TOLERANCE)
    assert_selected(result.selected[0], VARIANT, "s97")


def test_ragged_prompts_equal_the_oracle():
    """All prompts together: those behind the first start anywhere in a step, at rows 1, 8 and 41."""
    names = prompt_names(VARIANT)
    result = run_prefill(load_model(VARIANT), [prompt(VARIANT, n) for n in names], page_size=PAGE_SIZE)
    for i, name in enumerate(names):
        np.testing.assert_allclose(result.logits[i], answers(VARIANT)[f"{name}_logits"][0], rtol=0, atol=TOLERANCE)
        assert_selected(result.selected[i], VARIANT, name)


@pytest.mark.parametrize("batch", ["lp", "rp"])
def test_ragged_batch_equals_padded_batch(batch):
    """Rows of a padded batch equal the same prompts in a ragged batch: pools count from the first real token."""
    stored = answers(VARIANT)
    mask = stored[f"{batch}_attention_mask"].astype(bool)
    starts, lengths = mask.argmax(axis=1), mask.sum(axis=1)
    rows = stored[f"{batch}_input_ids"]
    prompts = [rows[r, s : s + n].tolist() for r, (s, n) in enumerate(zip(starts, lengths, strict=True))]
    # As many as the prompts of the test above, so that both share one program.
    filler = [[1]] * (len(prompt_names(VARIANT)) - len(prompts))
    result = run_prefill(load_model(VARIANT), prompts + filler, page_size=PAGE_SIZE)
    for r, (s, n) in enumerate(zip(starts, lengths, strict=True)):
        np.testing.assert_allclose(result.logits[r], stored[f"{batch}_logits"][r, s : s + n], rtol=0, atol=TOLERANCE)
        assert_selected(result.selected[r], VARIANT, batch, row=r, first=s)


# Tokens of the newest that the rows of each request of the test below lose.
LOST = (1, 2, 3)


def test_without_its_newest_tokens_no_row_passes(monkeypatch):
    """What the tests above would say of rows that lose the end of their list, by a program that really loses it.

    The first three requests lose their newest 1, 2 and 3 tokens in the expansion of the pools; the fourth keeps its
    selection, and attention reads the first `index_topk` columns alone, as a reader would that knows nothing of tails.
    """
    expand, locate = PooledIndexer.expand, dsa_jax.layers.decoder.locate

    def losing(self, selected, context):
        ids = expand(self, selected, context)
        lost = jnp.where(context.requests < len(LOST), context.requests + 1, 0)
        open_tokens = context.visible % self.config.index_kpool
        oldest = context.visible - jnp.minimum(lost, open_tokens)
        return jnp.where(ids < oldest[:, None], ids, -1)

    def blind(ids, context):
        selection = locate(ids, context)
        topk = ids.shape[1] - 3
        seen = jnp.where(context.requests == len(LOST), jnp.minimum(selection.count, topk), selection.count)
        return dataclasses.replace(selection, count=seen)

    monkeypatch.setattr(PooledIndexer, "expand", losing)
    monkeypatch.setattr("dsa_jax.layers.decoder.locate", blind)
    # Bytes that no other test asks for: a program of its own.
    execution = Execution(workspace_bytes=(1 << 30) - 1)
    names = ["s33"] * (len(LOST) + 1)
    result = run_prefill(
        load_model(VARIANT), [prompt(VARIANT, n) for n in names], page_size=PAGE_SIZE, execution=execution
    )
    want = answers(VARIANT)["s33_logits"][0]
    oracle = selected_sets(answers(VARIANT)[f"s33_sel_L{selecting_layers(VARIANT, 's33')[0]}"][0])
    for request in range(len(LOST) + 1):
        wrong = np.abs(result.logits[request] - want).max(axis=1) > TOLERANCE
        first = selected_sets(result.selected[request][0])
        missed = [len(whole - ids) for whole, ids in zip(oracle, first, strict=True)]
        if request < len(LOST):
            assert missed == [min(LOST[request], (t + 1) % 4) for t in range(33)]
            with pytest.raises(AssertionError, match="layer"):
                assert_selected(result.selected[request], VARIANT, "s33")
            assert wrong[:3].all()
        else:
            assert missed == [0] * 33
            # Up to `index_topk` columns a list is whole; the first longer one has lost its newest token.
            assert wrong.argmax() == result.selected[request].shape[2] - 3


def poisoned_engine(states: int) -> Engine:
    """An engine whose pages and states hold NaN."""
    model = load_model(VARIANT)
    engine = Engine(model, 6, EngineOptions(page_size=PAGE_SIZE, max_states=states))
    engine.cache = foreign_cache(model, engine.geometry, 6, requests=states)
    return engine


def test_requests_in_turn_equal_the_oracle(caplog, monkeypatch):
    """Greedy tokens of requests that come one after another into two slots, late ones beside those that decode.

    Requests start in the middle of a step and of a pool, decode completes their pools, and those that end early leave
    their open pool and their state to the next in the slot.
    """
    monkeypatch.setattr("dsa_jax.batch.MIN_REQUESTS", 2)
    stored = answers(VARIANT)
    with caplog.at_level(logging.INFO, logger="dsa_jax"):
        engine = poisoned_engine(states=2)
    assert not engine.prefix_reuse and "do not reuse the pages of a common beginning" in caplog.text
    names = [name for name in prompt_names(VARIANT) if f"{name}_gen_tokens" in stored]
    # (prompt, new tokens): the same prompt twice, whose full pages would be shared if they could.
    wanted = [(name, new) for new in (5, 16) for name in names]
    got: dict[int, list[int]] = {}

    def step() -> None:
        for event in engine.step():
            got.setdefault(event.request, []).append(event.token)

    for name, new in wanted[:-1]:
        engine.add(prompt(VARIANT, name), max_new_tokens=new, ignore_eos=True)
    while engine.waiting:
        step()
        assert len(engine.running) <= 2
    engine.add(prompt(VARIANT, wanted[-1][0]), max_new_tokens=wanted[-1][1], ignore_eos=True)
    while not engine.idle:
        step()
    tokens = [stored[f"{name}_gen_tokens"][0].tolist()[:new] for name, new in wanted]
    assert [got[number] for number in range(len(wanted))] == tokens
    assert sorted(engine.free_slots[0]) == [0, 1]


def test_sharded_files_load_alike(caplog):
    """The same weights from several files; the vision tower is skipped with one line in the log."""
    with caplog.at_level(logging.INFO, logger="dsa_jax"):
        other = from_pretrained(ORACLE / VARIANT / "sharded", make_mesh(), jnp.float32)
    assert len(caplog.records) == 1 and "of the vision tower (model.visual.*)" in caplog.text
    single = load_model(VARIANT)
    for name in ("embed_tokens", "lm_head"):
        np.testing.assert_array_equal(getattr(other, name)[...], getattr(single, name)[...])


def test_what_is_skipped_is_one_line_each(caplog, tmp_path):
    """A tiny checkpoint has a layer of multi-token prediction; with a vision tower beside it there are two lines."""
    write_tiny(tmp_path, "glm53_flash")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    for name in ("model.visual.a.weight", "model.visual.b.weight"):
        index["weight_map"][name] = "vision.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    vision = {name: np.zeros(1, np.float32) for name in ("model.visual.a.weight", "model.visual.b.weight")}
    save_file(vision, tmp_path / "vision.safetensors")
    with caplog.at_level(logging.INFO, logger="dsa_jax"):
        _check_unread(tmp_path, ModelConfig.from_folder(tmp_path))
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2 and "multi-token prediction (layer 5)" in lines[0]
    assert lines[1] == "skipped 2 tensors of the vision tower (model.visual.*)"


def test_linear_heads_must_divide():
    """3 heads of linear attention on 2 ranks are refused with both numbers."""
    with pytest.raises(ValueError, match=r"linear_attn_config\.num_heads=3 must be divisible by tp=2"):
        from_pretrained(ORACLE / VARIANT / "single", make_mesh(tp=2), jnp.float32)


def test_layers_find_their_parts_of_the_cache():
    """The published layers: 3 linear ones, 10 times (sparse, linear x 3), a sparse and a linear one."""
    config = ModelConfig.from_dict(json.loads((FIXTURES / "configs" / "glm-5.3-flash.json").read_text()))
    plan = plan_segments(config)
    assert [(len(segment.pattern), segment.repeats) for segment in plan] == [(1, 3), (4, 10), (1, 1), (1, 1)]
    for segment in plan:
        for repeat in range(segment.repeats):
            for position in range(len(segment.pattern)):
                layer, place = segment.layer(position, repeat), segment.place(position, repeat)
                sparse = sum(other < layer for other in config.sparse_layers)
                assert (place.ckv, place.index_keys, place.state) == (sparse, sparse, layer - sparse)
