"""The command line as a user meets it: results, files, and one line for each mistake."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from tests.model.cli_cases import FLOAT32, GLM5, IDS, run
from tests.support import ORACLE, answers, assert_selected, prompt


@pytest.mark.quick
def test_generate_json(capsys):
    """The oracle's tokens, and the keys that scripts rely on."""
    prompts = [prompt("glm5", "s7"), prompt("glm5", "s33")]
    code, out, _ = run(
        capsys,
        "generate",
        GLM5,
        "--prompt-ids",
        json.dumps(prompts),
        "--max-new-tokens",
        16,
        "--ignore-eos",
        "--json",
        *FLOAT32,
    )
    assert code == 0
    result = json.loads(out)
    assert result["tokens"] == [answers("glm5")[f"{name}_gen_tokens"][0].tolist() for name in ("s7", "s33")]
    assert result["ttft_s"] > 0 and result["tokens_per_s"] > 0


def test_prefill_file(capsys, tmp_path):
    """Logits and selections of every layer, shared ones with what they reuse."""
    ids, out_file = tmp_path / "ids.json", tmp_path / "out.npz"
    ids.write_text(json.dumps([prompt("glm52", "s33"), prompt("glm52", "s7")]))
    code, out, _ = run(
        capsys,
        "prefill",
        ORACLE / "glm52" / "single",
        "--prompt-ids",
        f"@{ids}",
        "--logits",
        "all",
        "--out",
        out_file,
        *FLOAT32,
    )
    assert code == 0 and "tokens/s" in out
    with np.load(out_file) as stored:
        assert len(stored.files) == 2 + 2 * 6
        for i, name in enumerate(("s33", "s7")):
            np.testing.assert_allclose(stored[f"logits_{i}"], answers("glm52")[f"{name}_logits"][0], rtol=0, atol=5e-5)
            assert_selected(np.stack([stored[f"selected_{i}_L{layer}"] for layer in range(6)]), "glm52", name)
        assert stored["selected_1_L2"].dtype == np.int32


@pytest.mark.parametrize("rows", ["last", "none"])
def test_prefill_rows(capsys, tmp_path, rows):
    """Only the last row, or no logits at all."""
    out_file = tmp_path / "out.npz"
    ids = json.dumps([prompt("glm5", "s7")])
    code, out, _ = run(
        capsys, "prefill", GLM5, "--prompt-ids", ids, "--logits", rows, "--out", out_file, "--json", *FLOAT32
    )
    assert code == 0 and json.loads(out)["tokens"] == 7
    with np.load(out_file) as stored:
        assert stored["selected_0_L3"].shape == (7, 16)
        if rows == "none":
            assert "logits_0" not in stored
        else:
            np.testing.assert_allclose(stored["logits_0"], answers("glm5")["s7_logits"][0, -1:], rtol=0, atol=5e-5)


def test_tiny_convert_inspect_generate(capsys, tmp_path):
    """A tiny checkpoint and its native form generate the same tokens on 8 devices, from ids and from their text."""
    hf, native = tmp_path / "hf", tmp_path / "native"
    assert run(capsys, "tiny", hf, "--family", "glm52", "--seed", 3)[0] == 0
    assert run(capsys, "convert", hf, native)[0] == 0
    tokens = []
    for folder, words in ((hf, ["--prompt-ids", "[[39, 72]]"]), (native, ["--prompt", "Hi"])):
        code, out, _ = run(
            capsys, "generate", folder, *words, "--max-new-tokens", 6, "--tp", 8, "--ignore-eos", "--json"
        )
        assert code == 0
        tokens.append(json.loads(out)["tokens"])
        code, out, _ = run(capsys, "inspect", folder, "--json")
        report = json.loads(out)
        assert report["architecture"] == "glm_moe_dsa" and report["nonfinite"] == {}
        assert report["checkpoint"]["by_dtype"]["BF16"]["elements"] > 0
    assert tokens[0] == tokens[1] and len(tokens[0][0]) == 6


def test_inspect_names_weights_that_are_not_finite(capsys, tmp_path):
    """A NaN in one tensor is reported with its name."""
    folder = tmp_path / "nan"
    shutil.copytree(GLM5, folder)
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    name = "model.layers.2.self_attn.o_proj.weight"
    at = 8 + int.from_bytes(data[:8], "little") + header[name]["data_offsets"][0]
    data[at : at + 2] = b"\xc0\x7f"
    file.write_bytes(data)
    code, out, _ = run(capsys, "inspect", folder)
    assert code == 0 and f"not finite: {name} holds 1 " in out


def test_entry_point(tmp_path):
    """The installed module runs in a process of its own, with virtual devices from the environment."""
    env = dict(os.environ, JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="2")
    command = [sys.executable, "-m", "dsa_jax.cli", "generate", str(ORACLE / "glm5_tp8" / "single"), *IDS, "--tp", "4"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("needs 4 devices, found 2")


@pytest.mark.parametrize("tp", ["1", "4"])
def test_default_dtype_with_several_heads_a_rank(capsys, tp):
    """bfloat16, the default, runs however many heads a rank has."""
    checkpoint = ORACLE / "glm5_tp8" / "single"
    code, out, _ = run(
        capsys, "generate", checkpoint, *IDS, "--tp", tp, "--max-new-tokens", 2, "--ignore-eos", "--json"
    )
    assert code == 0 and len(json.loads(out)["tokens"][0]) == 2
