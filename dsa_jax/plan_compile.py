"""Compiling the step of a plan for GPUs that are not there, and what the compiler says of its memory.

`compile_plan` runs this module in a child process, since jax reads the environment that this needs when it is imported.
The child reads one JSON object from stdin and writes one to stdout.
"""

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from dsa_jax.config import ModelConfig
from dsa_jax.gpu_target import TARGETS, GpuTarget, compile_environment, has_cuda_plugin, target_devices
from dsa_jax.plan import AbstractStep, PlanOptions, abstract_step
from dsa_jax.step import Execution, run_step
from pallas_kernels.dispatch import compiling_for
from sharding.mesh import make_mesh
from sharding.policy import PrefillPolicy


@dataclasses.dataclass(frozen=True)
class CompiledPlan:
    """What the compiler says of one device.

    Attributes:
      compiled_temp_bytes: Temporaries at their fullest.
      compiled_argument_bytes: Weights, caches and inputs.
      compiled_output_bytes: Results that are no donated argument: the logits.
      compile_seconds: Time to trace, lower and compile.
    """

    compiled_temp_bytes: int
    compiled_argument_bytes: int
    compiled_output_bytes: int
    compile_seconds: float


def compile_abstract_step(step: AbstractStep, target: GpuTarget) -> jax.stages.Compiled:
    """Compile a step whose mesh is one of `target_devices`."""
    graphdef, state = nnx.split(step.model)
    with compiling_for(target.compute_capability):
        traced = run_step.trace(graphdef, state, step.inputs, step.cache, step.options)
        return traced.lower(lowering_platforms=("cuda",)).compile()


def compile_here(config: ModelConfig, options: PlanOptions, target: GpuTarget) -> tuple[CompiledPlan, str]:
    """Compile in this process, whose environment must be `compile_environment`.

    Returns:
      What the compiler says, and the optimised program as text.
    """
    started = time.perf_counter()
    devices = target_devices(target, options.tp * options.data)
    mesh = make_mesh(tp=options.tp, dcp=options.dcp, data=options.data, devices=devices)
    compiled = compile_abstract_step(abstract_step(config, options, mesh), target)
    seconds = time.perf_counter() - started
    memory = compiled.memory_analysis()
    assert memory is not None, "XLA always analyses programs for GPUs"
    report = CompiledPlan(
        compiled_temp_bytes=memory.temp_size_in_bytes,
        compiled_argument_bytes=memory.argument_size_in_bytes,
        compiled_output_bytes=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        compile_seconds=seconds,
    )
    return report, compiled.as_text() or ""


def compile_plan(raw_config: Mapping[str, Any], options: PlanOptions, target: GpuTarget) -> CompiledPlan:
    """Compile the last step of a plan in a child process.

    Args:
      raw_config: The parsed config.json.
      options: The plan's.
      target: The GPU.

    Raises:
      ValueError: jax's CUDA plugin is missing, or the compilation failed.
    """
    if not has_cuda_plugin():
        version = jax.__version__
        raise ValueError(
            "compiling for a GPU needs jax's CUDA plugin, which is not installed: pip install --no-deps"
            f" jax-cuda13-plugin=={version} jax-cuda13-pjrt=={version}"
        )
    request = {"config": dict(raw_config), "options": dataclasses.asdict(options), "target": target.name}
    done = subprocess.run(
        [sys.executable, "-m", "dsa_jax.plan_compile"],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        env=compile_environment(os.environ),
        check=False,
    )
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
        raise ValueError(f"compiling for {target.name} failed: {lines[-1]}")
    return CompiledPlan(**json.loads(done.stdout))


def options_from_dict(raw: Mapping[str, Any]) -> PlanOptions:
    """Options from what `dataclasses.asdict` makes of them."""
    execution = dict(raw["execution"])
    execution["policy"] = PrefillPolicy(**execution["policy"])
    return PlanOptions(**{**raw, "execution": Execution(**execution)})


def main() -> None:
    """Compile what stdin asks for."""
    request = json.load(sys.stdin)
    config, options = ModelConfig.from_dict(request["config"]), options_from_dict(request["options"])
    report, _ = compile_here(config, options, TARGETS[request["target"]])
    json.dump(dataclasses.asdict(report), sys.stdout)


if __name__ == "__main__":
    main()
