"""Mistakes of a user: one line that names what is wrong, before a weight is read."""

import json
import logging
import shutil
import sys

import pytest

import dsa_jax.checkpoint
from tests.model.cli_cases import GLM5, IDS, lines_of, refused, run
from tests.support import ORACLE

TP8 = ORACLE / "glm5_tp8" / "single"
MISTAKES = {
    "empty prompt": (["generate", GLM5, "--prompt-ids", "[[]]"], "prompt 0 is empty"),
    "no prompt": (["generate", GLM5, "--prompt-ids", "[]"], "prompts is empty"),
    "flat list": (["generate", GLM5, "--prompt-ids", "[1, 2]"], "list of prompts"),
    "not JSON": (["generate", GLM5, "--prompt-ids", "1 2"], "not JSON"),
    "missing file": (["generate", GLM5, "--prompt-ids", "@no_such_file"], "--prompt-ids: no_such_file cannot be read"),
    "file that is a folder": (["generate", GLM5, "--prompt-ids", f"@{GLM5}"], f"--prompt-ids: {GLM5} cannot be read"),
    "token out of vocabulary": (
        ["generate", GLM5, "--prompt-ids", "[[5], [1, 199]]"],
        "prompt 1 has token id 199, outside the vocabulary of 199",
    ),
    "negative token": (["prefill", GLM5, "--prompt-ids", "[[-1]]"], "token id -1"),
    "float token": (["prefill", GLM5, "--prompt-ids", "[[1.5]]"], "flat list of token ids"),
    "list in a list": (
        ["generate", GLM5, "--prompt-ids", "[[1], [1, [2]]]"],
        "prompt 1 must be a flat list of token ids, got [1, [2]]",
    ),
    "true for an id": (["generate", GLM5, "--prompt-ids", "[[true, 2]]"], "prompt 0 must be a flat list of token ids"),
    "long number": (["generate", GLM5, "--prompt-ids", f"[[{'9' * 5000}]]"], "--prompt-ids is not JSON"),
    "too long": (
        ["prefill", GLM5, "--prompt-ids", json.dumps([[1] * 513])],
        "513 tokens, more than the model's maximum of 512",
    ),
    "heads": (["generate", GLM5, *IDS, "--tp", "8"], "num_attention_heads=4 must be divisible by tp=8"),
    "devices": (
        ["generate", TP8, *IDS, "--tp", "8", "--data", "2"],
        "needs 16 devices, found 8",
    ),
    "no text tokenizer": (["generate", GLM5, "--prompt", "Hello"], "has no tokenizer.json"),
    "both prompts": (["generate", GLM5, *IDS, "--prompt", "Hello"], "not allowed with"),
    "unknown command": (["serve"], "invalid choice"),
    "unknown family": (["tiny", "x", "--family", "gpt"], "invalid choice"),
    "bad size": (["generate", GLM5, *IDS, "--max-new-tokens", "0"], "must be positive"),
    "bad temperature": (["generate", GLM5, *IDS, "--temperature", "-1"], "temperature"),
    "huge temperature": (
        ["generate", GLM5, *IDS, "--temperature", "1e300"],
        "temperature must be in [0, 3.402823e+38]",
    ),
    "bad top-p": (["generate", GLM5, *IDS, "--top-p", "1.5"], "top_p"),
    "format width": (
        ["generate", GLM5, *IDS, "--tp", "1", "--kv-format", "fp8_ds_mla"],
        "needs kv_lora_rank=512, got kv_lora_rank=40",
    ),
    "dcp": (
        ["generate", TP8, *IDS, "--tp", "8", "--dcp", "3"],
        "tp=8 must be divisible by dcp=3",
    ),
    "interleave": (["generate", GLM5, *IDS, "--tp", "2", "--dcp", "2", "--interleave", "3"], "interleave"),
    "replicas": (["generate", GLM5, *IDS, "--tp", "2", "--dcp", "2", "--index-replicas", "3"], "index_replicas=3"),
    "pages": (
        ["generate", GLM5, "--tp", "1", "--prompt-ids", json.dumps([[1] * 100]), "--max-pages", "1"],
        "prompt 0: out of pages: 4 needed, 1 of 1 free",
    ),
    "prefetch of what is not gathered": (
        ["generate", GLM5, *IDS, "--prefetch", "--no-ckv-gather"],
        "--prefetch does nothing with --no-ckv-gather: it needs --ckv-gather",
    ),
    "stock prefetch": (
        ["prefill", GLM5, *IDS, "--prefetch", "--policy", "stock"],
        "--prefetch does nothing with --policy stock",
    ),
    "least of what is not gathered": (
        ["plan", GLM5, "--ckv-gather-min-tokens", "0", "--no-ckv-gather"],
        "--ckv-gather-min-tokens does nothing with --no-ckv-gather",
    ),
    "rows of what is not split": (
        ["plan", GLM5, "--query-split-min-rows", "8", "--no-query-split"],
        "--query-split-min-rows does nothing with --no-query-split",
    ),
    "out suffix": (["prefill", GLM5, *IDS, "--out", "logits.txt"], ".npz"),
    "out folder": (["prefill", GLM5, *IDS, "--out", "no_such_folder/x.npz"], "no_such_folder"),
    "more devices than memory": (["generate", GLM5, *IDS, "--tp", "10000000000"], "devices, found 8"),
    "nested": (["generate", GLM5, "--prompt-ids", "[" * 100_000], "recursion"),
    "no checkpoint": (["inspect", "no_such_checkpoint"], "no_such_checkpoint"),
}


