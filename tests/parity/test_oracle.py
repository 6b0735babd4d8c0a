"""The model in float32 against transformers' answers for every checkpoint of the oracle."""

import jax.numpy as jnp
import numpy as np
import pytest

from dsa_jax.generate import generate
from tests.support import (
    SMALL_PAGES,
    answers,
    assert_selected,
    load_model,
    prompt,
    prompt_names,
    run_prefill,
)

TOLERANCE = 5e-5
FILES = [
    ("glm5", "single"),
    ("glm5", "sharded"),
    ("glm52", "single"),
    ("glm52", "sharded"),
    ("dsv32", "single"),
    ("dsv32", "sharded"),
    ("glm5_fp8", "single"),
]
CASES = [
    (variant, layout, chunk)
    for variant, layout in FILES
    for chunk in ((1, 7, 32, 2048) if layout == "single" else (2048,))
]


@pytest.mark.parametrize(("variant", "layout", "chunk"), CASES)
def test_prefill_equals_the_oracle(variant, layout, chunk):
    """Logits of every row, and every layer's selection, whatever the chunks."""
    model = load_model(variant, layout)
    names = prompt_names(variant)
    result = run_prefill(model, [prompt(variant, name) for name in names], chunk_size=chunk)
    for i, name in enumerate(names):
        np.testing.assert_allclose(result.logits[i], answers(variant)[f"{name}_logits"][0], rtol=0, atol=TOLERANCE)
        assert_selected(result.selected[i], variant, name)


@pytest.mark.quick
def test_wide_prefill_equals_the_oracle():
    """The released models' widths: 512 + 64 latent, 32 index heads of 128, 128 of 517 keys."""
    model = load_model("glm5_wide")
    names = prompt_names("glm5_wide")
    for name in names:
        result = run_prefill(model, [prompt("glm5_wide", name)], chunk_size=256)
        want = answers("glm5_wide")[f"{name}_logits"][0]
        np.testing.assert_allclose(result.logits[0], want, rtol=0, atol=TOLERANCE)
        assert_selected(result.selected[0], "glm5_wide", name)


@pytest.mark.parametrize("variant", ["glm5", "glm52", "dsv32", "glm5_fp8"])
@pytest.mark.parametrize("batch", ["lp", "rp"])
def test_ragged_batch_equals_padded_batch(variant, batch):
    """Rows of a padded batch equal the same prompts in a ragged batch without padding."""
    stored = answers(variant)
    mask = stored[f"{batch}_attention_mask"].astype(bool)
    starts, lengths = mask.argmax(axis=1), mask.sum(axis=1)
    rows = stored[f"{batch}_input_ids"]
    prompts = [rows[r, s : s + n].tolist() for r, (s, n) in enumerate(zip(starts, lengths, strict=True))]
    result = run_prefill(load_model(variant), prompts)
    for r, (s, n) in enumerate(zip(starts, lengths, strict=True)):
        want = stored[f"{batch}_logits"][r, s : s + n]
        np.testing.assert_allclose(result.logits[r], want, rtol=0, atol=TOLERANCE)
        assert_selected(result.selected[r], variant, batch, row=r, first=s)


@pytest.mark.parametrize(
    "variant", [pytest.param("glm5", marks=pytest.mark.quick), "glm52", "dsv32", "glm5_fp8", "glm5_wide"]
)
def test_greedy_tokens_equal_the_oracle(variant):
    """All prompts generate together what each generated alone."""
    stored = answers(variant)
    names = [key.removesuffix("_gen_tokens") for key in stored if key.endswith("_gen_tokens") and key[0] == "s"]
    want = [stored[f"{name}_gen_tokens"][0].tolist() for name in names]
    result = generate(
        load_model(variant),
        [prompt(variant, name) for name in names],
        max_new_tokens=len(want[0]),
        ignore_eos=True,
        engine=SMALL_PAGES,
    )
    assert result.tokens == want


def test_latent_norm_eps_is_what_the_oracle_needs():
    """The other systems' eps moves the logits by more than the tolerance: the option acts."""
    from dsa_jax.api import from_pretrained
    from tests.support import ORACLE

    other = from_pretrained(ORACLE / "glm5" / "single", load_model("glm5").mesh, jnp.float32, latent_norm_eps=1e-5)
    result = run_prefill(other, [prompt("glm5", "s97")], selected=False)
    assert np.abs(result.logits[0] - answers("glm5")["s97_logits"][0]).max() > TOLERANCE
