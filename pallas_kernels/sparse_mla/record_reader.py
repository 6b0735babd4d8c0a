"""The warpgroup that reads fp8_ds_mla records for the sparse MLA kernel: raw bytes in, bf16 blocks out.

A record is 512 e4m3, 4 float32 scales of 128 of them each, and 64 bf16 of rope (656 bytes; 528 without rope). Each warp
works for itself on 4 records at a time, a unit: it copies their bytes to its own part of shared memory with cp.async,
and turns them into rows of a block in the layout of the tensor cores. A unit takes the place of the same unit of the
block before, so raw bytes are asked for one block ahead. Only the cp.async groups of its threads and the barrier of
the warp order them.

    warp w, unit n    keys 16 n + 4 w + (0 to 3) of the block
    lane              key lane % 4, latent columns from 64 (lane // 4) on: one scale, 4 loads and 8 stores of 16 bytes

A value is e4m3 * scale in float32, rounded once to bf16: what `ckv_records.unpack` gives. Loads and stores are free of
bank conflicts: 8 lanes are 4 keys by 2 chunks of columns; unit u of a chunk of a row lies at unit u ^ (row % 8) of its
128 bytes, and the odd chunks go through their units in another order, so that 8 lanes store to 8 different units. Raw
bytes of key r are stored at 16-byte unit u ^ r for the same reason.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.sparse_mla import device_ops as dev
from pallas_kernels.sparse_mla import gather
from pallas_kernels.sparse_mla.tile_shape import (
    BLOCK,
    CHUNK,
    IDS,
    LATENT,
    LISTS_AHEAD,
    QUERY_FLAG,
    ROPE,
    SCALE_BYTES,
    Barrier,
    TileShape,
)
from pallas_kernels.sparse_mla.walk import Walk, blocks_of, pair

UNITS = 4  # of a block, 4 keys for each of 4 warps
UNIT_KEYS = 4
ROPE_AT = UNIT_KEYS * LATENT  # in a warp's unit: the latents of its keys, then their ropes, then their scales
SCALES_AT = ROPE_AT + UNIT_KEYS * 2 * ROPE
UNIT_BYTES = SCALES_AT + UNIT_KEYS * SCALE_BYTES
RAW_WORDS = UNITS * 4 * UNIT_BYTES // 4  # of the whole warpgroup
Pred = arith.CmpIPredicate


def _lane_and_warp():
    tid = dev.thread()
    return arith.remui(tid, dev.const(32)), arith.divui(tid, dev.const(32))


def _unit_address(raw, unit, warp):
    base = arith.addi(dev.shared_address(raw), arith.muli(warp, dev.const(UNIT_BYTES)))
    return arith.addi(base, arith.muli(unit, dev.const(4 * UNIT_BYTES)))


def _add(*terms):
    total = terms[0]
    for term in terms[1:]:
        total = arith.addi(total, term if isinstance(term, ir.Value) else dev.const(term))
    return total


def _shared_pointer(address):
    return llvm.inttoptr(llvm.PointerType.get(address_space=3), address)


def fetch(shape: TileShape):
    """Inline function `(kv, step, unit, raw, control)`: a warp asks for the raw bytes of its keys of a unit of a step.

    Zeros take the place of keys that are none, and of a step that is queries.
    """
    record = shape.row_bytes

    @dev.inline(arg_types=(dev.REF, dev.SCALAR, dev.SCALAR, dev.REF, dev.REF))
    def run(ctx, kv, step, unit, raw, control):
        unit = dev.scalar(unit)
        lane, warp = _lane_and_warp()
        to = _unit_address(raw, unit, warp)
        listed = arith.muli(arith.andi(dev.scalar(step), dev.const(LISTS_AHEAD - 1)), dev.const(BLOCK))
        in_block = arith.addi(arith.muli(unit, dev.const(4 * UNIT_KEYS)), arith.muli(warp, dev.const(UNIT_KEYS)))
        first = _add(listed, in_block, IDS)
        ids = dev.offset(mgpu_utils.memref_ptr(control), first, dev.i32())
        kv = dev.global_pointer(kv)
        byte = ir.IntegerType.get_signless(8)

        def copy(found, target, offset, wanted=None):
            """16 bytes of a record from `offset` on."""
            real = arith.cmpi(Pred.ult, found, dev.const(QUERY_FLAG))  # not -1, and no row of queries
            size = arith.select(real, dev.const(16), dev.const(0))
            at = arith.muli(dev.widen(arith.select(real, found, dev.const(0))), mgpu.c(record, dev.i64()))
            source = dev.offset(kv, arith.addi(at, dev.widen(offset)), byte)
            if wanted is None:
                dev.asm(None, [target, source, size], "cp.async.cg.shared.global [$0], [$1], 16, $2;", "r,l,r")
            else:
                code = "@$3 cp.async.cg.shared.global [$0], [$1], 16, $2;"
                dev.asm(None, [target, source, size, wanted], code, "r,l,r,b")

        # All loads before all copies: between a load and a copy ptxas waits.
        load = lambda i: llvm.load(dev.i32(), dev.offset(ids, i, dev.i32()))  # noqa: E731
        quad = llvm.load(ir.VectorType.get((UNIT_KEYS,), dev.i32()), ids)
        of_rope, of_scales = load(arith.divui(lane, dev.const(8))), load(arith.andi(lane, dev.const(UNIT_KEYS - 1)))
        sixteen = arith.muli(lane, dev.const(16))
        for key in range(UNIT_KEYS):
            swizzled = arith.muli(arith.xori(lane, dev.const(key)), dev.const(16))
            copy(vector.extract(quad, [], [key]), _add(to, swizzled, key * LATENT), sixteen)
        if shape.rope:
            part = arith.muli(arith.remui(lane, dev.const(8)), dev.const(16))
            copy(of_rope, _add(to, sixteen, ROPE_AT), _add(part, LATENT + SCALE_BYTES))
        first_lanes = arith.cmpi(Pred.ult, lane, dev.const(UNIT_KEYS))
        copy(of_scales, _add(to, sixteen, SCALES_AT), dev.const(LATENT), first_lanes)
        dev.asm(None, [], "cp.async.commit_group;", "~{memory}")

    return run


@dev.inline(arg_types=())
def wait_unit(ctx):
    """Until the oldest unit asked for has arrived, for the whole warp."""
    dev.asm(None, [], f"cp.async.wait_group {UNITS - 1};", "~{memory}")
    dev.asm(None, [], "bar.warp.sync 0xffffffff;", "~{memory}")


@dev.inline(arg_types=())
def warp_sync(ctx):
    """All lanes have read the raw bytes."""
    dev.asm(None, [], "bar.warp.sync 0xffffffff;", "~{memory}")


def scaled_pair(word, high: bool, scale):
    """Two of the four e4m3 of a word times `scale`, as two bf16 in an i32."""
    half = "h" if high else "l"
    code = (
        "{ .reg .b16 l, h, x, y; .reg .b32 f, u, v; mov.b32 {l, h}, $1;"
        f" cvt.rn.f16x2.e4m3x2 f, {half}; mov.b32 {{x, y}}, f; cvt.f32.f16 u, x; cvt.f32.f16 v, y;"
        " mul.rn.f32 u, u, $2; mul.rn.f32 v, v, $2; cvt.rn.bf16x2.f32 $0, v, u; }"
    )
    return dev.asm_pure(dev.i32(), [word, scale], code, "=r,r,f")


def expand(shape: TileShape):
    """Inline function `(slot, unit, raw, ring, ropes)`: a warp turns its raw bytes into rows of the step's block."""
    chunks = LATENT // CHUNK

    @dev.inline(arg_types=(dev.SCALAR, dev.SCALAR, dev.REF, dev.TILED_REF, dev.TILED_REF))
    def run(ctx, slot, unit, raw, ring, ropes):
        slot, unit = dev.scalar(slot), dev.scalar(unit)
        lane, warp = _lane_and_warp()
        source = _unit_address(raw, unit, warp)
        vec4 = ir.VectorType.get((4,), dev.i32())
        load = lambda at: llvm.load(vec4, _shared_pointer(at))  # noqa: E731

        key = arith.andi(lane, dev.const(3))
        chunk, odd = arith.divui(lane, dev.const(4)), arith.andi(arith.divui(lane, dev.const(4)), dev.const(1))
        group = arith.divui(lane, dev.const(8))
        at = _add(source, arith.muli(key, dev.const(SCALE_BYTES)), arith.muli(group, dev.const(4)), SCALES_AT)
        scale = llvm.load(dev.f32(), _shared_pointer(at))
        block = arith.addi(dev.shared_address(ring), arith.muli(slot, dev.const(BLOCK * LATENT * 2)))

        def tile_row(first_tile, tiles: int, in_unit):
            """Address of a row of this unit in column tile 0, and its swizzle."""
            row = arith.addi(arith.muli(arith.andi(warp, dev.const(1)), dev.const(4)), in_unit)  # row % 8
            down = arith.addi(arith.muli(unit, dev.const(2)), arith.shrui(warp, dev.const(1)))  # row // 8
            down = arith.muli(down, dev.const(tiles))
            address = _add(first_tile, arith.muli(down, dev.const(gather.TILE_BYTES)), arith.muli(row, dev.const(128)))
            return address, row

        target, row = tile_row(block, chunks, key)
        target = arith.addi(target, arith.muli(chunk, dev.const(gather.TILE_BYTES)))
        target = _add(target, arith.muli(arith.xori(row, arith.muli(odd, dev.const(4))), dev.const(16)))
        values = _add(source, arith.muli(key, dev.const(LATENT)), arith.muli(chunk, dev.const(CHUNK)))
        values = _add(values, arith.muli(arith.xori(key, arith.muli(odd, dev.const(2))), dev.const(16)))
        following = load(values)
        for i in range(CHUNK // 16):
            found = following
            if i < CHUNK // 16 - 1:  # before the stores of this one, which no load is moved across
                following = load(arith.xori(values, dev.const(16 * (i + 1))))
            words = [vector.extract(found, [], [j]) for j in range(4)]
            pairs = [scaled_pair(word, high, scale) for word in words for high in (False, True)]
            for j in range(2):
                where = _shared_pointer(arith.xori(target, dev.const(16 * (2 * i + j))))
                llvm.store(vector.from_elements(vec4, pairs[4 * j : 4 * j + 4]), where, alignment=16)
        if shape.rope:
            in_unit, part = arith.divui(lane, dev.const(8)), arith.remui(lane, dev.const(8))
            first = arith.addi(dev.shared_address(ropes), arith.muli(slot, dev.const(BLOCK * ROPE * 2)))
            target, row = tile_row(first, 1, in_unit)
            target = arith.addi(target, arith.muli(arith.xori(part, row), dev.const(16)))
            found = load(_add(source, arith.muli(lane, dev.const(16)), ROPE_AT))
            llvm.store(found, _shared_pointer(target), alignment=16)

    return run


@dev.inline(arg_types=(dev.REF, dev.SCALAR))
def arrive_warp(ctx, barriers, index):
    """Each warp arrives once for each of its lanes."""
    dev.warp_arrive(arith.addi(dev.shared_address(barriers), arith.muli(dev.scalar(index), dev.const(8))), count=32)


def run(walk: Walk, registers: int, kv, q, ring, ropes, raw, control):
    """The warpgroup's whole work: for each tile its queries as they are, then its blocks of keys."""
    shape = walk.shape
    ask, write, copy_queries = fetch(shape), expand(shape), gather.query_copy(shape)
    plgpu.set_max_registers(registers, action="decrease")
    dev.wait(control, jnp.int32(Barrier.LISTS_STARTED), jnp.int32(0))

    def each_unit(visit):
        def body(unit, _):
            visit(unit)
            return ()

        lax.fori_loop(0, UNITS, body, ())

    def wait_free(step):
        slot, parity = pair(step)
        dev.wait(control, Barrier.READ + slot, 1 - parity)  # that of two steps before; at once for the first two
        return slot

    def queries_step(step):
        def skip(unit):
            wait_unit()
            ask(kv, step + 1, unit, raw, control)

        each_unit(skip)
        copy_queries(q, step, wait_free(step), ring, ropes, control)

    def block_step(_, step):
        slot = wait_free(step)

        def exchange(unit):
            wait_unit()
            write(slot, unit, raw, ring, ropes)
            warp_sync()
            ask(kv, step + 1, unit, raw, control)

        each_unit(exchange)
        arrive_warp(control, Barrier.BLOCK + slot)
        return step + 1

    def tile_step(n, step):
        queries_step(step)
        return lax.fori_loop(0, blocks_of(walk.keys_of(n)[1]), block_step, step + 1)

    each_unit(lambda unit: ask(kv, jnp.int32(0), unit, raw, control))
    lax.fori_loop(0, walk.trips, tile_step, jnp.int32(0))
    gather.drain()