@pytest.fixture(autouse=True)
def no_weights(monkeypatch):
    """No test of this module may come to read a weight."""

    def read(*args, **kwargs):
        raise AssertionError("weights are read before the mistake is told")

    monkeypatch.setattr(dsa_jax.checkpoint.ocp, "load_async", read)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(capsys, mistake):
    """Each mistake ends with code 2 and one line that names what is wrong."""
    args, message = MISTAKES[mistake]
    assert message in refused(capsys, *args)


def test_flags_that_switch_the_other_on_are_taken(capsys):
    """What `--policy stock` switches off can be switched on again, with what belongs to it."""
    flags = ["--policy", "stock", "--ckv-gather", "--prefetch", "--ckv-gather-min-tokens", "0", "--no-token-split"]
    assert run(capsys, "plan", TP8, "--tp", "8", "--dcp", "2", *flags)[0] == 0
    assert run(capsys, "plan", TP8, "--no-ckv-gather", "--no-prefetch")[0] == 0


def test_ids_in_a_file_that_is_not_utf8(capsys, tmp_path):
    """The flag and the file are named."""
    file = tmp_path / "ids.json"
    file.write_bytes(b"[[1, \xff]]")
    assert f"--prompt-ids: {file} is not UTF-8" in refused(capsys, "generate", GLM5, "--prompt-ids", f"@{file}")


def test_results_that_could_not_be_written(capsys, tmp_path):
    """A folder, and a path that cannot be opened; a file that is there stays as it is, and none is left behind."""
    (tmp_path / "folder.npz").mkdir()
    line = refused(capsys, "prefill", GLM5, *IDS, "--out", tmp_path / "folder.npz")
    assert line.endswith(f"--out: {tmp_path / 'folder.npz'} is a folder")
    (tmp_path / "link.npz").symlink_to(tmp_path / "missing" / "x.npz")
    line = refused(capsys, "prefill", GLM5, *IDS, "--out", tmp_path / "link.npz")
    assert f"--out: {tmp_path / 'link.npz'} cannot be written: No such file" in line
    (tmp_path / "old.npz").write_bytes(b"old")
    for name in ("old.npz", "new.npz"):
        assert "vocabulary" in refused(capsys, "prefill", GLM5, "--prompt-ids", "[[999]]", "--out", tmp_path / name)
    assert (tmp_path / "old.npz").read_bytes() == b"old" and not (tmp_path / "new.npz").exists()


def test_sampling_flags_without_effect_are_told(capsys, monkeypatch):
    """Greedy decoding draws nothing: not an error, for scripts pass seeds always, but not silent either.

    Told once, also where a library has given the root logger a handler on stderr.
    """
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.StreamHandler(sys.stderr)])
    code, _, err = run(capsys, "generate", GLM5, "--prompt-ids", "[[999]]", "--seed", "3", "--top-p", "0.5")
    assert code == 2
    first, second = lines_of(err)
    assert first == "--top-p, --seed: without effect at --temperature 0, which is greedy"
    assert "vocabulary" in second


def test_an_output_folder_that_is_taken(capsys, tmp_path):
    """`convert` and `tiny` leave what is there alone."""
    (tmp_path / "precious").write_text("x")
    assert f"{tmp_path} exists already and is not empty" in refused(capsys, "convert", GLM5, tmp_path)
    assert f"{tmp_path} is not empty" in refused(capsys, "tiny", tmp_path, "--family", "glm5")


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
