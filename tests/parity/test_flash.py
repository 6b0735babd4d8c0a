"""GLM-5.3-Flash in float32 against transformers' answers: linear attention, pooled index keys, residual streams."""

import json
import logging

import jax.numpy as jnp
import numpy as np
import pytest

from dsa_jax import generate, make_mesh
from dsa_jax.api import from_pretrained
from dsa_jax.config import ModelConfig
from dsa_jax.engine import EngineOptions
from dsa_jax.segments import plan_segments
from tests.support import FIXTURES, ORACLE, answers, assert_selected, load_model, prompt, prompt_names, run_prefill

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


def test_greedy_tokens_equal_the_oracle():
    """One after another in the same slot, prompts generate what each generated alone: no state is left over."""
    stored = answers(VARIANT)
    names = [name for name in prompt_names(VARIANT) if f"{name}_gen_tokens" in stored]
    result = generate(
        load_model(VARIANT),
        [prompt(VARIANT, name) for name in names],
        max_new_tokens=16,
        ignore_eos=True,
        engine=EngineOptions(page_size=PAGE_SIZE, max_states=1),
    )
    assert result.tokens == [stored[f"{name}_gen_tokens"][0].tolist() for name in names]


def test_sharded_files_load_alike(caplog):
    """The same weights from several files; the vision tower is skipped with one line in the log."""
    with caplog.at_level(logging.INFO, logger="dsa_jax"):
        other = from_pretrained(ORACLE / VARIANT / "sharded", make_mesh(), jnp.float32)
    assert len(caplog.records) == 1 and "model.visual." in caplog.text
    single = load_model(VARIANT)
    for name in ("embed_tokens", "lm_head"):
        np.testing.assert_array_equal(getattr(other, name)[...], getattr(single, name)[...])


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
