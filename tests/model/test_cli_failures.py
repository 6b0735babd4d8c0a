"""What fails through no mistake of the command: devices, damaged weights, weights that are NaN. One line each."""

import json
import logging
import os
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

from dsa_jax import commands
from dsa_jax.tiny import write_tiny
from tests.model.checkpoint_cases import read_tensors, write_file
from tests.model.cli_cases import FLOAT32, GLM5, IDS, lines_of, refused, run


@pytest.mark.parametrize(
    "error", [RuntimeError("Unable to initialize backend 'x':\nit is\nnot there"), AssertionError()]
)
@pytest.mark.parametrize("command", ["generate", "convert"])
def test_no_backend(capsys, monkeypatch, tmp_path, command, error):
    """Jax raises either where a platform that was asked for is not there, and what its plugins log is kept."""

    def devices():
        try:
            raise OSError("libcuda.so is\nmissing")
        except OSError:
            logging.getLogger("jax._src.xla_bridge").exception("plugin failed")
        raise error

    monkeypatch.setattr(jax, "devices", devices)
    line = refused(capsys, command, GLM5, *(IDS if command == "generate" else [tmp_path / "out"]))
    assert line.startswith(f"dsa-jax {command}: error: jax finds no device: ")
    assert "plugin failed libcuda.so is missing" in line and "JAX_PLATFORMS is 'cpu'" in line


def test_out_of_memory_is_one_line_and_other_errors_of_the_runtime_are_not(capsys, monkeypatch):
    """What a device has no room for is told; an internal error is a bug and keeps its traceback."""

    def fail(message):
        def generate(*args):
            raise jax.errors.JaxRuntimeError(message)

        return generate

    monkeypatch.setattr(commands, "from_pretrained", lambda *args, **options: None)
    monkeypatch.setattr(commands, "generate", fail("RESOURCE_EXHAUSTED: Out of memory\nallocating 57 bytes."))
    line = refused(capsys, "generate", GLM5, *IDS)
    assert "RESOURCE_EXHAUSTED: Out of memory allocating 57 bytes. (fewer --max-pages," in line
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        run(capsys, "--debug", "generate", GLM5, *IDS)
    monkeypatch.setattr(commands, "generate", fail("INTERNAL: a bug"))
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL: a bug"):
        run(capsys, "generate", GLM5, *IDS)


@pytest.fixture(scope="module")
def nan_checkpoint(tmp_path_factory):
    """A checkpoint with one NaN in one weight."""
    folder = tmp_path_factory.mktemp("nan") / "checkpoint"
    shutil.copytree(GLM5, folder)
    tensors = read_tensors(folder)
    weight = tensors["model.layers.2.self_attn.o_proj.weight"].copy()
    weight[3, 5] = np.nan
    tensors["model.layers.2.self_attn.o_proj.weight"] = weight
    write_file(folder / "model.safetensors", tensors)
    return folder


def test_generating_from_weights_that_are_nan(capsys, nan_checkpoint):
    """No token is made up: the prompt is named, and where to look."""
    line = refused(capsys, "generate", nan_checkpoint, *IDS, *FLOAT32, "--max-new-tokens", 1)
    assert "prompt 0: the logits for new token 0 are NaN or infinite; `dsa-jax inspect` names" in line


def test_prefilling_weights_that_are_nan(capsys, nan_checkpoint):
    """The logits are given as they are, with a warning of one line."""
    code, text, err = run(capsys, "prefill", nan_checkpoint, *IDS, "--json", *FLOAT32)
    assert code == 0 and json.loads(text)["nonfinite"] == [0]
    (line,) = lines_of(err)
    assert line.startswith("dsa-jax prefill: warning: the logits of prompts [0] are NaN or infinite")


@pytest.mark.parametrize("equal", [True, False])
def test_tied_embeddings_beside_a_head(capsys, tmp_path, equal):
    """A head that is the embeddings may be there; another one is refused with both tensors and files."""
    folder = tmp_path / "tied"
    shutil.copytree(GLM5, folder)
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    if equal:
        tensors = read_tensors(folder)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        write_file(folder / "model.safetensors", tensors)
        assert run(capsys, "convert", folder, tmp_path / "native")[0] == 0
        return
    for args in (["generate", folder, *IDS], ["convert", folder, tmp_path / "native"]):
        line = refused(capsys, *args)
        assert "tensor 'lm_head.weight' in model.safetensors, BF16 (199, 96), differs from" in line
        assert "'model.embed_tokens.weight' in model.safetensors" in line and "tie_word_embeddings to false" in line


@pytest.fixture(scope="module")
def native(tmp_path_factory):
    """A native checkpoint."""
    folder = tmp_path_factory.mktemp("native")
    write_tiny(folder / "hf", "glm5")
    commands.convert(folder / "hf", folder / "native")
    return folder / "native"


def test_converting_what_is_native(capsys, native, tmp_path):
    """It is said to be native, not to lack safetensors."""
    line = refused(capsys, "convert", native, tmp_path / "out")
    assert f"checkpoint {native} is native already: it loads onto any mesh as it is" in line


def test_damaged_arrays_of_a_native_checkpoint(native, tmp_path):
    """Bytes that were changed: one line, without what the reading library says of its own state."""
    folder = tmp_path / "damaged"
    shutil.copytree(native, folder)
    files = list((folder / "params").glob("state/ocdbt.process*/d/*"))
    assert files
    for file in files:
        file.write_bytes(bytes(file.stat().st_size))
    command = [sys.executable, "-m", "dsa_jax.cli", "inspect", str(folder)]
    done = subprocess.run(
        command, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2, done.stderr
    (line,) = lines_of(done.stderr)
    assert line.startswith(f"dsa-jax inspect: error: checkpoint {folder}: reading ") and len(line) < 1200
