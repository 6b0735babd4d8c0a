"""Weights kept in FP8: the same values as dequantised ones, in half the memory, on every mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsa_jax.api import convert, from_pretrained
from dsa_jax.fp8_weights import published_fp8
from dsa_jax.model import parameter_specs
from sharding.mesh import make_mesh
from tests.support import ORACLE, answers, assert_selected, load_model, prompt, prompt_names, run_prefill

FOLDER = ORACLE / "glm5_fp8" / "single"


def parameters(model) -> dict[str, jax.Array]:
    """The model's arrays by name."""
    return {".".join(map(str, path)): v[...] for path, v in nnx.to_flat_state(nnx.state(model, nnx.Param))}


def bytes_of(model) -> int:
    """Bytes of the model's parameters."""
    return sum(x.nbytes for x in parameters(model).values())


def test_equals_the_dequantised_model():
    """In float32 nothing is rounded: the oracle's logits and selections, from FP8 weights.

    On four ranks, most of whose shares begin inside a block.
    """
    model = from_pretrained(FOLDER, make_mesh(tp=4, dcp=2), jnp.float32, weights="fp8")
    name = prompt_names("glm5_fp8")[2]
    got = run_prefill(model, [prompt("glm5_fp8", name)])
    np.testing.assert_allclose(got.logits[0], answers("glm5_fp8")[f"{name}_logits"][0], atol=5e-5, rtol=0)
    assert_selected(got.selected[0], "glm5_fp8", name)


def test_stays_fp8_on_the_device():
    """Every tensor that is FP8 in the files is FP8 on the device, and nothing else is."""
    model = from_pretrained(FOLDER, make_mesh(), jnp.bfloat16)
    arrays, specs = parameters(model), parameter_specs(model)
    for name, spec in specs.items():
        kept = all(published_fp8(source.name) for source in spec.sources)
        scale = name.endswith("_scale_inv")
        want = jnp.float32 if scale else jnp.float8_e4m3fn if kept else (spec.dtype or jnp.bfloat16)
        assert arrays[name].dtype == want, name
    dense = from_pretrained(FOLDER, make_mesh(), jnp.bfloat16, weights="dequantized")
    kept = sum(x.size for x in arrays.values() if x.dtype == jnp.float8_e4m3fn)
    scales = sum(arrays[name].nbytes for name in arrays if name.endswith("_scale_inv"))
    assert bytes_of(dense) - bytes_of(model) == kept - scales
    assert kept > 0.5 * sum(x.size for x in parameters(dense).values())


def test_error_against_float32():
    """bfloat16 runs lose no more with weights kept in FP8 than with weights dequantised to bfloat16.

    The prompt is shorter than the selection: in bfloat16 near ties are selected otherwise.
    """
    name = prompt_names("glm5_fp8")[1]
    tokens = prompt("glm5_fp8", name)
    want = run_prefill(load_model("glm5_fp8"), [tokens], selected=False).logits[0]
    errors = {}
    for weights in ("fp8", "dequantized"):
        model = from_pretrained(FOLDER, make_mesh(), jnp.bfloat16, weights=weights)
        got = run_prefill(model, [tokens], selected=False).logits[0]
        errors[weights] = np.sqrt(np.mean((got - want) ** 2)) / np.sqrt(np.mean(want**2))
    # Both round a weight once to bfloat16; the compiler may only order a float32 sum differently.
    assert errors["fp8"] < 0.02, errors
    assert errors["fp8"] <= 1.05 * errors["dequantized"], errors


def test_native_checkpoint_keeps_fp8(tmp_path):
    """Converted with FP8 weights, a checkpoint loads them onto another mesh bit for bit."""
    convert(FOLDER, tmp_path / "native", weights="fp8")
    want = parameters(from_pretrained(FOLDER, make_mesh(tp=2), jnp.bfloat16))
    got = parameters(from_pretrained(tmp_path / "native", make_mesh(tp=2), jnp.bfloat16))
    assert got.keys() == want.keys()
    for name in want:
        assert got[name].dtype == want[name].dtype, name
        np.testing.assert_array_equal(
            np.asarray(got[name]).view(np.uint8), np.asarray(want[name]).view(np.uint8), err_msg=name
        )
    with pytest.raises(ValueError, match="was converted with FP8"):
        from_pretrained(tmp_path / "native", make_mesh(), weights="dequantized")


def test_refused():
    """Choices that the checkpoint cannot serve."""
    with pytest.raises(ValueError, match="holds no FP8"):
        from_pretrained(ORACLE / "glm5" / "single", make_mesh(), weights="fp8")
    with pytest.raises(ValueError, match="weights must be one of"):
        from_pretrained(FOLDER, make_mesh(), weights="int4")  # pyright: ignore[reportArgumentType]
