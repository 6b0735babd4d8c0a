"""Prefill on several devices, GPUs or virtual CPU ones, and see that it equals one device.

    python scripts/examples/prefill_on_devices.py --virtual 8 --tp 8 --dcp 2
    python scripts/examples/prefill_on_devices.py --tp 8 --dcp 8 --checkpoint DIR --dtype bfloat16

Without --checkpoint it makes a tiny random one. With the tiny model the result is compared with that of one device:
selections exactly, logits to rounding.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import dsa_jax
from dsa_jax import testing


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--virtual", type=int, metavar="N", help="use N virtual CPU devices")
    parser.add_argument("--tp", type=int, default=8, help="tensor-parallel size")
    parser.add_argument("--dcp", type=int, default=1, help="ranks that share the cache of a request; divides --tp")
    parser.add_argument("--checkpoint", type=Path, help="Hugging Face folder or native checkpoint")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--tokens", type=int, nargs="+", default=[40, 17], help="length of each prompt")
    return parser.parse_args(arguments)


def prefill(model: dsa_jax.Model, prompts: list[list[int]], runner: dsa_jax.StepRunner) -> dsa_jax.PrefillResult:
    """Prefill from an empty cache. The first call of each shape compiles; the cache is donated to every step."""
    batch = dsa_jax.Batch.from_prompts(prompts, model)
    return dsa_jax.prefill(runner, batch, batch.init_cache(model), logits="all", return_selected=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what the command line asks for."""
    args = parse(arguments)
    if args.virtual:
        testing.use_virtual_devices(args.virtual)
    mesh = dsa_jax.make_mesh(tp=args.tp, dcp=args.dcp)  # axes ("data", "qsplit", "dcp")
    if args.checkpoint is None:
        model = testing.tiny_model("glm52", mesh, dtype=args.dtype)
    else:
        model = dsa_jax.from_pretrained(args.checkpoint, mesh, args.dtype, progress=True)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, model.config.vocab_size, n).tolist() for n in args.tokens]

    # "auto" chooses the path of each step by a model of its cost; switches can be forced by name.
    policy = dsa_jax.PrefillPolicy(ckv_gather=True) if args.dcp > 1 else dsa_jax.PrefillPolicy()
    runner = dsa_jax.StepRunner(model, dsa_jax.Execution(policy=policy))
    result = prefill(model, prompts, runner)
    started = time.perf_counter()
    result = prefill(model, prompts, runner)
    seconds = time.perf_counter() - started
    print(f"{sum(args.tokens)} tokens on {mesh.size} devices in {seconds:.3f} s, compiled before")
    assert runner.decision is not None
    print(runner.decision.explain())

    if args.checkpoint is None and args.dtype == "float32":
        alone = testing.place_model(model, dsa_jax.make_mesh())
        testing.assert_same_prefill(result, prefill(alone, prompts, dsa_jax.StepRunner(alone)))
        print("equal to one device")


if __name__ == "__main__":
    main()
