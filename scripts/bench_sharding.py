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
import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bench_sharding_program as program
import jax
import jax.numpy as jnp
import numpy as np
from bench_case import Case
from bench_kernels import environment
from bench_prefill import CONFIGS, NAMES, peak_bytes, random_model
from bench_sharding_paths import Path as ShardedPath
from bench_sharding_paths import paths, received_bytes
from flax import nnx
from jax.sharding import Mesh

from dsa_jax.config import ModelConfig
from dsa_jax.config_layers import FULL, SPARSE
from dsa_jax.gpu_target import TARGETS, target_devices
from dsa_jax.plan import AbstractStep, PlanOptions, abstract_step, last_step
from dsa_jax.step import Execution, StepRunner, run_step
from pallas_kernels.dispatch import compiling_for
from sharding.mesh import DCP, QSPLIT, make_mesh
from sharding.policy import Decision

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
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}  # of the norm; a path rounds to the dtype at other places than another
STEP_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.3}
WARM_UP = 2


def read_config(args: argparse.Namespace) -> ModelConfig:
    """The configuration with `args.layers` layers: those that repeat, a full one and a mixture of experts first."""
    file = CONFIGS / f"{NAMES[args.config]}.json" if args.config in NAMES else Path(args.config)
    config = ModelConfig.from_dict(json.loads(file.read_text()))
    kinds = list(zip(config.indexer_types, config.mlp_types, strict=True))
    first = kinds.index((FULL, SPARSE)) if (FULL, SPARSE) in kinds else 0
    kinds = kinds[first : first + args.layers]
    if len(kinds) < args.layers:
        raise SystemExit(f"--layers {args.layers}: from layer {first} on the model has {len(kinds)}")
    return dataclasses.replace(
        config,
        num_layers=args.layers,
        indexer_types=tuple(kind for kind, _ in kinds),
        mlp_types=tuple(kind for _, kind in kinds),
        max_position_embeddings=max(config.max_position_embeddings, max(args.history) + args.chunk_size),
    )


def plan(
    config: ModelConfig, mesh: Mesh, path: ShardedPath, history: int, args: argparse.Namespace
) -> tuple[AbstractStep, PlanOptions]:
    """The step of one chunk behind `history` tokens on a path, as shapes."""
    options = PlanOptions(
        tp=args.tp,
        dcp=args.dcp,
        context=history + args.chunk_size,
        chunk_size=args.chunk_size,
        dtype=args.dtype,
        kv_format=args.kv_format,
        index_format=args.index_format,
        page_size=args.page_size,
        interleave=args.interleave,
        index_replicas=path.policy.index_replicas,
        execution=Execution(policy=path.policy, implementation=args.implementation),
    )
    return abstract_step(config, options, mesh), options


def model_costs(decision: Decision, config: ModelConfig) -> dict[str, float]:
    """What the cost model says of all layers on the path that was decided."""
    costs = {c.name.partition(":")[0]: c.cost for c in decision.candidates if c.cost and decision.chose(c)}
    full = config.indexer_types.count(FULL)
    index, attention = costs["indexer"], costs["attention"]
    return {
        "model_received_bytes": full * index.received + config.num_layers * attention.received,
        "model_ms": (full * index.seconds + config.num_layers * attention.seconds) * 1e3,
    }


