"""The gather of the sparse MLA kernel: reading lists ahead, and cp.async copies of listed rows into swizzled memory."""

import dataclasses
import functools
from collections.abc import Callable

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.sparse_mla import device_ops as dev
from pallas_kernels.sparse_mla.tile_shape import (
    BITS,
    BITS_OF_STEP,
    BLOCK,
    CHUNK,
    IDS,
    LATENT,
    LISTS_AHEAD,
    QUERY_FLAG,
    Barrier,
    TileShape,
)

TILE_BYTES = 1024  # 8 rows of 64 bf16 columns, 128-byte swizzled
PASSES = 4  # 128 threads copy 16 rows at a time, 8 threads a row
Pred = arith.CmpIPredicate

# The entry of a list that a thread holds: the id and the membership mask of key `thread % 64`.
ENTRY = plgpu.Layout.WG_STRIDED((2 * dev.WARPGROUP,), vec_size=1)
ENTRY_TYPE = dev.array_type((2 * dev.WARPGROUP,), jnp.int32, layout=ENTRY)


def _byte():
    return ir.IntegerType.get_signless(8)


def _pack(values):
    kind = ir.VectorType.get((1,), dev.i32())
    layout = mgpu.WGStridedFragLayout((2 * dev.WARPGROUP,), 1)
    array = mgpu.FragmentedArray.splat(dev.const(0), layout.shape, layout, is_signed=True)
    registers = array.registers.copy()
    registers.reshape(-1)[:] = [vector.from_elements(kind, [v]) for v in values]
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=True)


def list_reader(shape: TileShape):
    """Inline function `(lists, masks, tile, start, listed, count, block, active) -> entry of this thread's key`.

    Block 0 is the rows of queries of the tile, block i the i-th block of the `count` keys at `start` of the list. What
    lies beyond, is no row, or belongs to no tile (`active` 0) comes back as id -1 and mask 0.
    """

    @dev.inline(arg_types=(dev.REF, dev.REF) + (dev.SCALAR,) * 6, return_type=ENTRY_TYPE)
    def read(ctx, lists, masks, *scalars):
        tile, begin, listed, count, block, active = map(dev.scalar, scalars)
        key = arith.remui(dev.thread(), dev.const(BLOCK))
        start = arith.addi(
            arith.muli(dev.widen(listed), mgpu.c(shape.length, dev.i64())),
            dev.widen(begin),
        )
        position = arith.addi(arith.muli(arith.subi(block, dev.const(1)), dev.const(BLOCK)), key)
        inside = arith.andi(arith.cmpi(Pred.slt, position, count), arith.cmpi(Pred.sge, position, dev.const(0)))
        at = arith.addi(start, dev.widen(arith.select(inside, position, dev.const(0))))
        found = llvm.load(dev.i32(), dev.offset(dev.global_pointer(lists), at, dev.i32()))
        ok = arith.andi(inside, arith.cmpi(Pred.ult, found, dev.const(shape.keys)))
        mask = dev.const(1)
        if shape.masked:
            member = llvm.load(_byte(), dev.offset(dev.global_pointer(masks), at, _byte()))
            mask = arith.extui(dev.i32(), member)
        row = arith.addi(arith.muli(tile, dev.const(shape.rows)), key)
        query = arith.cmpi(Pred.eq, block, dev.const(0))
        real_row = arith.andi(
            arith.cmpi(Pred.slt, key, dev.const(shape.rows)), arith.cmpi(Pred.slt, row, dev.const(shape.queries))
        )
        found = arith.select(query, arith.ori(row, dev.const(QUERY_FLAG)), found)
        ok = arith.select(query, real_row, ok)
        ok = arith.andi(ok, arith.cmpi(Pred.ne, active, dev.const(0)))
        return _pack([arith.select(ok, found, dev.const(-1)), arith.select(ok, mask, dev.const(0))])

    return read


def publisher(shape: TileShape):
    """Inline function `(entry, step, control)`: the ids and membership bits of a step to shared memory."""
    words = 8 if shape.masked else 1

    @dev.inline(arg_types=(ENTRY, dev.SCALAR, dev.REF))
    def publish(ctx, entry, step, control):
        found, mask = dev.lanes(entry)
        tid = dev.thread()
        warp = arith.divui(tid, dev.const(32))
        slot = arith.andi(dev.scalar(step), dev.const(LISTS_AHEAD - 1))
        base = mgpu_utils.memref_ptr(control)
        holds = arith.cmpi(Pred.ult, tid, dev.const(BLOCK))
        at = arith.addi(arith.muli(slot, dev.const(BLOCK)), arith.addi(tid, dev.const(IDS)))
        with mgpu_utils.when(holds):
            llvm.store(found, dev.offset(base, at, dev.i32()))
        leads = arith.andi(holds, arith.cmpi(Pred.eq, arith.remui(tid, dev.const(32)), dev.const(0)))
        word = arith.addi(arith.muli(slot, dev.const(BITS_OF_STEP)), arith.addi(warp, dev.const(BITS)))
        for token in range(words):
            bit = arith.andi(mask, dev.const(1 << token))
            bits = dev.ballot(arith.cmpi(Pred.ne, bit, dev.const(0)))
            with mgpu_utils.when(leads):
                llvm.store(bits, dev.offset(base, arith.addi(word, dev.const(2 * token)), dev.i32()))

    return publish


@dataclasses.dataclass(frozen=True)
class Columns:
    """Some 64-column chunks of rows, and where they go in a slot of shared memory."""

    first: int
    count: int
    target: int
    target_chunks: int
    ahead: int | None = None  # a chunk that a later copy will want soon: it is brought to the L2 cache


