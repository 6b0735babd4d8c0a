"""A multi-device test to copy: your settings on every mesh against one device."""

import numpy as np
import pytest

import dsa_jax
from dsa_jax.testing import assert_same_prefill, mesh_shapes, place_model, tiny_model, users_mesh

# k is 16 in the tiny models: prompts must be far longer, or every row selects all it sees.
PROMPTS = [np.random.default_rng(i).integers(0, 256, n).tolist() for i, n in enumerate((50, 3))]


def prefill(model, policy):
    """Logits and selections of all rows."""
    batch = dsa_jax.Batch.from_prompts(PROMPTS, model)
    runner = dsa_jax.StepRunner(model, dsa_jax.Execution(policy=policy))
    return dsa_jax.prefill(runner, batch, batch.init_cache(model), logits="all", return_selected=True)


@pytest.fixture(scope="module")
def one_device():
    """A model on one device and what it computes there."""
    model = tiny_model("glm52", users_mesh(1, 1, 1))
    return model, prefill(model, dsa_jax.PrefillPolicy.stock())


@pytest.mark.parametrize(("qsplit", "dcp"), mesh_shapes(4))
def test_every_mesh_equals_one_device(one_device, qsplit, dcp):
    """Selections exactly, logits to rounding, on the path that is asked for."""
    model, want = one_device
    policy = dsa_jax.PrefillPolicy(query_split=True, ckv_gather=True, token_split=True)
    assert_same_prefill(prefill(place_model(model, users_mesh(1, qsplit, dcp)), policy), want)
