"""The command line as a user meets it: results, files, and one line for each mistake."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from dsa_jax.cli import main
from tests.support import ORACLE, answers, assert_selected, prompt

GLM5 = ORACLE / "glm5" / "single"
FLOAT32 = ["--dtype", "float32", "--tp", "1", "--page-size", "16"]


def run(capsys, *args) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command."""
    try:
        code = main([str(arg) for arg in args])
    except SystemExit as stop:
        code = int(stop.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def refused(capsys, *args) -> str:
    """The one line on stderr of a command that must exit with 2."""
    code, out, err = run(capsys, *args)
    assert code == 2 and out == "", (code, out, err)
    lines = [line for line in err.splitlines() if "B/s]" not in line and line.strip()]
    assert len(lines) == 1 and "Traceback" not in err, err
    return lines[0]


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


IDS = ["--prompt-ids", "[[1, 2, 3]]"]
MISTAKES = {
    "empty prompt": (["generate", GLM5, "--prompt-ids", "[[]]"], "prompt 0 is empty"),
    "no prompt": (["generate", GLM5, "--prompt-ids", "[]"], "prompts is empty"),
    "flat list": (["generate", GLM5, "--prompt-ids", "[1, 2]"], "list of prompts"),
    "not JSON": (["generate", GLM5, "--prompt-ids", "1 2"], "not JSON"),
    "missing file": (["generate", GLM5, "--prompt-ids", "@no_such_file"], "no_such_file"),
    "token out of vocabulary": (
        ["generate", GLM5, "--prompt-ids", "[[5], [1, 199]]"],
        "prompt 1 has token id 199, outside the vocabulary of 199",
    ),
    "negative token": (["prefill", GLM5, "--prompt-ids", "[[-1]]"], "token id -1"),
    "float token": (["prefill", GLM5, "--prompt-ids", "[[1.5]]"], "flat list of token ids"),
    "too long": (
        ["prefill", GLM5, "--prompt-ids", json.dumps([[1] * 513])],
        "513 tokens, more than the model's maximum of 512",
    ),
    "heads": (["generate", GLM5, *IDS, "--tp", "8"], "num_attention_heads=4 must be divisible by tp=8"),
    "devices": (
        ["generate", ORACLE / "glm5_tp8" / "single", *IDS, "--tp", "8", "--data", "2"],
        "needs 16 devices, found 8",
    ),
    "no text tokenizer": (["generate", GLM5, "--prompt", "Hello"], "has no tokenizer.json"),
    "both prompts": (["generate", GLM5, *IDS, "--prompt", "Hello"], "not allowed with"),
    "unknown command": (["serve"], "invalid choice"),
    "unknown family": (["tiny", "x", "--family", "gpt"], "invalid choice"),
    "bad size": (["generate", GLM5, *IDS, "--max-new-tokens", "0"], "must be positive"),
    "bad temperature": (["generate", GLM5, *IDS, "--temperature", "-1"], "temperature"),
    "bad top-p": (["generate", GLM5, *IDS, "--top-p", "1.5"], "top_p"),
    "format width": (
        ["generate", GLM5, *IDS, "--tp", "1", "--kv-format", "fp8_ds_mla"],
        "needs kv_lora_rank=512, got kv_lora_rank=40",
    ),
    "dcp": (
        ["generate", ORACLE / "glm5_tp8" / "single", *IDS, "--tp", "8", "--dcp", "3"],
        "tp=8 must be divisible by dcp=3",
    ),
    "interleave": (["generate", GLM5, *IDS, "--tp", "2", "--dcp", "2", "--interleave", "3"], "interleave"),
    "replicas": (["generate", GLM5, *IDS, "--tp", "2", "--dcp", "2", "--index-replicas", "3"], "index_replicas=3"),
    "pages": (
        ["generate", GLM5, "--tp", "1", "--prompt-ids", json.dumps([[1] * 100]), "--max-pages", "1"],
        "out of pages: 4 needed",
    ),
    "out suffix": (["prefill", GLM5, *IDS, "--out", "logits.txt"], ".npz"),
    "out folder": (["prefill", GLM5, *IDS, "--out", "no_such_folder/x.npz"], "no_such_folder"),
    "more devices than memory": (["generate", GLM5, *IDS, "--tp", "10000000000"], "devices, found 8"),
    "nested": (["generate", GLM5, "--prompt-ids", "[" * 100_000], "recursion"),
    "no checkpoint": (["inspect", "no_such_checkpoint"], "no_such_checkpoint"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(capsys, mistake):
    """Each mistake ends with code 2 and one line that names what is wrong."""
    args, message = MISTAKES[mistake]
    assert message in refused(capsys, *args)


def damaged(tmp_path, *, sharded: bool = False):
    """A copy of a checkpoint to damage."""
    folder = tmp_path / "damaged"
    shutil.copytree(ORACLE / "glm5" / ("sharded" if sharded else "single"), folder)
    return folder


def test_folder_without_config(capsys, tmp_path):
    """The folder and the missing file are named."""
    folder = damaged(tmp_path)
    (folder / "config.json").unlink()
    line = refused(capsys, "generate", folder, *IDS)
    assert str(folder) in line and "config.json" in line


def test_truncated_safetensors(capsys, tmp_path):
    """The file is named."""
    folder = damaged(tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "model.safetensors" in refused(capsys, "generate", folder, *IDS, "--tp", "1")


def test_index_outside_the_folder(capsys, tmp_path):
    """An index must not make the loader read elsewhere."""
    folder = damaged(tmp_path, sharded=True)
    index = folder / "model.safetensors.index.json"
    raw = json.loads(index.read_text())
    name = next(iter(raw["weight_map"]))
    raw["weight_map"][name] = "../outside.safetensors"
    index.write_text(json.dumps(raw))
    assert "../outside.safetensors" in refused(capsys, "generate", folder, *IDS, "--tp", "1")


def test_unknown_quantization(capsys, tmp_path):
    """The method is named."""
    folder = damaged(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))
    assert "gptq" in refused(capsys, "generate", folder, *IDS)


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