def window_repeats(step: AbstractStep, history: int) -> dict[str, int]:
    """How often the gather of a window runs in each layer; see `received_bytes`."""
    geometry, rows = step.cache.geometry, step.options.ckv_rows
    window = min(program.WINDOW, rows)
    kind = {"float32": "f32", "bfloat16": "bf16", "uint8": "u8"}[geometry.ckv.dtype.name]
    shape = f"{kind}[{geometry.dcp},{window},{geometry.ckv.record_width}]"
    return {shape: -(-math.ceil(history / geometry.dcp) // window)}


@dataclasses.dataclass
class Attempt:
    """A path on its way to a `Case`.

    Attributes:
      path: The path.
      info: What is reported of it.
      lowered: Its program, to be compiled.
      case: Makes the case of the compiled program.
    """

    path: ShardedPath
    info: dict[str, Any]
    lowered: jax.stages.Lowered
    case: Callable[[jax.stages.Compiled], Case]


@dataclasses.dataclass
class Stock:
    """What the other paths are compared with: outputs of the stock path, set by its own check."""

    outputs: Any = None


def attention_attempts(
    config: ModelConfig, mesh: Mesh, history: int, args: argparse.Namespace, target: Any = None
) -> Iterator[Attempt]:
    """Programs of the paths on operands that are made on the devices; as shapes for a target that is not there."""
    if config.index_kpool > 1:
        raise SystemExit("--scope attention is for models with an index key of each token; use --scope step")
    stock, operands, caches = Stock(), None, {}
    for path in chosen_paths(mesh, args):
        step, options = plan(config, mesh, path, history, args)
        geometry, replicas = step.cache.geometry, path.policy.index_replicas
        make = program.make_operands(config, geometry, jnp.dtype(args.dtype), rows=args.chunk_size, history=history)
        if target is not None:
            inputs, step_options, cache = step.inputs, step.options, step.cache
            operands = program.abstract_operands(make, mesh)
        else:
            inputs, step_options = prepare(step, options)
            operands = program.placed_operands(make, mesh) if operands is None else operands
            if replicas not in caches:
                caches[replicas] = program.random_cache(step.cache, mesh)
            cache = caches[replicas]
        run = program.attention_program(config, mesh, step.cache, inputs, step_options, windows=path.windows)
        lowered = lower(run, (inputs, cache, operands), target)
        received = received_bytes(
            lowered.as_text(dialect="hlo"), window_repeats(step, history) if path.windows else None
        )
        info = {"received_bytes": sum(received.values()), "received_by": received}
        info |= model_costs(step.options.decision, config)

        def case(compiled, path=path, given=(inputs, cache, operands), geometry=geometry, info=info) -> Case:
            def error(outputs) -> float:
                if stock.outputs is None:
                    stock.outputs = outputs
                    found = program.one_device_errors(config, geometry, given[2], outputs, history=history)
                    info["against_one_device"] = found
                    return math.inf if found["selected_otherwise"] else found["error"]
                (out, ids), (want, wanted) = outputs, stock.outputs
                if not path.exact:
                    dealt = {"dcp": geometry.dcp, "interleave": geometry.interleave}
                    info["missing"] = int(program.missing_in_union(ids, wanted, **dealt))
                    return math.inf if info["missing"] or not bool(jnp.isfinite(out).all()) else 0.0
                info["selected_otherwise"] = int(program.selected_otherwise(ids, wanted))
                return math.inf if info["selected_otherwise"] else float(program.relative_error(out, want))

            return Case(path.name, lambda: compiled(*given), error, TOLERANCE[args.dtype], extra=info)

        yield Attempt(path, info, lowered, case)


def step_attempts(
    config: ModelConfig, mesh: Mesh, history: int, args: argparse.Namespace, target: Any = None
) -> Iterator[Attempt]:
    """Whole steps of the model on each path."""
    model = None if target is not None else random_model(config, mesh)
    stock, caches = Stock(), {}
    for path in chosen_paths(mesh, args):
        if path.windows:  # Not a path of the model.
            continue
        step, options = plan(config, mesh, path, history, args)
        graphdef, state = nnx.split(step.model if model is None else model)
        replicas = path.policy.index_replicas
        if target is not None:
            inputs, step_options, cache = step.inputs, step.options, step.cache
        else:
            inputs, step_options = prepare(step, options)
            if replicas not in caches:
                caches[replicas] = program.random_cache(step.cache, mesh)
            cache = caches[replicas]
        step_options = dataclasses.replace(step_options, return_selected=True)
        traced = (graphdef, state, inputs, cache, step_options)
        lowered = lower(run_step, traced, target)
        info = model_costs(step.options.decision, config)

        def case(compiled, path=path, state=state, inputs=inputs, replicas=replicas, info=info) -> Case:
            def run():
                outputs = compiled(state, inputs, caches[replicas])
                caches[replicas] = outputs.cache  # The step wrote the chunk where it was; the old one is donated.
                return outputs.logits, outputs.selected[0]

            def error(outputs) -> float:
                logits, selected = outputs
                if stock.outputs is None:
                    stock.outputs = outputs
                    return 0.0 if bool(jnp.isfinite(logits).all()) else math.inf
                if not path.exact:
                    return 0.0 if bool(jnp.isfinite(logits).all()) else math.inf
                other = program.selected_otherwise(selected, stock.outputs[1])
                info["share_selected_otherwise"] = int(other) / selected.shape[0]
                return float(program.relative_error(logits, stock.outputs[0]))

            return Case(path.name, run, error, STEP_TOLERANCE[args.dtype], extra=info)

        yield Attempt(path, info, lowered, case)


ATTEMPTS = {"attention": attention_attempts, "step": step_attempts}


def chosen_paths(mesh: Mesh, args: argparse.Namespace) -> list[ShardedPath]:
    """The stock path and those whose names contain one of `--only`."""
    first, *others = paths(qsplit=mesh.shape[QSPLIT], dcp=mesh.shape[DCP])
    return [first] + [p for p in others if not args.only or any(text in p.name for text in args.only)]


def prepare(step: AbstractStep, options: PlanOptions):
    """The step's inputs on the devices and its static options."""
    geometry = step.cache.geometry
    planned = last_step(options, geometry, step.cache.pages)
    # Of one token in all rows, a mixture of experts would use a few of its experts.
    tokens = np.random.default_rng(0).integers(0, step.model.config.vocab_size, planned.inputs.tokens.shape)
    inputs = dataclasses.replace(planned.inputs, tokens=tokens.astype(np.int32))
    runner = StepRunner(step.model, options.execution)
    return runner.prepare(dataclasses.replace(planned, inputs=inputs), geometry)


def lower(run, given: tuple, target: Any) -> jax.stages.Lowered:
    """Lower a jitted function for the devices that are here, or for a target that is not."""
    if target is None:
        return run.lower(*given)
    with compiling_for(target.compute_capability):
        return run.trace(*given).lower(lowering_platforms=("cuda",))


def compile_all(attempts: Iterator[Attempt], jobs: int) -> list[tuple[Attempt, jax.stages.Compiled | Exception]]:
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
    for turn in range(WARM_UP + iters):
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
