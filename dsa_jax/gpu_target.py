"""GPUs that programs are compiled for and planned for without being there.

XLA compiles for a GPU it is told about: no driver and no device are needed, only jax's CUDA plugin wheels, and `ptxas`
from a CUDA toolkit or from the wheels `nvidia-cuda-nvcc` and `nvidia-nvvm`. The process must have
`JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1` in its environment before jax is imported; see `compile_environment`.
"""

import dataclasses
import functools
import importlib.util
from collections.abc import Mapping
from typing import Any

from jax.experimental import topologies

CUDA_PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")


@dataclasses.dataclass(frozen=True)
class GpuTarget:
    """A GPU.

    Attributes:
      name: Its name.
      compute_capability: Major and minor version.
      device_bytes: Memory that it is sold with, which plans are held against.
      description: What XLA needs to know of it, a GpuTargetConfigProto in text form.
    """

    name: str
    compute_capability: tuple[int, int]
    device_bytes: int
    description: str


H200 = GpuTarget(
    name="h200",
    compute_capability=(9, 0),
    device_bytes=141_000_000_000,
    description="""
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  core_count: 132 fpus_per_core: 128 registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 62914560 clock_rate_ghz: 1.98 device_memory_size: 150754820096
  cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }
}
platform_name: "CUDA" device_description_str: "NVIDIA H200"
dnn_version_info { major: 9 minor: 10 patch: 0 }
""",
)
TARGETS = {target.name: target for target in (H200,)}


def has_cuda_plugin() -> bool:
    """Whether jax can compile for CUDA here; a GPU is not needed."""
    for plugin in CUDA_PLUGINS:
        try:
            if importlib.util.find_spec(plugin) is not None:
                return True
        except ModuleNotFoundError:
            continue
    return False


def compile_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` for a child process that compiles for a GPU that is not there, and touches none that is."""
    return {**environment, "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "JAX_PLATFORMS": "cpu"}


@functools.cache
def target_devices(target: GpuTarget, count: int = 1) -> tuple[Any, ...]:
    """`count` devices of one host of the target, for compiling only."""
    topology = topologies.get_topology_desc(
        topology_name=target.name, platform="cuda", target_config=target.description, topology=f"1x1x{count}"
    )
    return tuple(topology.devices)
