"""Cases of sparse MLA: prefill over four kinds of selections beside FlashMLA, records, the gather alone, and decode.

What matters most comes first, so that a run with `--budget` loses the least. A case of fp8_ds_mla records, and with
`--variants` one of a schedule that is not the default, has the default on bf16 rows as its peer: their groups of calls
alternate, so that the ratio is that of one card at one clock.
"""

import functools
from collections.abc import Iterator

import gather_alone
import jax
import jax.numpy as jnp
import numpy as np
from bench_case import Case, Peer

from pallas_kernels import testing
from pallas_kernels.ckv_records import ckv_format, pack
from pallas_kernels.sparse_mla import mosaic_hopper, plan, reference, sparse_mla, union

K, WIDTH, LATENT = 2048, 576, 512
SCALE = WIDTH**-0.5
SAMPLE = 6  # rows that are compared with the reference
TOLERANCE = 5e-3  # of the norm; weights are rounded to bf16, and inputs are not small
FLASH_MLA_HEADS = 64  # it takes 64 or 128: fewer are padded
RECORDS = ckv_format("fp8_ds_mla", kv_lora_rank=LATENT, qk_rope_head_dim=WIDTH - LATENT)
ONE_ROPE = mosaic_hopper.Config(one_rope=True)
DIRECT = plan.Plan(1, 1, False)


