"""Time the paths of sharded sparse attention against the stock path, all in one run on the devices that are here.

    python scripts/bench_sharding.py --tp 2 --dcp 2 --history 8192 65536 131072 --json docs/results/sharding_2gpu.json

"attention" times indexer and sparse attention of some layers on operands made on the devices: selections must be those
of the stock path exactly and values equal to rounding, and the stock path is held against one device on some rows.
"step" times whole steps of the model with random weights, where layers see what the layers before computed: in
bfloat16 a rounding moves selections there, so the share of rows is reported that select otherwise in the first layer.

A path that is wrong has no time. Calls of the paths take turns. With `--compile-for h200` the programs are compiled for
GPUs that are not there, and nothing is run (`JAX_PLATFORMS=cpu JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1`).
"""

import argparse
import concurrent.futures
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from bench_case import Case
from bench_kernels import environment
from bench_prefill import CONFIGS, NAMES, peak_bytes
from bench_sharding_cases import ATTEMPTS, TOLERANCE, Attempt, read_config
from jax.sharding import Mesh

from dsa_jax.config import ModelConfig
from dsa_jax.gpu_target import TARGETS, target_devices
from sharding.mesh import make_mesh

TINY_CONFIG = CONFIGS.parent / "oracle" / "glm52_tp8" / "single" / "config.json"
TINY = {
    "layers": 3,
    "history": [96],
    "chunk_size": 64,
    "page_size": 16,
    "iters": 2,
    "dtype": "float32",
    "kv_format": "auto",
    "index_format": "auto",
}
WARM_UP = 2


def compile_all(attempts: Iterator[Attempt], jobs: int) -> list[tuple[Attempt, jax.stages.Compiled | BaseException]]:
    """Compile side by side what is traced one after another; an exception where it failed."""
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        futures = [(attempt, pool.submit(attempt.lowered.compile)) for attempt in attempts]
        return [(attempt, future.exception() or future.result()) for attempt, future in futures]


def measure(cases: list[Case], iters: int) -> Iterator[dict[str, Any]]:
    """Check every case, then time those that are right in turns."""
    right, results = [], {}
    for case in cases:
        result: dict[str, Any] = {"path": case.name, "tolerance": case.tolerance}
        try:
            result["error"] = case.error(jax.block_until_ready(case.run()))
        except Exception as failure:  # One path that does not fit must not cost the others their numbers.
            result["failed"] = f"{type(failure).__name__}: {failure}"[:500]
        else:
            if result["error"] <= case.tolerance:
                right.append(case)
            else:
                result["failed"] = "the error is above the tolerance"
        results[case.name] = result | case.extra
    seconds: dict[str, list[float]] = {case.name: [] for case in right}
    for turn in range(WARM_UP + iters if right else 0):
        # Each turn starts with another path: none always follows the same one.
        for case in right[turn % len(right) :] + right[: turn % len(right)]:
            started = time.perf_counter()
            jax.block_until_ready(case.run())
            if turn >= WARM_UP:
                seconds[case.name].append(time.perf_counter() - started)
    for name, times in seconds.items():
        p10, median, p90 = np.percentile(times, [10, 50, 90]) * 1e3
        results[name] |= {"ms": round(median, 4), "ms_p10": round(p10, 4), "ms_p90": round(p90, 4)}
    if "ms" in results[cases[0].name]:
        for result in results.values():
            if "ms" in result:
                result["stock_over_this"] = round(results[cases[0].name]["ms"] / result["ms"], 4)
    yield from results.values()


def temp_bytes(compiled: jax.stages.Compiled) -> int | None:
    """Temporaries of a device at their fullest, where the compiler tells."""
    memory = compiled.memory_analysis()
    return None if memory is None else memory.temp_size_in_bytes


def run_case(scope: str, config: ModelConfig, mesh: Mesh, history: int, args: argparse.Namespace) -> list[dict]:
    """Results of all paths at one history."""
    target = TARGETS[args.compile_for] if args.compile_for else None
    results, cases = [], []
    for attempt, compiled in compile_all(ATTEMPTS[scope](config, mesh, history, args, target), args.compile_jobs):
        if isinstance(compiled, BaseException):
            failed = f"{type(compiled).__name__}: {compiled}"[:500]
            results.append({"path": attempt.path.name, "failed": failed, **attempt.info})
            continue
        attempt.info["temp_bytes"] = temp_bytes(compiled)
        attempt.info["mosaic_kernels"] = (compiled.as_text() or "").count("mosaic_gpu")
        if target is None:
            cases.append(attempt.case(compiled))
        else:
            results.append({"path": attempt.path.name, **attempt.info})
    if cases:
        results += measure(cases, args.iters)
    common = {"scope": scope, "history": history}
    return [common | result for result in results]


