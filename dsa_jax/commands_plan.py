"""What `dsa-jax plan` does."""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from dsa_jax.api import is_nvfp4
from dsa_jax.commands import execution_from_flags
from dsa_jax.config import ConfigError, ModelConfig
from dsa_jax.gpu_target import TARGETS
from dsa_jax.plan import Plan, PlanOptions, make_plan
from dsa_jax.plan_compile import CompiledPlan, compile_plan

DECIDED = ("query_split", "partition", "merge", "index_shards", "ckv_gather", "token_split", "prefetch", "select_all")


def read_config(path: Path) -> dict[str, Any]:
    """The parsed config.json, from the file or from the folder that holds it."""
    file = path / "config.json" if path.is_dir() else path
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no file {file}") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{file} is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{file} must hold a JSON object")
    return raw


def _options(args: argparse.Namespace, config: ModelConfig) -> PlanOptions:
    """Options of a plan from the flags of the command line."""
    if args.weights == "fp8" and config.quantization is None:
        raise ValueError("--weights fp8: the configuration declares neither block FP8 nor NVFP4 weights")
    keeps_by_default = args.dtype != "float32" and not is_nvfp4(config)
    return PlanOptions(
        tp=args.tp or 1,
        dcp=args.dcp,
        data=args.data,
        context=config.max_position_embeddings if args.context is None else args.context,
        chunk_size=args.chunk_size,
        dtype=args.dtype,
        keep_fp8=args.weights == "fp8" or (args.weights == "auto" and keeps_by_default),
        fp8_matmul=args.fp8_matmul,
        kv_format=args.kv_format,
        index_format=args.index_format,
        page_size=args.page_size,
        interleave=args.interleave,
        index_replicas=args.index_replicas,
        execution=execution_from_flags(args),
    )


def run_plan(args: argparse.Namespace) -> None:
    """`dsa-jax plan`."""
    target = TARGETS[args.device]
    raw = read_config(args.checkpoint)
    config = ModelConfig.from_dict(raw, latent_norm_eps=args.latent_norm_eps)
    options = _options(args, config)
    plan = make_plan(config, options)
    compiled = compile_plan(raw, options, target) if args.compile else None
    report = describe(plan, target.device_bytes, compiled)
    print(json.dumps(report) if args.json else as_text(report))


def describe(plan: Plan, device_bytes: int, compiled: CompiledPlan | None) -> dict[str, Any]:
    """The plan as JSON."""
    report = {
        "weights_bytes": sum(plan.weights.values()),
        "cache_bytes": sum(plan.caches.values()),
        "workspace_bytes": sum(plan.workspaces.values()),
        "total_bytes": plan.total_bytes,
        "device_bytes": device_bytes,
        "fits": plan.total_bytes <= device_bytes,
        "policy": {name: getattr(plan.decision, name) for name in DECIDED},
        "reasons": plan.decision.explain().splitlines(),
        "predicted_ttft_s": plan.time.ttft_s,
        "predicted_layer_s": plan.time.layers_s,
        "weights": dict(plan.weights),
        "caches": dict(plan.caches),
        "workspaces": dict(plan.workspaces),
        "cache_tokens_lost": plan.cache_tokens_lost,
    }
    return report if compiled is None else report | dataclasses.asdict(compiled)


def as_text(report: dict[str, Any]) -> str:
    """The plan for a reader."""

    def gigabytes(count: int) -> str:
        return f"{count / 1e9:9.3f} GB"

    lines = ["bytes of a device"]
    for title, total, parts in (
        ("weights", "weights_bytes", "weights"),
        ("caches", "cache_bytes", "caches"),
        ("workspaces", "workspace_bytes", "workspaces"),
    ):
        lines.append(f"  {title:<24}{gigabytes(report[total])}")
        lines += [f"    {name:<22}{gigabytes(count)}" for name, count in report[parts].items()]
    verdict = "fits" if report["fits"] else "DOES NOT FIT"
    lines.append(f"  {'total':<24}{gigabytes(report['total_bytes'])} of {gigabytes(report['device_bytes'])}: {verdict}")
    lines.append(f"  gathered buffers take the room of {report['cache_tokens_lost']} cached tokens")
    if "compile_seconds" in report:
        lines.append(f"compiled in {report['compile_seconds']:.1f} s")
        lines.append(f"  {'weights, caches, inputs':<24}{gigabytes(report['compiled_argument_bytes'])}")
        lines.append(f"  {'temporaries':<24}{gigabytes(report['compiled_temp_bytes'])}")
    lines += ["path of the last step", *(f"  {reason}" for reason in report["reasons"])]
    lines.append("predicted time of a layer in the last step")
    lines += [f"  {name:<24}{seconds * 1e3:9.3f} ms" for name, seconds in report["predicted_layer_s"].items()]
    lines.append(f"predicted time to the first token: {report['predicted_ttft_s']:.2f} s")
    return "\n".join(lines)
