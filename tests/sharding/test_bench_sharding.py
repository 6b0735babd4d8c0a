"""The benchmark of the sharded paths runs on virtual devices, checks before it times, and counts bytes right."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def module():
    """`scripts/bench_sharding_paths.py`."""
    spec = importlib.util.spec_from_file_location("bench_paths", ROOT / "scripts" / "bench_sharding_paths.py")
    assert spec is not None and spec.loader is not None
    loaded = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def report(tmp_path: Path, *flags: str) -> dict:
    """What the script writes for 64 rows behind 96 tokens on 4 devices."""
    command = [sys.executable, "scripts/bench_sharding.py", "--tiny", "--tp", "4", "--dcp", "2"]
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--layers", "2", *flags, "--json", str(tmp_path / "out.json")],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| stock |" in done.stdout
    return json.loads((tmp_path / "out.json").read_text())


def test_attention(tmp_path):
    """Selections of every path equal stock's, and stock's those of one device; bytes are those of the cost model."""
    only = ("union", "in windows", "CKV gather, query and token split")
    found = report(tmp_path, *(flag for text in only for flag in ("--only", text)))
    assert found["environment"]["versions"]["jax"] and found["environment"]["commit"] is not None
    results = {result["path"]: result for result in found["results"]}
    assert list(results) == ["stock", "union", "CKV gather in windows", "CKV gather, query and token split"]
    for name, result in results.items():
        assert 0 < result["ms_p10"] <= result["ms"] <= result["ms_p90"] and result["stock_over_this"] > 0
        assert result["error"] <= result["tolerance"] == 1e-5
        assert result.get("selected_otherwise", 0) == result.get("missing", 0) == 0, name
    assert results["stock"]["against_one_device"]["selected_otherwise"] == 0
    # The program gathers a buffer of 128 rows on each rank, the cost model counts the 96 tokens that are there.
    padding = 2 * (128 * 192 - 96 // 2 * 192)
    for name, result in results.items():
        assert result["received_bytes"] - result["model_received_bytes"] == (padding if "CKV" in name else 0), name


def test_whole_steps(tmp_path):
    """The model's own steps, with its weights; in float32 selections stay."""
    found = report(tmp_path, "--scope", "step", "--only", "a layer ahead, query split")
    stock, other = found["results"]
    assert (stock["path"], other["path"]) == ("stock", "CKV gather a layer ahead, query split")
    assert other["share_selected_otherwise"] == 0 and other["error"] < 1e-3
    assert stock["ms"] > 0 and other["ms"] > 0


def test_paths_of_a_mesh(module):
    """Nothing that a mesh has no ranks for; everything named once; all but "auto" set by hand."""
    names = {mesh: [p.name for p in module.paths(qsplit=mesh[0], dcp=mesh[1])] for mesh in ((2, 1), (1, 2), (2, 4))}
    assert names[2, 1] == [
        "stock",
        "query split, contiguous",
        "query split, balanced",
        "token split",
        "query and token split",
        "auto",
    ]
    assert not any("query split" in name and "CKV" not in name and "keys" not in name for name in names[1, 2])
    assert {"index keys x 2, query split", "index keys x 4, query split"} <= set(names[2, 4])
    for found in names.values():
        assert found[0] == "stock" and len(set(found)) == len(found)
    for path in module.paths(qsplit=2, dcp=4)[:-1]:
        switches = (path.policy.query_split, path.policy.ckv_gather, path.policy.token_split, path.policy.prefetch)
        assert "auto" not in switches and path.exact == (path.name != "union")


def test_received_bytes(module):
    """Every kind of collective, every spelling of its groups, and one that repeats; another spelling is an error."""
    gather = "  %a = bf16[4,10,8]{2,1,0} all-gather(%x), channel_id=1, replica_groups="
    named = gather + "mesh['data'=1,'qsplit'=2,'dcp'=4] {'dcp'}, dimensions={0}"
    for text in (gather + "{{0,1,2,3},{4,5,6,7}}, dimensions={0}", gather + "[2,4]<=[8], dimensions={0}", named):
        assert module.received_bytes(text) == {"all-gather": 3 * 10 * 8 * 2}
    assert module.received_bytes(named, {"bf16[4,10,8]": 5}) == {"all-gather": 5 * 3 * 10 * 8 * 2}
    pairs = ", replica_groups={{0,1}}, dimensions={1}"
    text = "\n".join(
        [
            f"  %b = f32[6,2]{{1,0}} reduce-scatter(%x){pairs}, to_apply=%add",
            f"  %c = (u8[6]{{0}}, u8[6]{{0}}) all-to-all(%x, %y){pairs}",
            f"  %d = f32[8]{{0}} all-reduce(%x){pairs}, to_apply=%add",
            "  %e = f32[8]{0} add(%x, %y)",
        ]
    )
    assert module.received_bytes(text) == {"reduce-scatter": 48, "all-to-all": 6, "all-reduce": 32}
    with pytest.raises(ValueError, match="no replica groups"):
        module.received_bytes("  %a = bf16[4,10,8]{2,1,0} all-gather(%x), channel_id=1")
