"""The row gather of sparse MLA with nothing behind it: the floor that its time is compared with."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.sparse_mla import device_ops as dev

BLOCK, BUFFERS, CHUNKS, BLOCKS = 64, 2, 9, 132


@functools.lru_cache(maxsize=8)
def build(rows: int, k: int, keys: int):
    """The kernel `(kv [keys, 576] bf16, ids [rows * k] int32) -> [rows] float32` that copies each listed row on chip.

    Two buffers of 64 rows, 128 threads, 16 bytes a cp.async. All ids must be rows of kv, and k a multiple of 64.
    """

    @dev.inline(arg_types=(dev.REF, dev.REF, dev.REF, dev.SCALAR))
    def gather(ctx, kv, ids, ring, row):
        byte, tid = ir.IntegerType.get_signless(8), dev.thread()
        unit, first = arith.remui(tid, dev.const(8)), arith.divui(tid, dev.const(8))
        start = arith.muli(dev.widen(dev.scalar(row)), mgpu.c(k, dev.i64()))
        ids = dev.offset(dev.global_pointer(ids), start, dev.i32())
        base = arith.addi(dev.shared_address(ring), arith.muli(tid, dev.const(16)))
        with dev.loop(dev.const(0), dev.const(k // BLOCK), dev.const(1)) as block:
            to = arith.addi(base, arith.muli(arith.remui(block, dev.const(BUFFERS)), dev.const(BLOCK * 1152)))
            for p in range(4):
                key = arith.addi(arith.addi(arith.muli(block, dev.const(BLOCK)), first), dev.const(16 * p))
                found = llvm.load(dev.i32(), dev.offset(ids, key, dev.i32()))
                at = arith.muli(dev.widen(found), mgpu.c(1152, dev.i64()))
                at = arith.addi(at, dev.widen(arith.muli(unit, dev.const(16))))
                here = dev.offset(dev.global_pointer(kv), at, byte)
                for chunk in range(CHUNKS):
                    there = arith.addi(to, dev.const((p * CHUNKS + chunk) * 2048))
                    source = dev.offset(here, dev.const(128 * chunk), byte)
                    dev.asm(None, [there, source], "cp.async.cg.shared.global.L2::128B [$0], [$1], 16;", "r,l")
            dev.asm(None, [], "cp.async.commit_group; cp.async.wait_group 1;", "~{memory}")
        dev.asm(None, [], "cp.async.wait_all;", "~{memory}")

    @dev.inline(arg_types=(dev.REF, dev.REF, dev.SCALAR))
    def witness(ctx, ring, out, row):
        with dev.mgpu_utils.when(arith.cmpi(dev.Pred.eq, dev.thread(), dev.const(0))):
            value = llvm.load(dev.f32(), dev.mgpu_utils.memref_ptr(ring))
            llvm.store(value, dev.offset(dev.global_pointer(out), dev.scalar(row), dev.f32()))

    def body(kv, ids, out, ring):
        block = lax.axis_index("block")

        def step(n, _):
            row = block + n * BLOCKS
            gather(kv, ids, ring, row)
            witness(ring, out, row)
            return ()

        lax.fori_loop(0, (rows - 1 - block) // BLOCKS + 1, step, ())

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows,), jnp.float32),
        grid=(min(BLOCKS, rows),),
        grid_names=("block",),
        num_threads=1,
        thread_name="wg",
        scratch_types=[plgpu.SMEM((BUFFERS * BLOCK * 288,), jnp.float32)],
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=0,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )
