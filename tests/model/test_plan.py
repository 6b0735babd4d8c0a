"""A plan counts what the loader and the cache really hold, and tells what fits."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from dsa_jax import plan_compile
from dsa_jax.api import from_pretrained
from dsa_jax.cache import init_cache
from dsa_jax.cli import main
from dsa_jax.config import ModelConfig
from dsa_jax.plan import PlanOptions, make_plan
from dsa_jax.plan_compile import options_from_dict
from dsa_jax.step import Execution
from sharding.mesh import make_mesh
from sharding.policy import PrefillPolicy
from tests.support import FIXTURES, ORACLE, geometry

CONFIGS = FIXTURES / "configs"
SMALL_FORMATS = {"kv_format": "fp8_ds_mla", "index_format": "fp8"}
MILLION = 1 << 20


def config(name: str) -> ModelConfig:
    """A published configuration."""
    return ModelConfig.from_dict(json.loads((CONFIGS / f"{name}.json").read_text()))


def on_first_device(arrays) -> int:
    """Bytes that the first device holds."""
    first = jax.devices()[0]
    return sum(s.data.nbytes for x in jax.tree.leaves(arrays) for s in x.addressable_shards if s.device == first)


@pytest.mark.parametrize("weights", ["fp8", "dequantized"])
def test_counts_what_is_loaded(weights):
    """Weights and caches of a loaded model, byte for byte."""
    folder = ORACLE / "glm5_fp8" / "single"
    mesh = make_mesh(tp=4, dcp=2)
    model = from_pretrained(folder, mesh, jnp.bfloat16, weights=weights)
    options = PlanOptions(tp=4, dcp=2, context=100, page_size=16, chunk_size=32, keep_fp8=weights == "fp8")
    plan = make_plan(ModelConfig.from_folder(folder), options)
    assert sum(plan.weights.values()) == on_first_device(nnx.state(model, nnx.Param))
    cache = init_cache(model.config, geometry(model), 4, mesh)
    assert plan.caches == {"ckv": on_first_device(cache.ckv), "index_keys": on_first_device(cache.index_keys)}


def test_glm52_on_eight_h200():
    """FP8 weights and a million tokens of fp8 cache fit; the same model in BF16 does not."""
    options = PlanOptions(tp=8, dcp=8, context=MILLION, **SMALL_FORMATS)
    plan = make_plan(config("glm-5.2-fp8"), options)
    assert 100e9 < plan.total_bytes < 120e9
    # 743.6e9 weights, of which an eighth, the latent projections and the indexers are on each device.
    assert plan.weights["float8_e4m3fn"] == pytest.approx(93.9e9, rel=0.01)
    assert plan.caches["ckv"] == 78 * 656 * MILLION // 8
    assert plan.caches["index_keys"] == 21 * 132 * MILLION // 8
    assert plan.decision.ckv_gather and plan.workspaces["gathered_history"] == MILLION * 656
    assert plan.cache_tokens_lost == pytest.approx(MILLION * 656 / ((78 * 656 + 21 * 132) / 8), abs=1)
    assert make_plan(config("glm-5.2"), options).total_bytes > 190e9


def test_deepseek_v32_on_eight_h200():
    """160K tokens at TP8 without DCP, in BF16 records."""
    plan = make_plan(config("deepseek-v3.2"), PlanOptions(tp=8, context=163840))
    assert plan.total_bytes < 141e9
    assert plan.workspaces["gathered_history"] == 262144 * 576 * 2  # one rank's buffer, a power of two


def test_predicted_times():
    """Longer prompts take longer, more than in proportion; scoring grows with the context, experts do not."""
    times = [make_plan(config("glm-5.2-fp8"), PlanOptions(tp=8, dcp=8, context=n)).time for n in (1 << 17, 1 << 19)]
    assert times[1].ttft_s > 4 * times[0].ttft_s > 0
    assert times[1].layers_s["indexer"] > 2 * times[0].layers_s["indexer"]
    assert times[1].layers_s["experts"] == times[0].layers_s["experts"]
    alone = make_plan(config("glm-5.2-fp8"), PlanOptions(tp=1, context=8192)).time
    assert alone.layers_s["collectives"] == 0 < times[0].layers_s["collectives"]


def test_policy_is_followed():
    """What the policy forbids is not planned, and its buffer is not counted."""
    options = PlanOptions(tp=8, dcp=4, context=1 << 17, execution=Execution(policy=PrefillPolicy.stock()))
    plan = make_plan(config("glm-5.2-fp8"), options)
    assert not plan.decision.ckv_gather and plan.workspaces["gathered_history"] == (1 << 15) * 576 * 2


def test_json(capsys, monkeypatch):
    """The keys that scripts rely on, with the compiler's beside them."""
    compiled = plan_compile.CompiledPlan(1, 2, 3, 4.0)
    monkeypatch.setattr("dsa_jax.commands_plan.compile_plan", lambda raw, options, target: compiled)
    flags = "--tp 8 --dcp 4 --context 131072 --chunk-size 4096 --kv-format fp8_ds_mla --compile --json"
    assert main(["plan", str(CONFIGS / "glm-5.2-fp8.json"), *flags.split()]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["total_bytes"] == sum(report[f"{part}_bytes"] for part in ("weights", "cache", "workspace"))
    assert report["device_bytes"] == 141_000_000_000 and report["fits"] is True
    assert report["policy"]["ckv_gather"] in (True, False) and any("attention" in line for line in report["reasons"])
    assert report["predicted_ttft_s"] > 0
    assert (report["compiled_temp_bytes"], report["compiled_argument_bytes"], report["compile_seconds"]) == (1, 2, 4.0)


def test_text_of_a_folder(capsys, tmp_path):
    """A folder stands for its config.json; the verdict is spelled out."""
    shutil.copyfile(CONFIGS / "glm-5.2.json", tmp_path / "config.json")
    assert main(["plan", str(tmp_path), "--tp", "8", "--dcp", "8"]) == 0
    assert "DOES NOT FIT" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tp", "8", "--dcp", "3"], "must be divisible"),
        (["--tp", "7"], "num_attention_heads=64 must be divisible"),
        (["--tp", "8", "--context", "2000000"], "exceeds the model's maximum"),
        (["--tp", "8", "--device", "h100"], "h100"),
        (["--tp", "8", "--compile"], "jax-cuda13-plugin"),
    ],
)
def test_mistakes(capsys, monkeypatch, flags, message):
    """One line for each."""
    monkeypatch.setattr(plan_compile, "has_cuda_plugin", lambda: False)
    try:
        code = main(["plan", str(CONFIGS / "glm-5.2-fp8.json"), *flags])
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    assert code == 2 and out == "" and len(err.strip().splitlines()) == 1 and message in err, err


def test_options_travel_to_the_child():
    """As JSON and back."""
    options = PlanOptions(tp=8, dcp=8, context=5, execution=Execution(policy=PrefillPolicy.stock(merge="owner")))
    assert options_from_dict(json.loads(json.dumps(dataclasses.asdict(options)))) == options
