"""Bytes of a device against context and DCP size, as `dsa-jax plan` counts them; needs no GPU.

    python scripts/bench_memory.py --config glm52-fp8 --tp 8 --dcp 1 2 4 8 --json docs/results/memory_glm52_fp8.json

What a plan counts, and how it compares with compiled steps, is in docs/full_size.md.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from bench_kernels import environment
from bench_prefill import NAMES, read_config

from dsa_jax.gpu_target import TARGETS
from dsa_jax.plan import PlanOptions, make_plan


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="glm52-fp8", help=f"one of {sorted(NAMES)}, or a config.json")
    parser.add_argument("--tp", type=int, default=8, help="tensor-parallel size")
    parser.add_argument("--dcp", type=int, nargs="+", default=[1, 2, 4, 8], help="decode-context-parallel sizes")
    parser.add_argument("--context", type=int, nargs="+", default=[1 << n for n in range(13, 21)])
    parser.add_argument("--chunk-size", type=int, default=8192, help="most rows of a step")
    parser.add_argument("--kv-format", default="fp8_ds_mla")
    parser.add_argument("--index-format", default="fp8")
    parser.add_argument("--device", choices=tuple(TARGETS), default="h200", help="GPU to plan for")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    return parser.parse_args(arguments)


def main() -> int:
    """Plan what the command line asks for."""
    args = parse()
    config, target = read_config(args.config, None), TARGETS[args.device]
    results: list[dict[str, Any]] = []
    for dcp in args.dcp:
        for context in args.context:
            options = PlanOptions(
                tp=args.tp,
                dcp=dcp,
                context=context,
                chunk_size=args.chunk_size,
                kv_format=args.kv_format,
                index_format=args.index_format,
            )
            plan = make_plan(config, options)
            result = {
                "dcp": dcp,
                "context": context,
                "weights_bytes": sum(plan.weights.values()),
                "cache_bytes": sum(plan.caches.values()),
                "workspace_bytes": sum(plan.workspaces.values()),
                "total_bytes": plan.total_bytes,
                "path": "CKV gather" if plan.decision.ckv_gather else "stock",
            }
            results.append(result)
            print(json.dumps(result), flush=True)
    if args.json is not None:
        report = {
            "environment": environment() | {"device": f"none: planned for {args.device}", "method": "dsa_jax.plan"},
            "setup": {
                "config": args.config,
                "tp": args.tp,
                "chunk_size": args.chunk_size,
                "kv_format": args.kv_format,
                "index_format": args.index_format,
                "device_bytes": target.device_bytes,
            },
            "memory": results,
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
