"""Compiles functions for an H200 that is not there, and reads what the assembler said about their Mosaic kernels.

Needs no driver, only the CUDA plugin wheels of jax (`jax-cuda13-plugin` and `jax-cuda13-pjrt`, with `--no-deps`) and
`ptxas`, from a CUDA toolkit or from `nvidia-cuda-nvcc` and `nvidia-nvvm`. Tests ask with `require_cuda_plugin`.
"""

import dataclasses
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

from dsa_jax import gpu_target
from dsa_jax.gpu_target import H200, has_cuda_plugin

SMEM_LIMIT = 232_448  # bytes a block of sm_90 may use

_TARGETS = {"sm_90a": H200}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What the assembler reported for one kernel; register and spill counts are per thread, sizes in bytes."""

    name: str
    registers: int  # of the launch bound; set_max_registers moves them between warpgroups later
    spills: int  # bytes of spill stores plus spill loads
    stack: int
    smem: int  # scratch arrays; barriers come on top
    ptx: str


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled function and its Mosaic kernels in the order they were compiled."""

    executable: jax.stages.Compiled
    kernels: tuple[Kernel, ...]


require_cuda_plugin = pytest.mark.skipif(
    not has_cuda_plugin(), reason="the CUDA plugin wheels of jax are not installed"
)


def target_devices(target: str = "sm_90a", count: int = 1) -> tuple:
    """`count` devices of one host of the target, for compiling only."""
    return gpu_target.target_devices(_TARGETS[target], count)


def target_mesh(target: str = "sm_90a", shape: tuple[int, ...] = (1,), names: tuple[str, ...] = ("x",)):
    """A mesh with auto axes over devices of the target."""
    devices = target_devices(target, int(np.prod(shape)))
    return jax.sharding.Mesh(np.asarray(devices).reshape(shape), names)


def find_ptxas(capability: int) -> str:
    """The assembler on the path, or the one that Triton brings for GPUs of this compute capability (90 is 9.0)."""
    if found := shutil.which("ptxas"):
        return found
    import triton

    name = "ptxas-blackwell" if capability >= 100 else "ptxas"
    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def compile_for(target: str, fn: Callable, *args) -> Compiled:
    """Compile `fn` for a GPU that is not there and collect the resources of its Mosaic kernels.

    Args:
      target: "sm_90a".
      fn: A function of arrays; jitted here when it is not yet.
      *args: Arrays or `jax.ShapeDtypeStruct`s; those without a sharding are replicated on one device of the target.
    """
    replicated = jax.sharding.NamedSharding(target_mesh(target), jax.sharding.PartitionSpec())

    def on_target(x):
        sharding = getattr(x, "sharding", None) if isinstance(x, jax.ShapeDtypeStruct) else None
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding or replicated)

    fn = fn if hasattr(fn, "trace") else jax.jit(fn)
    with tempfile.TemporaryDirectory() as folder:
        # A program taken from the compilation cache would leave no dump behind.
        previous = jax.config.jax_enable_compilation_cache
        jax.config.update("jax_enable_compilation_cache", False)
        os.environ["MOSAIC_GPU_DUMP_TO"] = folder
        try:
            traced = fn.trace(*jax.tree.map(on_target, args))
            executable = traced.lower(lowering_platforms=("cuda",)).compile()
        finally:
            del os.environ["MOSAIC_GPU_DUMP_TO"]
            jax.config.update("jax_enable_compilation_cache", previous)
        reports = sorted(Path(folder).glob("*.ptxas"), key=lambda path: path.stat().st_mtime)
        kernels = tuple(_read_kernel(path) for path in reports)
    return Compiled(executable, kernels)


def assert_fits(compiled: Compiled, *, kernels: int = 1) -> None:
    """Assert that every kernel compiled without spills and within the shared memory of a block."""
    assert len(compiled.kernels) == kernels, [k.name for k in compiled.kernels]
    for kernel in compiled.kernels:
        assert kernel.spills == 0, f"{kernel.name}: {kernel.spills} bytes of spills"
        assert kernel.stack == 0, f"{kernel.name}: {kernel.stack} bytes of stack"
        assert kernel.smem <= SMEM_LIMIT, f"{kernel.name}: {kernel.smem} bytes of shared memory"


def _read_kernel(path: Path) -> Kernel:
    report = path.read_text()

    def total(pattern: str) -> int:
        found = re.findall(pattern, report)
        assert found, f"{pattern!r} is not in the assembler's report: {report!r}"
        return sum(int(x) for x in found)

    resources = path.with_suffix(".resources.txt")
    smem = re.search(r"smem_scratch_bytes=(\d+)", resources.read_text()) if resources.exists() else None
    return Kernel(
        name=path.stem,
        registers=total(r"Used (\d+) registers"),
        spills=total(r"(\d+) bytes spill stores") + total(r"(\d+) bytes spill loads"),
        stack=total(r"(\d+) bytes stack frame"),
        smem=int(smem[1]) if smem else 0,
        ptx=path.with_suffix(".ptx").read_text(),
    )