def table(results: list[dict[str, Any]]) -> str:
    """A Markdown table of one scope at one history."""
    lines = [
        "| path | ms | p10 | p90 | stock / this | MB received: program | model | model ms | error | temp MB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]

    def number(result: dict[str, Any], name: str, scale: float = 1.0, form: str = ".2f") -> str:
        value = result.get(name)
        return "-" if value is None else format(value * scale, form)

    for r in results:
        if "failed" in r:
            lines.append(f"| {r['path']} | failed: {r['failed'][:80]} |" + " - |" * 8)
            continue
        cells = [number(r, name, form=".3f") for name in ("ms", "ms_p10", "ms_p90", "stock_over_this")]
        cells += [number(r, name, 1e-6, ".1f") for name in ("received_bytes", "model_received_bytes")]
        cells += [
            number(r, "model_ms", form=".3f"),
            number(r, "error", form=".1e"),
            number(r, "temp_bytes", 1e-6, ".1f"),
        ]
        lines.append(f"| {r['path']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="glm52", help=f"one of {sorted(NAMES)}, or a config.json")
    parser.add_argument("--tiny", action="store_true", help="a small model and small defaults, for virtual devices")
    parser.add_argument("--scope", nargs="+", choices=sorted(ATTEMPTS), default=["attention"])
    parser.add_argument("--tp", type=int, required=True, help="tensor-parallel size")
    parser.add_argument("--dcp", type=int, default=1, help="decode-context-parallel size")
    parser.add_argument("--history", type=int, nargs="+", default=[8192, 65536, 131072, 524288])
    parser.add_argument("--chunk-size", type=int, default=8192, help="rows of the step behind the history")
    parser.add_argument("--layers", type=int, default=4, help="in GLM-5.2 one that selects and three that share")
    parser.add_argument("--iters", type=int, default=20, help="timed calls of each path")
    parser.add_argument("--only", action="append", metavar="TEXT", help="stock and paths whose name contains this")
    parser.add_argument("--dtype", choices=sorted(TOLERANCE), default="bfloat16")
    parser.add_argument("--kv-format", default="bf16")
    parser.add_argument("--index-format", default="fp8")
    parser.add_argument("--page-size", type=int, default=64, help="tokens of a page on each DCP rank")
    parser.add_argument("--interleave", type=int, default=1)
    parser.add_argument("--implementation", help="of the kernels; default: the fastest that the device supports")
    parser.add_argument("--compile-for", choices=sorted(TARGETS), help="compile for this GPU and run nothing")
    parser.add_argument("--compile-jobs", type=int, default=4, help="programs that compile side by side")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there after each history")
    if parser.parse_known_args(arguments)[0].tiny:
        parser.set_defaults(config=str(TINY_CONFIG), **TINY)
    return parser.parse_args(arguments)


def main() -> int:
    """Measure what the command line asks for; 1 when a path failed."""
    args = parse()
    devices = target_devices(TARGETS[args.compile_for], args.tp) if args.compile_for else None
    mesh, config = make_mesh(tp=args.tp, dcp=args.dcp, devices=devices), read_config(args)
    report: dict[str, Any] = {
        "environment": environment() | {"method": f"{args.iters} calls of each path in turns, each waited for"},
        "devices": args.tp,
        "setup": {name: value for name, value in vars(args).items() if name not in ("json", "only")},
        "indexer_types": config.indexer_types,
        "results": [],
    }
    if args.compile_for:
        report["environment"]["device"] = f"none: compiled for {args.compile_for}"
    for scope in args.scope:
        for history in args.history:
            found = run_case(scope, config, mesh, history, args)
            report["results"] += found
            report["peak_bytes"] = peak_bytes() if devices is None else None
            print(f"\n{scope}, {args.chunk_size} rows behind {history}, tp={args.tp} dcp={args.dcp}\n\n{table(found)}")
            sys.stdout.flush()
            if args.json is not None:
                args.json.parent.mkdir(parents=True, exist_ok=True)
                args.json.write_text(json.dumps(report, indent=1) + "\n")
    return int(any("failed" in result for result in report["results"]))


if __name__ == "__main__":
    sys.exit(main())
