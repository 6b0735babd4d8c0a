"""A ragged batch with its keys dealt to ranks, and the means to run a function on every rank."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sharding.local_keys import KeyLayout, key_layout
from sharding.mesh import DATA, TP_AXES
from sharding.ownership import owner_of, slot_mapping
from sharding.rows import row_positions, row_requests

# One program per case, so that a case costs one compilation.
COLLECTIVE = re.compile(
    r"= \(?(\w+\[[\d,]*\]).* (all-gather|all-to-all|reduce-scatter|all-reduce|collective-permute)\("
)


def i32(x):
    """An int32 array on the device."""
    return jnp.asarray(np.asarray(x), jnp.int32)


def on_every_rank(fn, mesh, specs, args, *, check_vma=True):
    """The jitted program that runs `fn` on every rank, and its placed arguments.

    What `fn` returns comes back stacked by rank: [data * qsplit * dcp, ...].
    """
    args = jax.tree.map(lambda spec, arg: place(mesh, spec, arg), specs, args, is_leaf=lambda x: isinstance(x, P))

    def local(*args):
        return jax.tree.map(lambda x: x[None], fn(*args))

    run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P((DATA, *TP_AXES)), check_vma=check_vma)
    return jax.jit(run), args


def place(mesh, spec, tree):
    """Put every array of `tree` on the mesh with one spec."""
    return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, spec)), tree)


def run_on_every_rank(fn, mesh, specs, args, *, check_vma=True):
    """Results of `fn` stacked by rank, as NumPy."""
    program, args = on_every_rank(fn, mesh, specs, args, check_vma=check_vma)
    return jax.tree.map(np.asarray, program(*args))


def collectives(program, args):
    """Collectives of a program before XLA's passes, as (name, first result's type)."""
    text = program.lower(*args).as_text(dialect="hlo")
    return sorted((name, kind) for kind, name in COLLECTIVE.findall(text))


@dataclasses.dataclass(frozen=True)
class Batch:
    """Requests of a step: some decode, some start, some go on, some are empty; padded rows at the end.

    Attributes:
      seq_lens: Tokens of each request with those of the step.
      query_lens: Tokens of each request in the step.
      rows: Rows of the step, padding included.
    """

    seq_lens: tuple[int, ...] = (60, 17, 0, 90, 3, 11)
    query_lens: tuple[int, ...] = (1, 1, 0, 13, 3, 11)
    rows: int = 35

    @property
    def starts(self):
        """`query_start_loc`."""
        return np.concatenate([[0], np.cumsum(self.query_lens)])

    @property
    def requests(self):
        """Request of each row."""
        return row_requests(self.starts, self.rows)

    @property
    def positions(self):
        """Position of each row."""
        return row_positions(np.array(self.seq_lens), self.starts, self.rows)

    def layout(self, ranks, interleave) -> KeyLayout:
        """Layout of the keys, on the device."""
        return jax.tree.map(i32, key_layout(np.array(self.seq_lens), ranks=ranks, interleave=interleave))

    @property
    def context_lens(self):
        """Tokens of each request before the step."""
        return np.array(self.seq_lens) - np.array(self.query_lens)

    def block_table(self, page_size, pages_per_request=24):
        """Pages in an order that is no order [requests, pages]."""
        total = len(self.seq_lens) * pages_per_request
        return np.random.default_rng(3).permutation(total).reshape(-1, pages_per_request)

    def pages(self, keys, lens, ranks, interleave, page_size, junk):
        """Caches of the ranks [ranks, pages, page_size, ...] that hold the first `lens` keys of each request."""
        table = self.block_table(page_size)
        out = np.full((ranks, table.size * page_size, *keys[0].shape[1:]), junk, keys[0].dtype)
        for request, length in enumerate(lens):
            positions = np.arange(length)
            for rank in range(ranks):
                slots = slot_mapping(
                    positions,
                    np.full_like(positions, request),
                    table,
                    rank,
                    ranks=ranks,
                    interleave=interleave,
                    page_size=page_size,
                )
                out[rank, slots[slots >= 0]] = keys[request][:length][slots >= 0]
        return out.reshape(ranks, table.size, page_size, *keys[0].shape[1:])

    def own(self, keys):
        """Keys of the step's rows [T, ...]; junk on padding."""
        rows = [
            keys[r][p] if r >= 0 else np.full_like(keys[0][0], 7)
            for r, p in zip(self.requests, self.positions, strict=True)
        ]
        return np.stack(rows)

    def deal(self, keys, ranks, interleave, rows):
        """Local buffers [ranks, rows, ...] of per-request `keys`, a list of [seq_len, ...]; unused rows are NaN."""
        unused = np.nan if np.issubdtype(keys[0].dtype, np.floating) else 0
        out = np.full((ranks, rows, *keys[0].shape[1:]), unused, keys[0].dtype)
        for rank in range(ranks):
            at = 0
            for request in keys:
                mine = owner_of(np.arange(len(request)), ranks=ranks, interleave=interleave) == rank
                out[rank, at : at + mine.sum()] = request[mine]
                at += int(mine.sum())
        return out


BATCH = Batch()


@dataclasses.dataclass(frozen=True)
class Attention:
    """Operands of an attention over `BATCH`, global.

    Attributes:
      q: Absorbed queries [T, H, Dk].
      records: Compressed KV of each request, a list of [seq_len, Dk].
      ids: Selected positions [T, K], -1 behind and, on some rows, between them; a few rows select nothing.
      value_up: Value rows of each head [H, V, R].
    """

    q: np.ndarray
    records: list[np.ndarray]
    ids: np.ndarray
    value_up: np.ndarray


@functools.cache
def attention(heads=8, latent=6, rope=2, value=3, selected=9) -> Attention:
    """Random operands, the same in every call."""
    rng = np.random.default_rng(21)
    ids = np.full((BATCH.rows, selected), -1)
    for t in range(BATCH.rows):
        seen = BATCH.positions[t] + 1
        count = min(selected, seen)
        ids[t, :count] = rng.permutation(seen)[:count]
    ids[4] = -1
    ids[6, [1, 4]] = -1
    return Attention(
        q=rng.standard_normal((BATCH.rows, heads, latent + rope)).astype(np.float32),
        records=[rng.standard_normal((n, latent + rope)).astype(np.float32) for n in BATCH.seq_lens],
        ids=ids,
        value_up=rng.standard_normal((heads, value, latent)).astype(np.float32),
    )


@functools.cache
def attend(project=False, latent=6, scale=0.3):
    """Output [T, H, R or V] and log-sum-exp [T, H] of one device, in float64."""
    case = attention()
    out = np.zeros((*case.q.shape[:2], latent))
    lse = np.full(case.q.shape[:2], -np.inf)
    for t in range(BATCH.rows):
        ids = case.ids[t][case.ids[t] >= 0]
        if len(ids):
            kv = case.records[BATCH.requests[t]][ids].astype(np.float64)
            logits = scale * case.q[t].astype(np.float64) @ kv.T
            lse[t] = np.log(np.sum(np.exp(logits), axis=1))
            out[t] = np.exp(logits - lse[t][:, None]) @ kv[:, :latent]
    if project:
        out = np.einsum("thr,hvr->thv", out, case.value_up.astype(np.float64))
    return out, lse
