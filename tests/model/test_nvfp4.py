"""NVFP4 checkpoints: their values to the last bit, as real values and as block FP8, and clear errors."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from dsa_jax import api
from dsa_jax.api import convert, from_pretrained
from dsa_jax.checkpoint import CheckpointError, describe, load_safetensors
from dsa_jax.config import ModelConfig
from dsa_jax.model import parameter_specs
from dsa_jax.params import ParamSpec, Source
from dsa_jax.quantization import Nvfp4, Nvfp4BlockScales, Nvfp4ToFp8, nvfp4_products
from sharding.mesh import make_mesh
from tests.model.checkpoint_cases import NAMES, bits, read_tensors, write_file
from tests.model.nvfp4_cases import E2M1, E4M3, dequantize, quantize, to_fp8, write_nvfp4
from tests.model.test_fp8_weights import parameters
from tests.support import ORACLE, answers, prompt, prompt_names, run_prefill

VARIANT = "glm5_tp8"
BLOCK = (128, 128)
NAMES[np.dtype(np.uint8)] = "U8"


def is_quantized(name: str) -> bool:
    """The experts, as in the published checkpoints, and a projection that is split by columns."""
    return ".experts." in name or name.endswith("o_proj.weight")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A small NVFP4 checkpoint, and its codes and scales by name."""
    folder = tmp_path_factory.mktemp("nvfp4") / "checkpoint"
    return folder, write_nvfp4(ORACLE / VARIANT / "single", folder, is_quantized)


@pytest.fixture(scope="module")
def fp8_model(checkpoint):
    """The checkpoint in float32, its NVFP4 weights as block FP8, on one device."""
    return from_pretrained(checkpoint[0], make_mesh(), jnp.float32, weights="fp8")


def error(x, y) -> float:
    """Root mean square of the difference over that of `y`."""
    return float(np.linalg.norm(x - y) / np.linalg.norm(y))


