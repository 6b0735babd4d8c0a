"""Experts that are sent their rows give the oracle's answers, as experts that serve all rows do."""

import numpy as np
import pytest

from dsa_jax.step import Execution
from tests.support import answers, assert_selected, load_model, prompt, prompt_names, run_prefill


# 6 experts on 4 ranks: padded; 8 ranks that share one cache.
@pytest.mark.parametrize(("variant", "tp", "dcp"), [("glm52", 4, 1), ("dsv32_tp8", 8, 8)])
def test_exchange_equals_the_oracle(variant, tp, dcp):
    """Two prompts in one step, so that rows of both and padding are exchanged."""
    names = prompt_names(variant)[-2:]
    prompts = [prompt(variant, name) for name in names]
    model = load_model(variant, tp=tp, dcp=dcp)
    got = run_prefill(model, prompts, execution=Execution(expert_exchange=True))
    for i, name in enumerate(names):
        np.testing.assert_allclose(got.logits[i], answers(variant)[f"{name}_logits"][0], rtol=0, atol=5e-5)
        assert_selected(got.selected[i], variant, name)
