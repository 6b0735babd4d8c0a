"""The Triton form of sparse MLA compiles for GPUs that are not there, without spilling."""

import importlib.util
import re
import subprocess

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.sparse_mla import sparse_mla
from tests.lowering.topology import compile_for, find_ptxas, require_cuda_plugin

pytestmark = [
    pytest.mark.aot,
    require_cuda_plugin,
    pytest.mark.skipif(importlib.util.find_spec("jax_triton") is None, reason="jax_triton is not installed"),
]
SHARED_MEMORY = {80: 163 << 10, 89: 99 << 10, 100: 227 << 10, 120: 99 << 10}  # bytes of a block


@pytest.mark.parametrize("out_dtype", ["*bf16", "*fp32"])
@pytest.mark.parametrize("capability", [80, 89, 100, 120])
def test_compiles_without_spills(capability, out_dtype, tmp_path, monkeypatch):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from pallas_kernels.sparse_mla import triton as kernels

    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))  # jax_triton turns the cache off
    arrays = {"q": "*bf16", "kv": "*bf16", "ids": "*i32", "num_valid": "*i32"}
    arrays |= {"out": out_dtype, "lse": "*fp32"}
    constants = {"LOG2_SCALE": 0.06, "KEYS": 131072, "HEADS": 8, "LISTED": 2048, "LATENT": 512, "ROPE": 64}
    constants |= {"BLOCK_HEADS": kernels.BLOCK_HEADS, "BLOCK_KEYS": kernels.BLOCK_KEYS}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(arrays.values()) if kind.startswith("*")}
    source = ASTSource(
        fn=kernels.attention_kernel,
        signature=arrays | dict.fromkeys(constants, "constexpr"),
        constexprs=constants,
        attrs=aligned,
    )
    options = {"num_warps": kernels.WARPS, "num_stages": kernels.STAGES}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert compiled.metadata.shared <= SHARED_MEMORY[capability]
    ptx = compiled.asm["ptx"]
    assert "cp.async" in ptx and ("mma.sync" in ptx or "tcgen05.mma" in ptx)
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
    compiled = compile_for(
        "sm_90a",
        lambda q, kv, ids: sparse_mla(q, kv, ids, softmax_scale=0.1, kv_lora_rank=512, implementation="triton"),
        jax.ShapeDtypeStruct((70, 24, 576), jnp.bfloat16),
        jax.ShapeDtypeStruct((1000, 576), jnp.bfloat16),
        jax.ShapeDtypeStruct((70, 200), jnp.int32),
    )
    out, lse = compiled.executable.out_info
    assert out.shape == (70, 24, 512) and out.dtype == jnp.bfloat16
    assert lse.shape == (70, 24) and lse.dtype == jnp.float32
