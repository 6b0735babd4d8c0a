"""The Hopper kernel of sparse MLA as PTX, run on the CPU by `ptx_machine.py` in its three schedules.

The schedule with the rope columns in a ring has run on a GPU; that it gives the right numbers here too is what the
machine is trusted by. The other two, one slot for the rope and fp8_ds_mla records, have not.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.ckv_records import ckv_format, pack, unpack
from pallas_kernels.sparse_mla import mosaic_hopper
from pallas_kernels.sparse_mla.tile_shape import TileShape
from tests.lowering import ptx_machine, ptx_ops
from tests.lowering.topology import compile_for, require_cuda_plugin

pytestmark = [pytest.mark.aot, require_cuda_plugin]

SCALE, KEYS = 0.06, 300
CONFIGS = {
    "ring": mosaic_hopper.Config(),
    "one_rope": mosaic_hopper.Config(one_rope=True),
    "records": mosaic_hopper.RECORDS_CONFIG,
}


@dataclasses.dataclass(frozen=True)
class Problem:
    """Sizes of a call."""

    schedule: str
    heads: int
    rows: int
    k: int
    width: int = 576
    splits: int = 1
    blocks: int = 1

    @property
    def shape(self) -> TileShape:
        """As `plan.py` makes it, with neighbouring rows in one list where they fit a tile."""
        group = max(1, 64 // self.heads)
        lists = -(-self.rows // group)
        packed = self.schedule == "records"
        sizes = self.rows * self.heads, self.heads, group, lists, group * self.k, KEYS, self.splits
        return TileShape(*sizes, group > 1, self.width, packed)


@functools.cache
def compiled(problem: Problem):
    """The kernel's instructions."""
    shape = problem.shape
    config = dataclasses.replace(CONFIGS[problem.schedule], blocks=problem.blocks)
    entries = shape.lists * shape.length
    kv = (KEYS, shape.row_bytes) if shape.packed else (KEYS, shape.width)
    args = (
        jax.ShapeDtypeStruct(kv, jnp.uint8 if shape.packed else jnp.bfloat16),
        jax.ShapeDtypeStruct((entries,), jnp.int32),
        jax.ShapeDtypeStruct((entries if shape.masked else 4,), jnp.int8),
        jax.ShapeDtypeStruct((shape.lists,), jnp.int32),
        jax.ShapeDtypeStruct((shape.queries, shape.width), jnp.bfloat16),
    )
    (kernel,) = compile_for("sm_90a", mosaic_hopper.build(shape, SCALE, "float32", config), *args).kernels
    return ptx_ops.Compiled(kernel.ptx)


def parameters(shape: TileShape) -> list[str]:
    """Names in the order in which the kernel's body first uses its arrays."""
    lists = ["masks", "lists"] if shape.masked else ["lists"]
    if shape.packed:
        return ["counts", "lse", "out", *lists, "kv", "q"]
    return ["counts", "lse", "kv", "q", "out", *lists]


def make_lists(shape: TileShape, ids: np.ndarray):
    """Lists, masks and counts as `union.py` makes them; entries beyond a count are ids that nothing may read."""
    lists = np.full((shape.lists, shape.length), KEYS - 1, np.int32)
    masks = np.full((shape.lists, shape.length), -1, np.int8)
    counts = np.zeros(shape.lists, np.int32)
    for i in range(shape.lists):
        rows = ids[i * shape.group : (i + 1) * shape.group]
        if not shape.masked:
            counts[i] = (rows[0] != -2).sum()  # -2 stands for what lies beyond the row's length
            lists[i, : rows.shape[1]] = rows[0]
            continue
        members: dict[int, int] = {}
        for bit, row in enumerate(rows):
            for key in row[(row >= 0) & (row < KEYS)]:
                members[int(key)] = members.get(int(key), 0) | 1 << bit
        counts[i] = len(members)
        lists[i, : counts[i]] = sorted(members)
        masks[i, : counts[i]] = np.asarray([members[key] for key in sorted(members)], np.uint8).view(np.int8)
    return lists.reshape(-1), masks.reshape(-1), counts


def cache(problem: Problem, rng):
    """The cache as the kernel reads it, and its values in bf16."""
    values = rng.standard_normal((KEYS, problem.width)).astype(np.float32)
    if problem.schedule != "records":
        rows = values.astype(ml_dtypes.bfloat16)
        return rows.view(np.uint16), rows
    fmt = ckv_format("fp8_ds_mla", kv_lora_rank=512, qk_rope_head_dim=problem.width - 512)
    records = pack(fmt, jnp.asarray(values * rng.uniform(1e-3, 30, (KEYS, 1)).astype(np.float32)))
    return np.asarray(records), np.asarray(unpack(fmt, records, dtype=jnp.bfloat16))


def run(problem: Problem, kv, q, ids, **options):
    """Outputs [splits, T, H, 512] and lse [splits, T, H]."""
    shape = problem.shape
    lists, masks, counts = make_lists(shape, ids)
    rows = shape.splits * shape.queries
    arrays = dict(kv=kv, q=q.reshape(-1, problem.width).view(np.uint16), lists=lists, masks=masks, counts=counts)
    arrays |= dict(out=((rows, 512), np.float32), lse=((rows,), np.float32))
    grid = min(problem.blocks, shape.tiles)
    got = ptx_machine.run_kernel(compiled(problem), grid, arrays, parameters(shape), **options)
    parts = problem.splits, problem.rows, problem.heads
    return got["out"].reshape(*parts, 512), got["lse"].reshape(parts)


def merged(out, lse):
    """Outputs over parts of the lists."""
    weights = np.exp(lse - np.where(np.isneginf(lse.max(0)), 0, lse.max(0)))
    total = weights.sum(0)
    with np.errstate(divide="ignore"):
        return (weights[..., None] * out).sum(0) / np.maximum(total, 1e-30)[..., None], np.log(total) + lse.max(0)


def oracle(q, values, ids):
    """Float64 attention of each row to its ids."""
    out = np.zeros((*q.shape[:2], 512))
    lse = np.full(q.shape[:2], -np.inf)
    for t, row in enumerate(ids):
        row = row[(row >= 0) & (row < KEYS)]
        if row.size:
            logits = q[t].astype(np.float64) @ values[row].astype(np.float64).T * SCALE
            top = logits.max(1, keepdims=True)
            p = np.exp(logits - top)
            out[t] = p @ values[row, :512].astype(np.float64) / p.sum(1, keepdims=True)
            lse[t] = (np.log(p.sum(1, keepdims=True)) + top)[:, 0]
    return out, lse


def inputs(problem: Problem, seed=0):
    """Cache, values, queries and ids with some that are none, an empty row and an empty list."""
    rng = np.random.default_rng(seed)
    kv, values = cache(problem, rng)
    q = rng.standard_normal((problem.rows, problem.heads, problem.width)).astype(ml_dtypes.bfloat16)
    ids = np.stack([rng.permutation(KEYS - 1)[: problem.k] for _ in range(problem.rows)]).astype(np.int32)
    ids[rng.random(ids.shape) < 0.05] = -1
    ids[0, 3], ids[0, 5] = KEYS, np.iinfo(np.int32).max
    if problem.shape.masked:
        ids[1], ids[4:8] = -1, -1  # a row that selects nothing, and a list without entries
    elif problem.rows > 2:
        ids[1:3] = -2  # lists without entries
    return kv, values, q, ids


PROBLEMS = [
    Problem("ring", heads=64, rows=4, k=150),
    Problem("ring", heads=16, rows=9, k=60, blocks=2),
    Problem("one_rope", heads=64, rows=4, k=150),
    Problem("one_rope", heads=16, rows=9, k=60, blocks=2),
    Problem("records", heads=64, rows=4, k=150),
    Problem("records", heads=16, rows=9, k=60, blocks=2),
    Problem("records", heads=128, rows=2, k=200, splits=3, blocks=2),
    Problem("records", heads=64, rows=2, k=130, width=512),
]


def name(x):
    """Of a test's parameter."""
    return f"{x.schedule}-{x.heads}-{x.width}-{x.splits}" if isinstance(x, Problem) else "late" if x else "at_once"


@pytest.mark.parametrize(
    ("problem", "lazy"), [(p, True) for p in PROBLEMS] + [(p, False) for p in PROBLEMS[3:6]], ids=name
)
def test_equals_float64_in_any_order_of_warps(problem, lazy):
    kv, values, q, ids = inputs(problem)
    out, lse = merged(*run(problem, kv, q, ids, lazy=lazy, seed=int(lazy)))
    want, want_lse = oracle(q, values, ids)
    size = np.abs(want).max()
    np.testing.assert_allclose(out, want, atol=3e-3 * size)  # weights are rounded to bf16
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(want_lse))
    finite = np.isfinite(want_lse)
    np.testing.assert_allclose(lse[finite], want_lse[finite], rtol=2e-6)
    assert (out[~finite] == 0).all()


@pytest.mark.parametrize("heads", [64, 16])
def test_records_give_the_bits_of_their_values_in_bf16(heads):
    rows = 4 if heads == 64 else 9
    packed = Problem("records", heads=heads, rows=rows, k=150 if heads == 64 else 60, blocks=1 if heads == 64 else 2)
    kv, values, q, ids = inputs(packed)
    plain = dataclasses.replace(packed, schedule="ring")
    for got, want in zip(
        run(packed, kv, q, ids, seed=3), run(plain, values.view(np.uint16), q, ids, seed=4), strict=True
    ):
        np.testing.assert_array_equal(got, want)


def test_every_code_and_scale_is_converted_as_unpack_does():
    """One key a row, so that the outputs are its values: all 256 codes under scales of many sizes."""
    problem = Problem("records", heads=64, rows=4, k=150)
    rng = np.random.default_rng(0)
    kv = np.zeros((KEYS, 656), np.uint8)
    kv[:, :512] = rng.permuted(np.tile(np.arange(256), 2)[None].repeat(KEYS, 0), axis=1)
    kv[:, :512][kv[:, :512] & 127 == 127] = 0  # no NaN
    scales = np.exp2(rng.uniform(-120, 110, (KEYS, 4))).astype(np.float32)
    scales[0], scales[1] = 0, 1
    kv[:, 512:528] = scales.view(np.uint8)
    q = np.zeros((4, 64, 576), ml_dtypes.bfloat16)
    ids = np.full((4, 150), -1, np.int32)
    ids[:, 77] = 0, 1, 2, 299
    out, _ = run(problem, kv, q, ids)
    fmt = ckv_format("fp8_ds_mla", kv_lora_rank=512, qk_rope_head_dim=64)
    want = np.asarray(unpack(fmt, jnp.asarray(kv[ids[:, 77]]), dtype=jnp.bfloat16))[:, :512].astype(np.float32)
    np.testing.assert_array_equal(out[0], np.broadcast_to(want[:, None], (4, 64, 512)))


def test_nan_in_a_record_stays_with_the_rows_that_select_it():
    problem = Problem("records", heads=16, rows=9, k=60, blocks=2)
    kv, values, q, ids = inputs(problem)
    ids[np.isin(ids, (11, 12, 13))] = -1
    kv = kv.copy()
    kv[11, 5], kv[12, 512:516], kv[13] = 0x7F, 255, 255  # a value, a scale, everything
    ids[6, 10] = 11
    out, lse = run(problem, kv, q, ids)
    want, _ = oracle(q, values, ids)
    assert np.isnan(lse[0, 6]).all() and np.isnan(out[0, 6]).any(-1).all()
    others = np.arange(9) != 6
    np.testing.assert_allclose(out[0, others], want[others], atol=3e-3 * np.abs(want).max())


def test_shared_memory_is_read_and_written_without_bank_conflicts(monkeypatch):
    """16 bytes a lane are four turns of 8 lanes, each of which must touch every bank once."""
    seen = {"read_shared": 0, "write_shared": 0}

    def watch(name):
        original = getattr(ptx_machine.Block, name)

        def checked(block, addresses, what):
            size = what if name == "read_shared" else what.shape[1]
            if size == 16 and len(addresses) == 32:
                seen[name] += 1
                for turn in np.asarray(addresses).astype(np.int64).reshape(4, 8):
                    places = np.unique(turn // 16)
                    assert len(np.unique(places % 8)) == len(places), f"conflict at {turn}"
            return original(block, addresses, what)

        monkeypatch.setattr(ptx_machine.Block, name, checked)

    watch("read_shared"), watch("write_shared")
    problem = PROBLEMS[4]
    kv, _, q, ids = inputs(problem)
    run(problem, kv, q, ids)
    # A block takes 4 units of a warp: 4 loads and 8 stores of latents, one of each of rope, and 5 copies.
    blocks = sum(-(-int(count) // 64) for count in make_lists(problem.shape, ids)[2])
    assert seen["read_shared"] >= blocks * 4 * 4 * 5
    assert seen["write_shared"] >= blocks * 4 * 4 * 14


def broken(problem: Problem, pattern: str, replacement: str):
    """The kernel with a part of its text replaced."""
    text, count = re.subn(pattern, replacement, compiled(problem).program.text)
    assert count
    return ptx_ops.Compiled(text)


def test_the_machine_notices_arrivals_that_never_come(monkeypatch):
    problem = PROBLEMS[4]
    kv, _, q, ids = inputs(problem)
    without = broken(problem, r"@%p\d+ mbarrier\.arrive[^;]*, 32;", "")  # those of the records' warpgroup
    monkeypatch.setattr(f"{__name__}.compiled", lambda _: without)
    with pytest.raises(ptx_machine.Deadlock):
        run(problem, kv, q, ids)


def test_the_machine_notices_waits_that_do_not_wait(monkeypatch):
    problem = PROBLEMS[4]
    kv, values, q, ids = inputs(problem)
    without = broken(problem, "@P1 bra", "bra")
    monkeypatch.setattr(f"{__name__}.compiled", lambda _: without)
    with pytest.raises(AssertionError):  # a row that is none is read, or the numbers are wrong
        out, _ = merged(*run(problem, kv, q, ids))
        np.testing.assert_allclose(out, oracle(q, values, ids)[0], atol=0.1)
