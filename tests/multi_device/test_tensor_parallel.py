"""The model over 2, 4 and 8 devices against the oracle, whose answers come from one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from dsa_jax import from_pretrained, generate, make_mesh
from tests.support import (
    ORACLE,
    SMALL_PAGES,
    answers,
    assert_selected,
    load_model,
    prompt,
    prompt_names,
    run_prefill,
)

TOLERANCE = 5e-5
# Each family and each size once; (data, tp).
CASES = [
    ("glm5_tp8", 1, 8),
    ("glm52_tp8", 1, 8),
    ("dsv32_tp8", 1, 8),
    ("glm5_tp8", 1, 2),
    ("dsv32_tp8", 1, 4),
    ("glm52_tp8", 2, 4),
    # 6 experts on 4 ranks, a vocabulary of 199, an intermediate size of 136 // 8 heads: padded
    ("glm52", 1, 4),
    ("glm5_fp8", 1, 4),
    ("glm5_wide", 1, 8),
]


def check(model, variant: str) -> None:
    """Logits within the tolerance, selections and greedy tokens exactly."""
    stored = answers(variant)
    names = prompt_names(variant)
    prompts = [prompt(variant, name) for name in names]
    result = run_prefill(model, prompts, chunk_size=256)
    for i, name in enumerate(names):
        np.testing.assert_allclose(result.logits[i], stored[f"{name}_logits"][0], rtol=0, atol=TOLERANCE)
        assert_selected(result.selected[i], variant, name)
    generated = [i for i, name in enumerate(names) if f"{name}_gen_tokens" in stored]
    want = [stored[f"{names[i]}_gen_tokens"][0].tolist() for i in generated]
    got = generate(
        model, [prompts[i] for i in generated], max_new_tokens=len(want[0]), ignore_eos=True, engine=SMALL_PAGES
    )
    assert got.tokens == want


@pytest.mark.parametrize(("variant", "data", "tp"), [pytest.param(*CASES[0], marks=pytest.mark.quick), *CASES[1:]])
def test_meshes_equal_the_oracle(variant, data, tp):
    """Any split of the ranks gives one device's answers."""
    check(load_model(variant, data=data, tp=tp), variant)


def test_explicit_user_mesh():
    """A mesh that the user made, with axes of type Explicit."""
    mesh = Mesh(
        np.array(jax.devices()).reshape(1, 8, 1), ("data", "qsplit", "dcp"), axis_types=(AxisType.Explicit,) * 3
    )
    check(from_pretrained(ORACLE / "dsv32_tp8" / "single", mesh, jnp.float32), "dsv32_tp8")


def test_heads_must_divide():
    """4 heads on 8 ranks are refused with both numbers."""
    with pytest.raises(ValueError, match=r"num_attention_heads=4 must be divisible by tp=8"):
        from_pretrained(ORACLE / "glm5" / "single", make_mesh(tp=8), jnp.float32)


def test_mesh_needs_the_axes():
    """Another mesh is refused by its axes."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    with pytest.raises(ValueError, match=r"mesh must have the axes .*got \('x',\)"):
        from_pretrained(ORACLE / "glm5_tp8" / "single", mesh)