def _copy_rows(columns: Columns, row_bytes: int, kv, q, step, target, slot, control, tid=None):
    """8 threads a row, 16 bytes each a chunk: unit u of row r lies at unit u ^ (r % 8) of its 128 bytes."""
    tid = dev.thread() if tid is None else tid
    unit = arith.remui(tid, dev.const(8))
    row = arith.divui(tid, dev.const(8))
    in_tile = arith.remui(row, dev.const(8))
    to = arith.addi(dev.shared_address(target), arith.muli(slot, dev.const(BLOCK * columns.target_chunks * 128)))
    to = arith.addi(to, arith.muli(arith.divui(row, dev.const(8)), dev.const(columns.target_chunks * TILE_BYTES)))
    to = arith.addi(to, arith.muli(in_tile, dev.const(128)))
    to = arith.addi(to, arith.muli(arith.xori(unit, in_tile), dev.const(16)))
    listed = arith.muli(arith.andi(step, dev.const(LISTS_AHEAD - 1)), dev.const(BLOCK))
    ids = dev.offset(mgpu_utils.memref_ptr(control), arith.addi(arith.addi(listed, row), dev.const(IDS)), dev.i32())
    kv, q = dev.global_pointer(kv), dev.global_pointer(q)
    rows = [llvm.load(dev.i32(), dev.offset(ids, dev.const(16 * p), dev.i32())) for p in range(PASSES)]
    for p, found in enumerate(rows):
        real = arith.cmpi(Pred.sge, found, dev.const(0))
        size = arith.select(real, dev.const(16), dev.const(0))
        flagged = arith.andi(found, dev.const(QUERY_FLAG))
        source = arith.select(arith.cmpi(Pred.ne, flagged, dev.const(0)), q, kv)
        at = arith.select(real, arith.andi(found, dev.const(QUERY_FLAG - 1)), dev.const(0))
        at = arith.addi(
            arith.muli(dev.widen(at), mgpu.c(row_bytes, dev.i64())), dev.widen(arith.muli(unit, dev.const(16)))
        )
        start = dev.offset(source, at, _byte())
        if columns.ahead is not None:
            first = arith.andi(real, arith.cmpi(Pred.eq, unit, dev.const(0)))
            later = dev.offset(start, dev.const(columns.ahead * 128), _byte())
            dev.asm(None, [later, first], "@$1 prefetch.global.L2 [$0];", "l,b")
        for chunk in range(columns.count):
            there = arith.addi(to, dev.const((p * 2 * columns.target_chunks + columns.target + chunk) * TILE_BYTES))
            here = dev.offset(start, dev.const((columns.first + chunk) * 128), _byte())
            dev.asm(None, [there, here, size], "cp.async.cg.shared.global.L2::128B [$0], [$1], 16, $2;", "r,l,r")


def _arrive_when_copied(control, barrier: int, slot):
    """Arrive, for this thread, on the barrier of the slot once its copies so far have landed."""
    address = arith.addi(dev.shared_address(control), arith.muli(arith.addi(slot, dev.const(barrier)), dev.const(8)))
    dev.asm(None, [address], "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];", "r")


COPY_TYPES = (dev.REF, dev.REF, dev.SCALAR, dev.SCALAR, dev.TILED_REF, dev.REF)


def _copy(columns: Columns, row_bytes: int, barrier: int):
    @dev.inline(arg_types=COPY_TYPES)
    def copy(ctx, kv, q, step, slot, target, control):
        step, slot = dev.scalar(step), dev.scalar(slot)
        _copy_rows(columns, row_bytes, kv, q, step, target, slot, control)
        _arrive_when_copied(control, barrier, slot)

    return copy


@dataclasses.dataclass(frozen=True)
class Copies:
    """Inline functions `(kv, q, step, slot, target, control)`: some columns of the rows of a step to a slot."""

    left: Callable
    right: Callable
    rope: Callable


def row_copies(shape: TileShape) -> Copies:
    """Copies of the two halves of the latent columns into the ring, and of the rope columns into theirs."""
    whole = LATENT // CHUNK
    half, ropes = whole // 2, shape.width // CHUNK - whole
    make = functools.partial(_copy, row_bytes=2 * shape.width)
    return Copies(
        left=make(Columns(0, half, 0, whole, whole if shape.rope else None), barrier=Barrier.LEFT),
        right=make(Columns(half, half, half, whole), barrier=Barrier.RIGHT),
        rope=make(Columns(whole, ropes, 0, 1), barrier=Barrier.ROPE),
    )


def query_copy(shape: TileShape):
    """Inline function `(q, step, slot, ring, ropes, control)`: all columns of a step that is the queries of a tile."""
    whole = LATENT // CHUNK

    @dev.inline(arg_types=(dev.REF, dev.SCALAR, dev.SCALAR, dev.TILED_REF, dev.TILED_REF, dev.REF))
    def copy(ctx, q, step, slot, ring, ropes, control):
        step, slot = dev.scalar(step), dev.scalar(slot)
        # Once a tile: addresses must not be made ahead and take registers from the loop over keys.
        tid = arith.remui(dev.asm(dev.i32(), [], "mov.u32 $0, %tid.x;", "=r"), dev.const(dev.WARPGROUP))
        _copy_rows(Columns(0, whole, 0, whole), 2 * shape.width, q, q, step, ring, slot, control, tid)
        if shape.rope:
            _copy_rows(Columns(whole, 1, 0, 1), 2 * shape.width, q, q, step, ropes, slot, control, tid)
        dev.asm(None, [], "cp.async.commit_group;", "~{memory}")
        _arrive_when_copied(control, Barrier.BLOCK, slot)

    return copy


@dev.inline(arg_types=())
def drain(ctx):
    """Wait for the copies that nobody waits for."""
    dev.asm(None, [], "cp.async.wait_all;", "~{memory}")
