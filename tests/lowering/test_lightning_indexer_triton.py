"""The indexer's Triton kernel compiles for GPUs that are not there, without spilling."""

import importlib.util
import re
import subprocess

import jax.numpy as jnp
import pytest

from pallas_kernels.lightning_indexer import lightning_indexer
from pallas_kernels.lightning_indexer.arg_specs import ARG_SPECS
from tests.lowering.topology import compile_for, find_ptxas, require_cuda_plugin

pytestmark = [
    pytest.mark.aot,
    require_cuda_plugin,
    pytest.mark.skipif(importlib.util.find_spec("jax_triton") is None, reason="jax_triton is not installed"),
]


@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize(
    ("capability", "instruction"),
    [(80, "mma.sync"), (89, "mma.sync"), (100, "tcgen05.mma"), (120, "mma.sync")],
)
def test_compiles_without_spills(capability, instruction, heads, tmp_path, monkeypatch):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from pallas_kernels.lightning_indexer import triton as kernels

    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))  # jax_triton turns the cache off
    arrays = {"q": "*bf16", "k": "*bf16", "weights": "*fp32", "key_start": "*i32", "key_end": "*i32"}
    arrays |= {"k_scale": "*fp32", "out": "*fp32"}
    constants = {"ROWS": 4096, "KEYS": 131072, "HEADS": heads, "DIM": 128, "SCALED": True, "CLEAN": True}
    constants |= {"BLOCK_ROWS": kernels.BLOCK_ROWS, "BLOCK_KEYS": kernels.BLOCK_KEYS}
    aligned = {(index,): [["tt.divisibility", 16]] for index in range(len(arrays))}
    source = ASTSource(
        fn=kernels.score_kernel,
        signature=arrays | dict.fromkeys(constants, "constexpr"),
        constexprs=constants,
        attrs=aligned,
    )
    options = {"num_warps": kernels.WARPS, "num_stages": kernels.STAGES}
    ptx = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["ptx"]
    assert instruction in ptx
    assert "cp.async" in ptx
    path = tmp_path / "kernel.ptx"
    path.write_text(ptx)
    target = re.search(r"\.target (sm_\w+)", ptx)
    assert target is not None
    report = subprocess.run(
        [find_ptxas(capability), "-v", f"-arch={target[1]}", str(path), "-o", str(tmp_path / "kernel.cubin")],
        capture_output=True,
        text=True,
        check=True,
    ).stderr
    assert "0 bytes spill stores, 0 bytes spill loads" in report


def test_lowers_inside_jit(monkeypatch):
    from jax_triton import triton_lib

    monkeypatch.setattr(triton_lib.triton_kernel_call_lib, "get_compute_capability", lambda device: 90)
    spec = next(spec for spec in ARG_SPECS if spec.name == "ragged fp8")
    *operands, scale = spec.shapes().values()
    compiled = compile_for(
        "sm_90a",
        lambda *args: lightning_indexer(*args[:-1], k_scale=args[-1], implementation="triton"),
        *operands,
        scale,
    )
    out = compiled.executable.out_info
    assert out.shape == (spec.rows, spec.keys) and out.dtype == jnp.float32
