"""The command that runs all benchmarks, and the pictures it draws."""

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

PATHS = {
    "environment": {"device": "x"},
    "setup": {"tp": 4, "dcp": 2, "chunk_size": 64, "layers": 4},
    "results": [
        {"scope": "attention", "history": n, "path": path, "ms": ms, "model_ms": ms / 2, "stock_over_this": 3.0 / ms}
        for n in (8192, 65536)
        for path, ms in (("stock", 3.0), ("CKV gather", 2.0))
    ]
    + [{"scope": "attention", "history": 8192, "path": "union", "failed": "no room"}],
}
PREFILL = {
    "config": "glm52",
    "layers": 4,
    "tp": 4,
    "dcp": 2,
    "device": "x",
    "cases": [
        {"context": n, "requests": r, "ttft_s": {"median": n * r / 1e5}, "predicted_ttft_s": n / 2e5}
        for n in (8192, 65536)
        for r in (1, 4)
    ]
    + [{"context": 131072, "requests": 1, "failed": "no room"}],
}


@pytest.fixture(scope="module")
def scripts():
    """Modules of scripts/ by name."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        yield importlib.import_module
    finally:
        sys.path.remove(str(ROOT / "scripts"))


def test_parts_for_a_machine(scripts, tmp_path):
    """Sizes that the GPUs allow; one GPU has no paths; flags go on to the scripts."""
    bench_all = scripts("bench_all")

    def parts(gpus, *flags):
        found = bench_all.plan_parts(bench_all.parse(["--out", "x", *flags]), gpus, tmp_path)
        return {part.name: list(part.command) for part in found}

    assert [name for name in parts(1) if name.startswith("paths")] == []
    six = parts(6, "--history", "8192", "--peers", str(tmp_path))  # six GPUs: heads divide by four of them
    assert [name for name in six if name.startswith("p")] == [
        *(f"paths_tp4_dcp{dcp}" for dcp in (1, 2, 4)),
        *(f"prefill_tp4_dcp{dcp}" for dcp in (1, 4)),
    ]
    command = six["paths_tp4_dcp2"]
    want = ["--tp", "4", "--dcp", "2", "--history", "8192", "--json", str(tmp_path / "paths_tp4_dcp2.json")]
    assert command[1:] == ["scripts/bench_sharding.py", *want]
    assert "--peers" in six["topk"] and "--peers" not in parts(8)["topk"]
    assert list(parts(8, "--parts", "memory")) == ["memory_glm52-fp8"]


def test_failures_are_reported_and_late_ones_stopped(scripts, tmp_path):
    """A benchmark that is right, one that fails, and one whose child would go on after the limit."""
    bench_all = scripts("bench_all")

    def run(code, limit=60.0):
        return bench_all.run_part(bench_all.Part("part", (sys.executable, "-c", code)), limit)

    assert run("print('done')")["status"] == "ok"
    failed = run("raise SystemExit('no such thing')")
    assert failed["status"] == "failed" and failed["returncode"] == 1 and "no such thing" in failed["output_end"]
    child = "import os, subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()"
    late = run(child, 3.0)
    assert late["status"] == "stopped after 3 s" and late["seconds"] < 30
    pid = int(late["output_end"])
    for _ in range(50):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return  # dead, and not yet waited for by whoever inherited it
        time.sleep(0.1)
    pytest.fail(f"process {pid} goes on")


def test_environment_is_added(scripts, tmp_path):
    """A result without one gets it; one that has its own keeps it, and gets the commit where it had none."""
    bench_all = scripts("bench_all")
    part = bench_all.Part("p", ("python", "scripts/bench_x.py", "--tp", "2"))
    found = bench_all.environment(["H200"], "abc")
    assert found["commit"] == "abc" and found["gpus"] == ["H200"] and "jax" in found["versions"]
    file = tmp_path / "p.json"
    file.write_text(json.dumps({"cases": []}))
    bench_all.add_environment(file, found, part)
    written = json.loads(file.read_text())["environment"]
    assert written["command"] == "bench_x.py --tp 2" and written["commit"] == "abc" and written["gpus"] == ["H200"]
    file.write_text(json.dumps({"environment": {"command": "own", "commit": None}}))
    bench_all.add_environment(file, found, part)
    assert json.loads(file.read_text())["environment"] == {"command": "own", "commit": "abc"}


def test_dry_run(tmp_path):
    """Memory needs no GPU; a config of one's own gives its name to the file; nothing is run or written."""
    command = [sys.executable, "scripts/bench_all.py", "--out", str(tmp_path), "--parts", "memory"]
    command += ["--config", str(ROOT / "tests/fixtures/oracle/glm5_tp8/single/config.json")]
    dry = subprocess.run([*command, "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert dry.stdout.count("bench_memory.py") == 1 and str(tmp_path / "memory_config.json") in dry.stdout
    assert not list(tmp_path.iterdir())


def test_reports_and_pictures(scripts, tmp_path):
    """Each kind of report is known, and each picture knows the report behind it."""
    data, plots = scripts("result_data"), scripts("plot_results")
    for name, content in (("paths", PATHS), ("prefill", PREFILL), ("summary", {"parts": []})):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    reports = data.load(tmp_path)
    assert [report.kind for report in reports] == ["paths", "prefill"]
    found = plots.pictures(reports)
    names = ["paths_attention", "paths_attention_speedup", "paths_step", "paths_step_speedup"]
    assert sorted(found) == [*names, "prefill"]
    assert found["prefill"][0][0].file.name == "prefill.json"
    assert data.rounded(2.295) == "2.30" and data.rounded(106.85228, 1) == "106.9"


def test_pictures_are_drawn(scripts, tmp_path):
    """What has results is drawn, twice the same; what has none is not."""
    pytest.importorskip("matplotlib", reason="the extra 'plots' is not installed")
    plots = scripts("plot_results")
    for name, content in (("paths", PATHS), ("prefill", PREFILL)):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    found = plots.pictures(plots.load(tmp_path) + plots.load(ROOT / "docs" / "results"))
    files = plots.save(tmp_path / "a", found)
    names = ["kernels", "memory_glm52_fp8", "paths_attention", "paths_attention_speedup", "prefill"]
    assert sorted(file.stem for file in files) == names
    assert "CKV gather" in (tmp_path / "a" / "paths_attention.svg").read_text()
    plots.save(tmp_path / "b", found)
    for file in files:
        assert file.read_text() == (tmp_path / "b" / file.name).read_text()
