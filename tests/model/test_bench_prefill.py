"""The layer benchmark runs on virtual devices, and its report holds what a table needs."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support import ORACLE

ROOT = Path(__file__).parents[2]


def test_report(tmp_path):
    """Two layers of a small FP8 model, two requests in flight, on 4 devices."""
    config = ORACLE / "glm5_fp8" / "single" / "config.json"
    flags = "--layers 2 --tp 4 --dcp 2 --context 32 --requests 2 --chunk-size 64 --new-tokens 3 --repeats 1"
    command = [sys.executable, "scripts/bench_prefill.py", "--config", str(config), *flags.split(), "--page-size", "16"]
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--json", str(tmp_path / "out.json")], cwd=ROOT, env=env, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "out.json").read_text())
    assert (report["layers"], report["tp"], report["dcp"]) == (2, 4, 2) and report["weights_bytes_per_device"] > 0
    assert [(case["context"], case["requests"]) for case in report["cases"]] == [(32, 2)]
    for case in report["cases"]:
        assert 0 < case["ttft_s"]["median"] <= case["ttft_s"]["p99"] and case["tpot_s"]["median"] > 0
        assert case["tokens_per_s"]["median"] > 0 and case["predicted_ttft_s"] > 0
        assert {"indexer", "attention", "mlp", "collectives"} <= set(case["parts_s"])
        assert sum(case["parts_s"].values()) > 0 and case["programs"] >= 1
