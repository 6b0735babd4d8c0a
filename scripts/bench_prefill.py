"""Time prefill and decoding of a model of real dimensions with random weights, layer by layer.

    python scripts/bench_prefill.py --config glm52 --layers 4 --tp 2 --dcp 2 --context 8192 32768 131072

Reports TTFT, TPOT and tokens/s (median and 99th percentile) with several numbers of requests in flight, the time of
each part of a step from the profiler, the memory's peak, and the share of what the cost model says is possible. The
first layers of a model are timed: layers are scanned, so the time grows with them and the compilation does not.
"""

import argparse
import dataclasses
import json
import math
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from make_synthetic_checkpoint import first_layers

from dsa_jax.config import ModelConfig
from dsa_jax.engine import Engine, EngineOptions
from dsa_jax.fp8_weights import FP8, fp8_candidates, fp8_parameters, published_fp8
from dsa_jax.model import Model, abstract_model, fill_parameters, parameter_specs
from dsa_jax.params import ParamSpec
from dsa_jax.plan_time import predict_time
from dsa_jax.profiling import profile
from dsa_jax.step import Execution, attention_facts
from sharding.mesh import DCP, QSPLIT, make_mesh
from sharding.policy import PrefillPolicy

CONFIGS = Path(__file__).parents[1] / "tests" / "fixtures" / "configs"
NAMES = {"glm5": "glm-5", "glm52": "glm-5.2", "glm52-fp8": "glm-5.2-fp8", "dsv32": "deepseek-v3.2"}


def read_config(name: str, layers: int | None) -> ModelConfig:
    """A published configuration by its short name, or a config.json; its first layers alone."""
    file = CONFIGS / f"{NAMES[name]}.json" if name in NAMES else Path(name)
    return ModelConfig.from_dict(first_layers(json.loads(file.read_text()), layers))


def hashed(*indices: jax.Array) -> jax.Array:
    """Bits uint32 that look random and depend on the indices alone, which broadcast against each other."""
    bits = jnp.uint32(0)
    for index in indices:
        bits = (bits ^ index.astype(jnp.uint32)) * jnp.uint32(2654435761)
        bits = bits ^ (bits >> 15)
    return bits


def uniform(bits: jax.Array) -> jax.Array:
    """Floats in [-0.5, 0.5) of random bits."""
    return (bits >> 8).astype(jnp.float32) * 2.0**-24 - 0.5


def random_parameter(name: str, spec: ParamSpec, mesh: Mesh) -> jax.Array:
    """Values that cost no memory to make: a hash of their position, and 1 for norms."""
    dtype = jnp.dtype(jnp.bfloat16) if spec.dtype is None else spec.dtype

    def make() -> jax.Array:
        if "norm" in name:
            return jnp.full(spec.shape, 0.0 if name.endswith("bias") else 1.0, dtype)
        if name.endswith("_scale_inv"):
            return jnp.full(spec.shape, 0.02, dtype)
        bits = hashed(*(jax.lax.broadcasted_iota(jnp.uint32, spec.shape, dim) for dim in range(len(spec.shape))))
        if dtype == FP8:
            # Without the highest bit of the exponent: at most 1.875, no NaN.
            return jax.lax.bitcast_convert_type(((bits >> 8) & 0xBF).astype(jnp.uint8), FP8)
        return uniform(bits).astype(dtype) * jnp.asarray(0.07, dtype)

    return jax.jit(make, out_shardings=NamedSharding(mesh, spec.spec))()


def random_model(config: ModelConfig, mesh: Mesh) -> Model:
    """A model with random weights, in FP8 where the published ones are."""
    model = abstract_model(config, mesh)
    if config.quantization is not None:
        kept = fp8_parameters(fp8_candidates(model), parameter_specs(model), published_fp8)
        model = abstract_model(config, mesh, kept)
    return fill_parameters(model, {n: random_parameter(n, s, mesh) for n, s in parameter_specs(model).items()})


@dataclasses.dataclass(frozen=True)
class Run:
    """Times of one run: seconds to each request's first token, between its tokens, and in all."""

    ttft: list[float]
    tpot: list[float]
    seconds: float


def serve(engine: Engine, prompts: list[list[int]], new_tokens: int) -> Run:
    """Serve prompts that arrive together."""
    numbers = [engine.add(prompt, max_new_tokens=new_tokens, ignore_eos=True) for prompt in prompts]
    started = time.perf_counter()
    last, ttft, tpot = dict.fromkeys(numbers, started), [], []
    first = set(numbers)
    while not engine.idle:
        for event in engine.step():
            now = time.perf_counter()
            (ttft if event.request in first else tpot).append(now - last[event.request])
            first.discard(event.request)
            last[event.request] = now
    return Run(ttft, tpot, time.perf_counter() - started)


