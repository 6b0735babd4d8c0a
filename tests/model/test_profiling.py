"""Time by part of a step: from written-out cases, and from the command line."""

import gzip
import json

import pytest

from dsa_jax.cli import main
from dsa_jax.profiling import SCOPES, as_text, breakdown, parts_of
from dsa_jax.tiny import write_tiny

PROGRAM = """
ENTRY %main (a: f32[8]) -> f32[8] {
  %fusion.1 = f32[8]{0} fusion(%a), metadata={op_name="jit(run_step)/while/body/indexer/history/gather"}
  %fusion.2 = f32[8]{0} fusion(%a), metadata={op_name="jit(run_step)/while/body/sparse_mla/dot_general"}
  %all-gather-start.3 = (f32[4]{0}, f32[8]{0}) all-gather-start(%a), metadata={op_name="jit(f)/indexer/all_gather"}
  %while.4 = (f32[8]{0}) while(%t), metadata={op_name="jit(run_step)/mlp/while"}
  ROOT %copy.5 = f32[8]{0} copy(%a)
}
"""


def test_parts_of_a_program():
    """The innermost scope counts, a collective is none, a loop's time is that of what it holds."""
    want = {"fusion.1": "history", "fusion.2": "attention", "all-gather-start.3": "collectives", "copy.5": "other"}
    assert parts_of(PROGRAM) == want


def test_breakdown(tmp_path):
    """Microseconds of all devices become seconds of one; events of other programs are nobody's."""
    events = [
        {"ph": "X", "dur": 3.0, "args": {"hlo_op": "fusion.2"}},
        {"ph": "X", "dur": 5.0, "args": {"hlo_op": "fusion.2"}},
        {"ph": "X", "dur": 1.0, "args": {"hlo_op": "copy.5"}},
        {"ph": "X", "dur": 9.0, "args": {"hlo_op": "fusion.77"}},
        {"ph": "M", "args": {"name": "device"}},
    ]
    file = tmp_path / "x.trace.json.gz"
    with gzip.open(file, "wt") as stream:
        json.dump({"traceEvents": events}, stream)
    parts = breakdown([file], [PROGRAM], devices=2)
    assert list(parts) == ["attention", "other"] and parts == pytest.approx({"attention": 4e-6, "other": 0.5e-6})
    assert as_text(parts).splitlines()[1].split() == ["attention", "0.004", "ms", "88.9%"]


def test_profile_of_a_command(tmp_path, capsys):
    """A trace that xprof reads, with an entry for each part of the model; what the folder held is not counted."""
    write_tiny(tmp_path / "ckpt", "glm52")
    folder = tmp_path / "profile"
    folder.mkdir()
    (folder / "old.trace.json.gz").write_bytes(b"not a trace")
    ids = json.dumps([[1, 2, 3, 4, 5, 6, 7], [8, 9]])
    flags = ["--dtype", "float32", "--tp", "4", "--dcp", "2", "--page-size", "16", "--policy", "stock", "--ckv-gather"]
    assert main(["prefill", str(tmp_path / "ckpt"), "--prompt-ids", ids, *flags, "--profile", str(folder)]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("9 tokens in ") and "seconds by part" in printed.err
    assert len(list(folder.glob("plugins/profile/*/*.xplane.pb"))) == 1
    parts = json.loads((folder / "parts.json").read_text())
    expected = {*SCOPES.values(), "collectives"} - {"linear attention"}
    assert expected <= set(parts) and all(seconds > 0 for seconds in parts.values())
    for part in expected:
        assert part in printed.err
