"""What the commands of the command line do."""

import argparse
import dataclasses
import json
import time

import numpy as np
from jax.sharding import Mesh

from dsa_jax import checkpoint, commands_profile
from dsa_jax.api import convert, default_tp, from_pretrained
from dsa_jax.commands_checks import available_devices, check_npz, check_switches, note_sampling, read_prompts
from dsa_jax.config import ModelConfig
from dsa_jax.config_flash import NO_INDEXER
from dsa_jax.engine import EngineOptions
from dsa_jax.generate import GenerateOptions, check_request, generate, stream
from dsa_jax.model import Model
from dsa_jax.prefill import Batch, nonfinite, prefill
from dsa_jax.sampling import SamplingConfig
from dsa_jax.step import Execution, StepRunner
from dsa_jax.tiny import write_tiny
from sharding.mesh import make_mesh
from sharding.policy import PrefillPolicy

POLICY_FLAGS = (
    "query_split",
    "ckv_gather",
    "prefetch",
    "token_split",
    "ckv_gather_min_tokens",
    "ckv_gather_max_tokens",
    "query_split_min_rows",
    "query_split_min_context",
)


def policy_from_flags(args: argparse.Namespace) -> PrefillPolicy:
    """The policy that the flags describe; flags that are not given leave what `--policy` says."""
    base = PrefillPolicy.stock() if args.policy == "stock" else PrefillPolicy()
    given = {name: getattr(args, name) for name in POLICY_FLAGS if getattr(args, name) is not None}
    policy = dataclasses.replace(base, index_replicas=args.index_replicas, **given)
    check_switches(args, policy)
    return policy


def execution_from_flags(args: argparse.Namespace) -> Execution:
    """How steps run, as the flags say."""
    return Execution(policy=policy_from_flags(args), expert_exchange=args.expert_exchange)


def _engine_options(args: argparse.Namespace) -> EngineOptions:
    return EngineOptions(
        chunk_size=args.chunk_size,
        page_size=args.page_size,
        kv_format=args.kv_format,
        index_format=args.index_format,
        interleave=args.interleave,
        index_replicas=args.index_replicas,
        execution=execution_from_flags(args),
    )


