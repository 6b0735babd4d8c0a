"""Two processes of four devices each, joined by `jax.distributed`, against the oracle."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.multi_device.scenario import DEFAULT_TOLERANCE
from tests.support import ORACLE, answers, assert_selected

ROOT = Path(__file__).parents[2]
VARIANT, NAMES, NEW_TOKENS = "glm5_tp8", ("s7", "s33"), 4
SECONDS = 500


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def run_processes(case: dict, folder: Path, processes: int = 2) -> list[dict]:
    """What each of the worker's processes prints; none of them outlives the call."""
    command = [sys.executable, "-m", "tests.multi_device.worker", f"localhost:{free_port()}", str(processes)]
    # To files: a process that waits for room in a pipe would keep the others waiting.
    outputs = [folder / f"{i}.txt" for i in range(processes)]
    started = []
    try:
        for i, output in enumerate(outputs):
            arguments = [*command, str(i), json.dumps(case)]
            with output.open("w") as file:
                started.append(subprocess.Popen(arguments, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT))
        codes = [process.wait(timeout=SECONDS) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    texts = [output.read_text() for output in outputs]
    assert codes == [0] * processes, "\n".join(text[-4000:] for text in texts)
    return [json.loads(text.strip().splitlines()[-1]) for text in texts]


@pytest.mark.timeout(SECONDS + 60)
def test_two_processes_equal_the_oracle(tmp_path):
    """Logits, selections and greedy tokens of both; the tokens drawn with a seed agree; a disagreement is an error."""
    stored = answers(VARIANT)
    case = {
        "folder": str(ORACLE / VARIANT / "single"),
        "mesh": {"tp": 8, "dcp": 2},
        "policy": {"query_split": True, "ckv_gather": True, "prefetch": True},
        "prompts": [stored[f"{name}_input_ids"][0].tolist() for name in NAMES],
        "new_tokens": NEW_TOKENS,
        "disagree": ["mesh", "policy", "prompt"],
    }
    results = run_processes(case, tmp_path)
    assert [result["process"] for result in results] == [0, 1]
    for result in results:
        assert result["greedy"] == [stored[f"{name}_gen_tokens"][0, :NEW_TOKENS].tolist() for name in NAMES]
        for i, name in enumerate(NAMES):
            np.testing.assert_allclose(result["logits"][i], stored[f"{name}_logits"][0], rtol=0, atol=DEFAULT_TOLERANCE)
            assert_selected(np.array(result["selected"][i]), VARIANT, name)
        apart = "of processes [1] differ from those of process 0"
        assert result["errors"] == {
            "mesh": f"model, mesh or options {apart}",
            "policy": f"model, mesh or options {apart}",
            "prompt": f"requests, cache or options of a step {apart}",
        }
    assert results[0]["seeded"] == results[1]["seeded"] != results[0]["greedy"]