@functools.cache
def _ids(kind: str, rows: int, keys: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    if kind == "sorted":
        return np.sort(_ids("random", rows, keys), axis=1)
    if kind == "window":
        return testing.window_ids(rng, rows, keys, K, window=min(keys, 8192))
    return {"random": testing.random_ids, "shared": testing.shared_ids}[kind](rng, rows, keys, K)


@functools.cache
def _kv(keys: int, records: bool) -> jax.Array:
    """The cache in bf16, or the same as records."""
    if records:
        return jax.jit(functools.partial(pack, RECORDS))(_kv(keys, False))
    return jax.random.normal(jax.random.key(0), (keys, WIDTH), jnp.bfloat16)


@functools.cache
def _program(chosen: plan.Plan, config: mosaic_hopper.Config | None, records: bool):
    """Compiled once for all selections of a size."""
    return jax.jit(
        functools.partial(
            plan.sparse_mla,
            softmax_scale=SCALE,
            num_valid=None,
            out_dtype=jnp.dtype(jnp.bfloat16),
            workspace_bytes=1 << 30,
            kv_format=RECORDS if records else None,
            plan=chosen,
            config=config,
        )
    )


@functools.cache
def _public(records: bool):
    """The public function with its own choice of everything; records are asked for by name."""
    options = dict(kv_format=RECORDS, implementation="mosaic_hopper") if records else {}
    return jax.jit(functools.partial(sparse_mla, softmax_scale=SCALE, kv_lora_rank=LATENT, **options))


@functools.cache
def _reference(records: bool):
    return jax.jit(
        functools.partial(
            reference.sparse_mla,
            softmax_scale=SCALE,
            kv_lora_rank=LATENT,
            num_valid=None,
            kv_format=RECORDS if records else None,
            out_dtype=jnp.dtype(jnp.float32),
            workspace_bytes=1 << 30,
        )
    )


def _error(out, q, kv, ids, records: bool) -> float:
    rows = np.linspace(0, q.shape[0] - 1, min(SAMPLE, q.shape[0])).astype(np.int32)
    want, _ = _reference(records)(q[rows], kv, ids[rows])
    got, want = np.asarray(out[0][rows].astype(jnp.float32), np.float64), np.asarray(want, np.float64)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def _flash_mla(rows: int, keys: int, heads: int, ids: np.ndarray) -> Peer:
    import inspect

    import flash_mla  # pyright: ignore[reportMissingImports]
    import torch  # pyright: ignore[reportMissingImports]

    run = flash_mla.flash_mla_sparse_fwd
    legacy = {"use_legacy": True} if "use_legacy" in inspect.signature(run).parameters else {}
    padded = max(FLASH_MLA_HEADS, heads)
    torch.manual_seed(0)
    q = torch.randn(rows, padded, WIDTH, device="cuda", dtype=torch.bfloat16)
    kv = torch.randn(keys, 1, WIDTH, device="cuda", dtype=torch.bfloat16)
    listed = torch.tensor(ids, device="cuda")[:, None]
    what = "FlashMLA flash_mla_sparse_fwd" + (f", {heads} heads padded to {padded}" if padded != heads else "")
    return Peer(what, lambda: run(q, kv, listed, SCALE, **legacy), torch.cuda.synchronize)


class _Own:
    """Our default schedule on bf16 rows as the peer of another form."""

    def __init__(self, run):
        self.call, self.last = run, None

    def run(self):
        """Start one call."""
        self.last = self.call()
        return self.last

    def wait(self):
        """Wait for all calls: they run in order."""
        jax.block_until_ready(self.last)


def _own(run) -> Peer:
    own = _Own(run)
    return Peer("ours on bf16 rows", own.run, own.wait)


def _attention(rows, keys, heads, kind, *, form="bf16", as_given=False, flash_mla=False) -> Case:
    """One call; `form` is "bf16", "fp8 records" or "one rope slot"."""
    ids = _ids(kind, rows, keys)
    records = form == "fp8 records"
    q = jax.random.normal(jax.random.key(1), (rows, heads, WIDTH), jnp.bfloat16)
    kv, rows_of_bf16, listed = _kv(keys, records), _kv(keys, False), jnp.asarray(ids)
    chosen = DIRECT if as_given else plan.choose_plan(rows, heads, K)
    config = ONE_ROPE if form == "one rope slot" else None
    attend, default = _program(chosen, config, records), _program(chosen, None, False)
    peer = functools.partial(_flash_mla, rows, keys, heads, ids) if flash_mla else None
    if form != "bf16":
        peer = functools.partial(_own, lambda: default(q, rows_of_bf16, listed))
    record = RECORDS.bytes_per_token if records else 2 * WIDTH
    name = f"heads={heads} rows={rows} keys={keys} k={K} {kind} ids{'' if chosen.ordered else ' as given'}"
    return Case(
        name=name if form == "bf16" else f"{name}, {form}",
        run=lambda: attend(q, kv, listed),
        error=lambda out: _error(out, q, kv, listed, records),
        tolerance=TOLERANCE,
        flops=2.0 * rows * K * heads * (WIDTH + LATENT),
        bytes=float(rows) * (K * record + 2 * heads * (WIDTH + LATENT)),
        peer=peer,
        extra={"plan": repr(chosen)},
    )


def _gather(rows, keys, kind) -> Case:
    gather = jax.jit(gather_alone.build(rows, K, keys))
    kv, ids = _kv(keys, False), jnp.asarray(_ids(kind, rows, keys).reshape(-1))
    return Case(
        name=f"gather alone rows={rows} keys={keys} k={K} {kind} ids",
        run=lambda: gather(kv, ids),
        error=lambda out: 0.0 if out.shape == (rows,) else 1.0,
        tolerance=0.0,
        bytes=2.0 * rows * K * WIDTH,
    )


def _lists(rows, keys, group, kind) -> Case:
    ids = _ids(kind, rows, keys)
    make = jax.jit(union.build(rows, K, keys, group))
    listed, lengths = jnp.asarray(ids.reshape(-1)), jnp.full((rows,), K, jnp.int32)

    def error(out) -> float:
        want = np.unique(ids[:group])
        return float(int(out[2][0]) != want.size or not np.array_equal(np.asarray(out[0][: want.size]), want))

    return Case(
        name=f"lists of {group} rows rows={rows} keys={keys} k={K} {kind} ids",
        run=lambda: make(listed, lengths),
        error=error,
        tolerance=0.0,
        bytes=4.0 * rows * K,
    )


def _decode(rows, keys, heads, records=False) -> Case:
    ids = jnp.asarray(_ids("random", rows, keys))
    q = jax.random.normal(jax.random.key(1), (rows, heads, WIDTH), jnp.bfloat16)
    kv, rows_of_bf16 = _kv(keys, records), _kv(keys, False)
    attend, default = _public(records), _public(False)
    name = f"decode heads={heads} rows={rows} keys={keys} k={K} random ids"
    return Case(
        name=f"{name}, fp8 records" if records else name,
        run=lambda: attend(q, kv, ids),
        error=lambda out: _error(out, q, kv, ids, records),
        tolerance=TOLERANCE,
        flops=2.0 * rows * K * heads * (WIDTH + LATENT),
        bytes=float(rows) * K * (RECORDS.bytes_per_token if records else 2 * WIDTH),
        peer=functools.partial(_own, lambda: default(q, rows_of_bf16, ids)) if records else None,
        extra={"plan": repr(plan.choose_plan(rows, heads, K))},
    )


def _variants(rows, keys) -> Iterator[Case]:
    """The schedule with one slot for the rope, beside the default."""
    case = functools.partial(_attention, rows, keys, form="one rope slot")
    yield case(64, "random")
    yield case(64, "window", as_given=True)
    for kind in ("random", "window", "shared"):
        yield case(16, kind)
    yield case(128, "random")
    yield case(8, "window")


def cases(options) -> Iterator[Case]:
    """The cases, made one at a time so that only one holds memory."""
    rows, keys, peers = options.rows, options.keys, options.peers is not None
    case = functools.partial(_attention, rows, keys)
    fp8 = functools.partial(case, form="fp8 records")
    for heads in (64, 16):
        yield _gather(rows, keys, "random" if heads == 64 else "window")
        yield case(heads, "random", flash_mla=peers and heads == 64)
        yield fp8(heads, "random")
    if options.variants:
        yield from _variants(rows, keys)
    yield case(128, "random", flash_mla=peers)
    yield fp8(128, "random")
    for kind in ("window", "sorted"):
        yield case(64, kind, as_given=True, flash_mla=peers)
        yield fp8(64, kind, as_given=True)
    yield case(64, "shared", flash_mla=peers)
    yield fp8(64, "shared")
    for heads, kinds in ((16, ("window", "shared")), (8, ("random", "window", "shared")), (32, ("random", "shared"))):
        for kind in kinds:
            yield case(heads, kind)
            yield fp8(heads, kind)
    for decode_rows, heads in ((64, 64), (1, 64), (64, 16), (8, 8)):
        yield _decode(decode_rows, keys, heads)
        yield _decode(decode_rows, keys, heads, records=True)
    for group in (1, 4, 8):
        yield _lists(rows, keys, group, "random")
    yield _gather(rows, keys, "sorted")
