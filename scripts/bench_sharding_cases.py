"""Cases of `bench_sharding.py`: the programs of the paths, their operands, and how each is checked."""

import argparse
import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bench_sharding_program as program
import jax
import jax.numpy as jnp
import numpy as np
from bench_case import Case
from bench_prefill import CONFIGS, NAMES, random_model
from bench_sharding_paths import Path as ShardedPath
from bench_sharding_paths import paths, received_bytes
from flax import nnx
from jax.sharding import Mesh

from dsa_jax.config import ModelConfig
from dsa_jax.config_layers import FULL, SPARSE
from dsa_jax.plan import AbstractStep, PlanOptions, abstract_step, last_step
from dsa_jax.step import Execution, StepRunner, run_step
from pallas_kernels.dispatch import compiling_for
from sharding.mesh import DCP, QSPLIT
from sharding.policy import Decision

TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}  # of the norm; a path rounds to the dtype at other places than another
STEP_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.3}


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