def _mesh(args: argparse.Namespace, config: ModelConfig) -> Mesh:
    devices = available_devices()
    tp = default_tp(config, len(devices) // args.data) if args.tp is None else args.tp
    return make_mesh(tp=tp, dcp=args.dcp, data=args.data, devices=devices)


def _config(args: argparse.Namespace) -> ModelConfig:
    return ModelConfig.from_folder(args.checkpoint, latent_norm_eps=args.latent_norm_eps)


def _load(args: argparse.Namespace, mesh: Mesh) -> Model:
    options = {"weights": args.weights, "fp8_matmul": args.fp8_matmul, "latent_norm_eps": args.latent_norm_eps}
    return from_pretrained(args.checkpoint, mesh, args.dtype, progress=True, **options)


def run_generate(args: argparse.Namespace) -> None:
    """`dsa-jax generate`."""
    model, prompts, options = _generate(args)
    if args.profile is not None:
        commands_profile.profile_generate(args.profile, model, prompts, options)


def _generate(args: argparse.Namespace) -> tuple[Model, list[list[int]], GenerateOptions]:
    options = GenerateOptions(
        max_new_tokens=args.max_new_tokens,
        sampling=SamplingConfig(args.temperature, args.top_k, args.top_p, args.seed),
        ignore_eos=args.ignore_eos,
        max_pages=args.max_pages,
        engine=_engine_options(args),
    )
    note_sampling(args)
    config = _config(args)
    prompts, tokenizer = read_prompts(args, config)
    mesh = _mesh(args, config)
    check_request(config, options.engine.geometry_for(config, mesh, args.dtype), prompts, options)
    model = _load(args, mesh)
    if tokenizer is not None and not args.json:
        text = tokenizer.stream()
        for event in stream(model, prompts, options):
            print(text.push(event.token), end="", flush=True)
        print(text.finish())
        return model, prompts, options
    result = generate(model, prompts, options)
    if args.json:
        output = dataclasses.asdict(result)
        if tokenizer is not None:
            output["text"] = [tokenizer.decode(tokens) for tokens in result.tokens]
        print(json.dumps(output))
        return model, prompts, options
    for tokens in result.tokens:
        print(json.dumps(tokens))
    print(
        f"{sum(map(len, result.tokens))} tokens, first after {result.ttft_s:.3f} s,"
        f" {result.tokens_per_s:.1f} tokens/s; compiled for {result.compile_s:.1f} s"
    )
    return model, prompts, options


def run_prefill(args: argparse.Namespace) -> None:
    """`dsa-jax prefill`."""
    if args.out is not None:
        check_npz(args.out)
    options = _engine_options(args)
    config = _config(args)
    prompts, _ = read_prompts(args, config)
    mesh = _mesh(args, config)
    options.geometry_for(config, mesh, args.dtype)
    model = _load(args, mesh)
    batch = Batch.from_prompts(prompts, model, geometry=options.geometry(model))
    cache = batch.init_cache(model)
    runner = StepRunner(model, options.execution)
    selected = args.out is not None
    started = time.perf_counter()
    result = prefill(runner, batch, cache, chunk_size=args.chunk_size, logits=args.logits, return_selected=selected)
    seconds = time.perf_counter() - started - runner.compile_seconds
    if args.out is not None:
        arrays = {}
        if args.logits != "none":
            arrays |= {f"logits_{i}": logits for i, logits in enumerate(result.logits)}
        for i, selected in enumerate(result.selected or []):
            layers = model.config.sparse_layers
            arrays |= {f"selected_{i}_L{layer}": ids for layer, ids in zip(layers, selected, strict=True)}
        np.savez(args.out, **arrays)
    tokens = sum(len(request.tokens) for request in batch.requests)
    report = {
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_s": tokens / max(seconds, 1e-9),
        "compile_s": runner.compile_seconds,
        "nonfinite": nonfinite(result.logits),
    }
    if args.json:
        print(json.dumps(report))
    else:
        print(
            f"{tokens} tokens in {seconds:.3f} s, {report['tokens_per_s']:.1f} tokens/s;"
            f" compiled for {runner.compile_seconds:.1f} s"
        )
    if args.profile is not None:
        commands_profile.profile_prefill(args.profile, runner, prompts, options, args)


def run_tiny(args: argparse.Namespace) -> None:
    """`dsa-jax tiny`."""
    write_tiny(args.directory, args.family, args.seed)
    print(args.directory)


def run_convert(args: argparse.Namespace) -> None:
    """`dsa-jax convert`."""
    available_devices()
    convert(args.source, args.target, args.dtype, weights=args.weights, progress=True)
    print(args.target)


def _layer_runs(config: ModelConfig) -> list[str]:
    """Runs of equal layers, such as "3-5: shared index, sparse MLP"."""
    attention = ["linear attention" if kind == NO_INDEXER else f"{kind} index" for kind in config.indexer_types]
    kinds = [f"{kind}, {mlp} MLP" for kind, mlp in zip(attention, config.mlp_types, strict=True)]
    runs: list[str] = []
    first = 0
    for layer in range(1, len(kinds) + 1):
        if layer == len(kinds) or kinds[layer] != kinds[first]:
            name = f"{first}" if layer - 1 == first else f"{first}-{layer - 1}"
            runs.append(f"{name}: {kinds[first]}")
            first = layer
    return runs


def run_inspect(args: argparse.Namespace) -> None:
    """`dsa-jax inspect`."""
    config = ModelConfig.from_folder(args.checkpoint)
    if checkpoint.is_native(args.checkpoint):
        available_devices()
    description = checkpoint.describe(args.checkpoint)
    nonfinite = checkpoint.find_nonfinite(args.checkpoint, progress=True)
    if args.json:
        report = {
            "architecture": config.model_type,
            "layers": _layer_runs(config),
            "config": dataclasses.asdict(config),
            "checkpoint": dataclasses.asdict(description),
            "nonfinite": nonfinite,
        }
        print(json.dumps(report))
        return
    print(f"architecture: {config.model_type}, {config.num_layers} layers, {config.num_heads} heads")
    for run in _layer_runs(config):
        print(f"  layers {run}")
    print(f"parameters: {description.parameters:,} in {description.tensors} tensors ({description.layout})")
    for dtype, count in description.by_dtype.items():
        print(f"  {dtype}: {count.nbytes:,} bytes, {count.elements:,} elements, {count.tensors} tensors")
    for name, count in nonfinite.items():
        print(f"not finite: {name} holds {count} NaN or infinite values")
    if not nonfinite:
        print("every weight is finite")