def random_codes(rows: int, columns: int, seed: int = 0):
    """Every code, and scales of many sizes."""
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 256, (rows, columns // 2), dtype=np.uint8)
    scale = rng.integers(1, 0x7F, (rows, columns // 16), dtype=np.uint8).view(E4M3)
    return packed, scale, np.float32(rng.uniform(1e-5, 1e-3)).reshape(())


@pytest.mark.quick
@pytest.mark.parametrize(("rows", "columns"), [(256, 384), (130, 144), (3, 16)])
def test_values_equal_numpy_bit_for_bit(rows, columns):
    packed, scale, whole = random_codes(rows, columns)
    scales = (jnp.asarray(scale), jnp.asarray(whole).reshape(1))
    real = jax.jit(lambda x: Nvfp4().decode(x, scales, (0, 0)))(packed)
    np.testing.assert_array_equal(bits(real), bits(dequantize(packed, scale, whole)))
    values, factors = to_fp8(packed, scale, whole)
    got = jax.jit(lambda x: Nvfp4ToFp8(BLOCK).decode(x, scales, (0, 0)).astype(E4M3))(packed)
    np.testing.assert_array_equal(bits(got), bits(values))
    got = jax.jit(lambda x: Nvfp4BlockScales(BLOCK).decode(x, scales[1:], (0, 0)))(scale)
    np.testing.assert_array_equal(bits(got), bits(factors))


def test_a_slab_takes_the_scales_of_its_rows():
    """Where a rank's rows begin is known only on the device."""
    packed, scale, whole = random_codes(300, 160)
    scales = (jnp.asarray(scale), jnp.asarray(whole).reshape(1))
    decode = jax.jit(lambda coding, x, row: coding.decode(x, scales, (row, 0)), static_argnums=0)
    for coding in (Nvfp4(), Nvfp4ToFp8(BLOCK)):
        all_rows = coding.decode(packed, scales, (0, 0))
        for row in (0, 100, 127, 200):
            got = decode(coding, packed[row : row + 100], jnp.int32(row))
            np.testing.assert_array_equal(bits(got), bits(all_rows[row : row + 100]))


def test_the_low_nibble_is_the_even_column():
    packed = np.arange(256, dtype=np.uint8).reshape(32, 8)
    got = np.asarray(nvfp4_products(jnp.asarray(packed), jnp.ones((32, 1), E4M3))).reshape(-1, 2)
    np.testing.assert_array_equal(got[:, 0], np.tile(E2M1, 16))
    np.testing.assert_array_equal(got[:, 1], np.repeat(E2M1, 16))


def test_powers_of_two_stay_exact_in_fp8():
    """A value of 0.5, 1, 2 or 4 has the bits of its group's scale, which e4m3 holds; only the others are rounded."""
    packed, _, whole = random_codes(128, 128)
    scale = np.random.default_rng(1).uniform(60, 448, (128, 8)).astype(E4M3)
    want = dequantize(packed, scale, whole)
    values, factors = to_fp8(packed, scale, whole)
    got = values.astype(np.float32) * factors
    codes = np.stack([packed & 7, packed >> 4 & 7], axis=-1).reshape(128, 128)
    exact = np.isin(codes, (0, 1, 2, 4, 6))
    np.testing.assert_array_equal(got[exact], want[exact])
    assert (got != want)[~exact].mean() > 0.2
    assert np.abs(got / np.where(want == 0, 1, want) - 1)[want != 0].max() <= 2**-4


def test_zero_weights():
    """A block without any value has a scale that multiplies zeros, and no NaN."""
    packed, scale = np.zeros((128, 64), np.uint8), np.zeros((128, 8), E4M3)
    scales = (jnp.asarray(scale), jnp.ones(1))
    assert not np.asarray(Nvfp4ToFp8(BLOCK).decode(packed, scales, (0, 0))).any()
    assert np.isfinite(Nvfp4BlockScales(BLOCK).decode(scale, scales[1:], (0, 0))).all()


def weights_of(model) -> dict[str, np.ndarray]:
    """Every source of the model's parameters by its name, padding cut off."""
    arrays, out = parameters(model), {}
    for name, spec in parameter_specs(model).items():
        whole = np.asarray(arrays[name])
        for source in spec.sources:
            out[source.name] = whole[(*source.index, *(slice(0, n) for n in source.shape))]
    return out


def test_loads_as_real_values(checkpoint):
    """On 8 devices, whose shares are columns or experts."""
    folder, codes = checkpoint
    got = weights_of(from_pretrained(folder, make_mesh(tp=8, dcp=2), jnp.float32))
    for name, tensor in read_tensors(ORACLE / VARIANT / "single").items():
        if name in got:
            want = dequantize(*codes[name]) if name in codes else tensor.astype(np.float32)
            np.testing.assert_array_equal(bits(got[name]), bits(want), err_msg=name)


def assert_block_fp8(model, codes):
    """Quantised weights are e4m3 with scales, bit for bit, and the others are what they were."""
    got = weights_of(model)
    assert set(codes) <= set(got)
    for name, array in got.items():
        if name in codes:
            values, factors = to_fp8(*codes[name])
            np.testing.assert_array_equal(bits(array), bits(values), err_msg=name)
            np.testing.assert_array_equal(bits(got[name + "_scale_inv"]), bits(factors), err_msg=name)
        elif not name.endswith("_scale_inv"):
            assert array.dtype in (jnp.bfloat16, jnp.float32), name


def test_loads_as_block_fp8(checkpoint, fp8_model):
    assert_block_fp8(fp8_model, checkpoint[1])


def test_loads_as_block_fp8_on_eight_devices(checkpoint):
    assert_block_fp8(from_pretrained(checkpoint[0], make_mesh(tp=8), jnp.bfloat16, weights="fp8"), checkpoint[1])


def test_auto_rounds_nothing_away(checkpoint):
    """Without being asked for FP8, which rounds once more, weights are dequantised."""
    folder, bfloat16 = checkpoint[0], jnp.dtype(jnp.bfloat16)
    config = ModelConfig.from_folder(folder)
    assert api._fp8_parameters(folder, config, make_mesh(), bfloat16, "fp8")
    assert not api._fp8_parameters(folder, config, make_mesh(), bfloat16, "auto")


def test_error_of_the_logits(checkpoint, fp8_model):
    """What block FP8 loses beyond NVFP4 (5%) is a fourth of what NVFP4 has lost of the BF16 model (23%), in float32.

    A prompt without near ties of the router: where an expert changes, a row of this small random model differs by more.
    """
    name = prompt_names(VARIANT)[0]
    models = from_pretrained(checkpoint[0], make_mesh(), jnp.float32), fp8_model
    nvfp4, fp8 = (run_prefill(model, [prompt(VARIANT, name)], selected=False).logits[0] for model in models)
    assert error(fp8, nvfp4) == pytest.approx(0.05, abs=0.01)
    assert error(nvfp4, answers(VARIANT)[f"{name}_logits"][0]) == pytest.approx(0.23, abs=0.03)


def test_error_of_the_weights_against_float32():
    """Of normal weights NVFP4 loses 9.5%; FP8 made of it 2.2% more, which leaves 9.7% together (root mean squares)."""
    weight = np.random.default_rng(0).normal(0, 0.02, (256, 512)).astype(np.float32)
    codes = tuple(quantize(weight).values())
    real = dequantize(*codes)
    values, factors = to_fp8(*codes)
    fp8 = values.astype(np.float32) * np.repeat(np.repeat(factors, 128, axis=0), 128, axis=1)
    assert error(real, weight) == pytest.approx(0.095, abs=0.002)
    assert error(fp8, real) == pytest.approx(0.0217, abs=0.001)
    assert error(fp8, weight) == pytest.approx(0.097, abs=0.002)


def test_converts_to_a_native_checkpoint(checkpoint, fp8_model, tmp_path):
    convert(checkpoint[0], tmp_path / "native", jnp.float32, weights="fp8")
    got, want = parameters(from_pretrained(tmp_path / "native", make_mesh(), jnp.float32)), parameters(fp8_model)
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_array_equal(bits(got[name]), bits(want[name]), err_msg=name)


def test_skipped_tensors_are_told_once(checkpoint, caplog):
    """One line for multi-token prediction, one for the rest; the scales of inputs belong to their weights."""
    with caplog.at_level(logging.INFO, logger="dsa_jax"):
        from_pretrained(checkpoint[0], make_mesh(), jnp.float32)
    messages = [record.message for record in caplog.records]
    assert len([m for m in messages if "skipped 1 tensors of multi-token prediction (layer 4)" in m]) == 1, messages
    others = [m for m in messages if "multi-token" not in m]
    assert len(others) == 1 and "skipped 1 tensors" in others[0] and "k_scale" in others[0], messages


def test_parameters_are_counted(checkpoint):
    """Two a byte, scales none; the scale of the cache counts 1, the layer of multi-token prediction 4."""
    assert describe(checkpoint[0]).parameters == describe(ORACLE / VARIANT / "single").parameters + 5


def error_of(tmp_path, changed: dict, **options) -> str:
    """The error of loading one weight of [32, 64] with some tensors changed; None leaves one out."""
    tensors = {"a.weight" + ending: part for ending, part in quantize(np.ones((32, 64), np.float32)).items()} | changed
    write_file(tmp_path / "model.safetensors", {n: t for n, t in tensors.items() if t is not None})
    specs = {"w": ParamSpec((32, 64), None, PartitionSpec(), (Source("a.weight", (32, 64)),))}
    with pytest.raises(CheckpointError) as caught:
        load_safetensors(tmp_path, specs, make_mesh(), jnp.float32, progress=False, **{"nvfp4": True, **options})
    return str(caught.value)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"a.weight_scale": None}, ("lacks its scales 'a.weight_scale'", "F8_E4M3 (32, 4)")),
        ({"a.weight_scale_2": None}, ("lacks its scales 'a.weight_scale_2'", "F32 ()")),
        ({"a.weight_scale": np.ones((32, 2), E4M3)}, ("F8_E4M3 (32, 2)", "expected F8_E4M3 (32, 4)")),
        ({"a.weight_scale": np.ones((32, 4), np.float32)}, ("F32 (32, 4)", "expected F8_E4M3 (32, 4)")),
        ({"a.weight_scale_2": np.ones((32,), np.float32)}, ("F32 (32,)", "expected F32 ()")),
        ({"a.weight": np.ones((32, 64), np.uint8)}, ("(32, 64)", "(32, 32), two values a byte")),
        ({"b.weight_scale": np.ones((1, 1), E4M3)}, ("'b.weight_scale'", "no part of the model")),
    ],
)
def test_damaged_checkpoints_are_refused(tmp_path, changed, words):
    message = error_of(tmp_path, changed)
    for word in ("'a.weight" if "b.weight_scale" not in changed else "'b.", "model.safetensors", *words):
        assert word in message, message
    assert "\n" not in message


def test_undeclared_nvfp4_is_refused(tmp_path):
    assert "has dtype U8, which is none of" in error_of(tmp_path, {}, nvfp4=False)