def summary(values: list[float]) -> dict[str, float]:
    """Median and 99th percentile."""
    return {"median": float(np.median(values)), "p99": float(np.percentile(values, 99))} if values else {}


def peak_bytes() -> int | None:
    """Most bytes that a device has held, where the backend counts them."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    return max((s["peak_bytes_in_use"] for s in stats if "peak_bytes_in_use" in s), default=None)


def measure(model: Model, context: int, requests: int, args: argparse.Namespace) -> dict[str, Any]:
    """One line of the report."""
    config, mesh = model.config, model.mesh
    policy = PrefillPolicy.stock() if args.policy == "stock" else PrefillPolicy()
    options = EngineOptions(
        chunk_size=args.chunk_size,
        page_size=args.page_size,
        kv_format=args.kv_format,
        index_format=args.index_format,
        prefix_reuse=False,
        execution=Execution(policy=policy, implementation=args.implementation),
    )
    tokens_per_page = options.geometry(model).tokens_per_page
    engine = Engine(model, requests * -(-(context + args.new_tokens) // tokens_per_page), options)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, config.vocab_size, context).tolist() for _ in range(requests)]
    serve(engine, prompts, args.new_tokens)  # compiles
    runs = [serve(engine, prompts, args.new_tokens) for _ in range(args.repeats)]
    with tempfile.TemporaryDirectory() as folder:
        parts = profile(Path(folder), engine.runner, lambda: serve(engine, prompts, 1))
    geometry = engine.geometry
    predicted = predict_time(
        config,
        attention_facts(config, geometry, model.dtype),
        policy,
        qsplit=mesh.shape[QSPLIT],
        dcp=mesh.shape[DCP],
        context=context,
        chunk_size=args.chunk_size,
    )
    ttft = [t for run in runs for t in run.ttft]
    return {
        "context": context,
        "requests": requests,
        "ttft_s": summary(ttft),
        "tpot_s": summary([t for run in runs for t in run.tpot]),
        "tokens_per_s": summary([requests * (context + args.new_tokens) / run.seconds for run in runs]),
        "parts_s": parts,
        "programs": len(engine.runner.programs),
        "compile_s": engine.runner.compile_seconds,
        "peak_bytes": peak_bytes(),
        "predicted_ttft_s": predicted.ttft_s,
        "share_of_predicted": requests * predicted.ttft_s / max(ttft),
    }


def build_parser() -> argparse.ArgumentParser:
    """Flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help=f"one of {sorted(NAMES)}, or a config.json")
    parser.add_argument("--layers", type=int, help="keep the first layers only")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel size")
    parser.add_argument("--dcp", type=int, default=1, help="decode-context-parallel size")
    parser.add_argument("--context", type=int, nargs="+", default=[8192, 32768, 131072, 524288, 1048576])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4], help="requests in flight")
    parser.add_argument("--chunk-size", type=int, default=8192, help="most rows of a step")
    parser.add_argument("--new-tokens", type=int, default=16, help="tokens to decode")
    parser.add_argument("--repeats", type=int, default=5, help="timed runs")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--kv-format", default="auto")
    parser.add_argument("--index-format", default="auto")
    parser.add_argument("--policy", choices=("auto", "stock"), default="auto")
    parser.add_argument("--implementation", help="of the kernels; default: the fastest that the device supports")
    parser.add_argument("--json", type=Path, help="write the report to this file")
    return parser


def main() -> None:
    """Measure what the command line asks for."""
    args = build_parser().parse_args()
    config = read_config(args.config, args.layers)
    mesh = make_mesh(tp=args.tp, dcp=args.dcp)
    model = random_model(config, mesh)
    held = sum(
        math.prod(v.sharding.shard_shape(v.shape)) * v.dtype.itemsize
        for v in jax.tree.leaves(nnx.state(model, nnx.Param))
    )
    report: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "config": args.config,
        "layers": config.num_layers,
        "tp": args.tp,
        "dcp": args.dcp,
        "chunk_size": args.chunk_size,
        "weights_bytes_per_device": held,
        "cases": [],
    }
    failed = False
    for context in args.context:
        for requests in args.requests:
            try:
                case = measure(model, context, requests, args)
            except Exception as error:  # One case that does not fit must not lose the others.
                case = {"context": context, "requests": requests, "failed": f"{type(error).__name__}: {error}"[:500]}
                failed = True
            print(json.dumps(case), flush=True)
            report["cases"].append(case)
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    sys.exit(failed)


if __name__ == "__main__":
    main()
