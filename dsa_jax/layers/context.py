"""What the layers of a step share: where the keys are and which of them each row sees, on one rank."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from dsa_jax.batch import StepInputs
from dsa_jax.cache import CacheGeometry
from dsa_jax.config import ModelConfig
from dsa_jax.layers.ragged import PoolRows, StateRows, pool_rows, state_rows
from dsa_jax.layers.rope import cos_sin
from pallas_kernels.ckv_records import RecordFormat, append, read
from sharding.ckv_gather import remap
from sharding.indexer_sharding import IndexSharding, index_shard
from sharding.local_keys import KeyLayout, history_slots, key_layout, local_rows
from sharding.mesh import DCP
from sharding.ownership import pool_interleave, slot_mapping
from sharding.policy import Decision
from sharding.row_partition import RowPlan
from sharding.rows import row_positions, row_requests


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """What besides the shapes of its arguments makes a step a program of its own.

    Attributes:
      decision: The sharded path.
      ckv_rows: Rows of the buffer that holds a rank's records of the step.
      index_rows: Rows of the buffer that holds a rank's index keys.
      implementation: Implementation of the kernels, or None for the fastest the device supports.
      workspace_bytes: Bound on the temporaries of one operation, in bytes.
      return_selected: Whether selections are returned.
      expert_exchange: Whether ranks send rows to their experts instead of serving all rows with their own.
      single_rows: Whether no request has more than one row; only models that keep states run another program then.
    """

    decision: Decision
    ckv_rows: int
    index_rows: int
    implementation: str | None = None
    workspace_bytes: int = 1 << 30
    return_selected: bool = False
    expert_exchange: bool = False
    single_rows: bool = False

    @property
    def kernels(self) -> dict[str, Any]:
        """Arguments that every operation takes."""
        return {"workspace_bytes": self.workspace_bytes, "implementation": self.implementation}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KeyBuffer:
    """One kind of keys (records, or index keys) of a step on one rank; see `sharding.local_keys`.

    Attributes:
      layout: Where each rank holds the keys of each request.
      slots: Cache slot behind each buffer row [rows] int32, -1 where there is no history.
      own: Buffer row of each of the step's own keys [T] int32, -1 where another rank holds it and for padding.
      write: Cache slot of each of the step's own keys [T] int32, -1 likewise.
      fmt: Format of the keys.
      interleave: Keys in a run of one rank.
    """

    layout: KeyLayout
    slots: jax.Array
    own: jax.Array
    write: jax.Array
    fmt: RecordFormat = dataclasses.field(metadata={"static": True})
    interleave: int = dataclasses.field(metadata={"static": True})

    def fill(self, pages: jax.Array, layer: jax.Array, own: jax.Array) -> jax.Array:
        """All keys of the step that this rank holds: the history out of the cache, the step's own put behind it.

        Args:
          pages: The cache, only read.
          layer: Which layer of it, int32 scalar.
          own: The step's own records [T, width].

        Returns:
          [rows, width]; rows that belong to no key are 0.
        """
        with jax.named_scope("history"):
            history = read(self.fmt, pages, self.slots, layer=layer)
            # Rows that are dropped get indices of their own: XLA stores unique rows without compare-and-swap.
            rows = history.shape[0]
            target = jnp.where(self.own < 0, rows + jnp.arange(self.own.shape[0], dtype=jnp.int32), self.own)
            return history.at[target].set(own, mode="drop", wrap_negative_indices=False, unique_indices=True)

    def own_rows(self) -> jax.Array:
        """Which of the step's own keys each buffer row holds [rows] int32, -1 for history and for no key."""
        rows = jnp.arange(self.own.shape[0], dtype=jnp.int32)
        nowhere = jnp.full_like(self.slots, -1)
        return nowhere.at[self.own].set(rows, mode="drop", wrap_negative_indices=False)

    def pick(
        self, pages: jax.Array, layer: jax.Array, own: jax.Array, picked: tuple[jax.Array, jax.Array]
    ) -> jax.Array:
        """Some keys of the step, without a buffer of all.

        Args:
          pages: The cache, only read.
          layer: Which layer of it, int32 scalar.
          own: The step's own records [T, width].
          picked: Cache slot of each key [N] int32, and which of the own records it is [N] int32; -1 where it is not.

        Returns:
          [N, width]; 0 where a key is neither.
        """
        slots, rows = picked
        return jnp.where(rows[:, None] < 0, read(self.fmt, pages, slots, layer=layer), own[jnp.maximum(rows, 0)])

    def store(self, pages: jax.Array, records: jax.Array) -> jax.Array:
        """Write the own records of all layers [layers, T, width] into the cache."""
        return append(self.fmt, pages, records, self.write)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepContext:
    """Arrays of one data group on one rank.

    Attributes:
      cos: Cosine of the rotary angles [T, rope / 2] float32.
      sin: Sine [T, rope / 2] float32.
      requests: Request of each row [T] int32, -1 for padding.
      visible: Tokens that each row sees, over all ranks [T] int32, 0 for padding.
      index_visible: Index keys that each row sees, likewise.
      ckv: The records.
      index_keys: The index keys.
      gathered_own: Rows of the step's own records in a gathered buffer [T] int32, -1 for padding.
      plan: Which rank selects for which rows, or None.
      state_slots: Where the cache keeps the state of each request [R] int32, -1 for padding.
      pools: Pools of the step, or None where every token has an index key.
      states: Rows in blocks, or None where no layer keeps a state.
      options: Static options of the step.
      index_sharding: How the index keys are dealt.
    """

    cos: jax.Array
    sin: jax.Array
    requests: jax.Array
    visible: jax.Array
    index_visible: jax.Array
    ckv: KeyBuffer
    index_keys: KeyBuffer
    gathered_own: jax.Array
    plan: RowPlan | None
    state_slots: jax.Array
    pools: PoolRows | None
    states: StateRows | None
    options: StepOptions = dataclasses.field(metadata={"static": True})
    index_sharding: IndexSharding = dataclasses.field(metadata={"static": True})


def _key_buffer(
    inputs: StepInputs,
    own: tuple[jax.Array, jax.Array],
    fmt: RecordFormat,
    rank: jax.Array,
    *,
    rows: int,
    page_size: int,
    ranks: int,
    interleave: int,
    kpool: int = 1,
) -> KeyBuffer:
    """Keys of `kpool` tokens each; `own` names the step's own by request and number, lengths count keys."""
    requests, numbers = own
    query_lens = inputs.query_start_loc[1:] - inputs.query_start_loc[:-1]
    layout = key_layout(inputs.seq_lens // kpool, ranks=ranks, interleave=interleave)
    slots = history_slots(
        layout,
        (inputs.seq_lens - query_lens) // kpool,
        inputs.block_table,
        rank,
        rows=rows,
        interleave=interleave,
        page_size=page_size,
    )
    place = local_rows(layout, numbers, requests, rank, interleave=interleave)
    write = slot_mapping(
        numbers, requests, inputs.block_table, rank, page_size=page_size, ranks=ranks, interleave=interleave
    )
    return KeyBuffer(layout, slots, place, jnp.where(requests < 0, -1, write), fmt, interleave)


def make_context(config: ModelConfig, inputs: StepInputs, geometry: CacheGeometry, options: StepOptions) -> StepContext:
    """Derive what the layers share from a step's lengths and block table; inside `shard_map`."""
    rows, kpool = inputs.tokens.shape[0], geometry.kpool
    requests = row_requests(inputs.query_start_loc, rows)
    positions = row_positions(inputs.seq_lens, inputs.query_start_loc, rows)
    cos, sin = cos_sin(config.rope, config.qk_rope_head_dim, positions)
    key_interleave = pool_interleave(geometry.interleave, kpool)
    sharding = IndexSharding(geometry.index_shards, key_interleave, options.decision.merge)
    lengths = (inputs.query_start_loc, inputs.seq_lens)
    pools = pool_rows(*lengths, rows=rows, kpool=kpool) if kpool > 1 else None
    states = None
    if config.kda is not None:
        states = state_rows(*lengths, rows=rows, taps=config.kda.conv_size, single=options.single_rows)
    ckv = _key_buffer(
        inputs,
        (requests, positions),
        geometry.ckv,
        jax.lax.axis_index(DCP),
        ranks=geometry.dcp,
        interleave=geometry.interleave,
        rows=options.ckv_rows,
        page_size=geometry.page_size,
    )
    index_keys = _key_buffer(
        inputs,
        (requests, positions) if pools is None else (pools.requests, pools.pools),
        geometry.index_keys,
        index_shard(sharding),
        ranks=geometry.index_shards,
        interleave=key_interleave,
        rows=options.index_rows,
        page_size=geometry.index_page_size,
        kpool=kpool,
    )
    own = remap(positions[:, None], requests, ckv.layout, rows=options.ckv_rows, interleave=geometry.interleave)
    return StepContext(
        cos=cos,
        sin=sin,
        requests=requests,
        visible=positions + 1,
        index_visible=(positions + 1) // kpool,
        ckv=ckv,
        index_keys=index_keys,
        gathered_own=own[:, 0],
        plan=inputs.plan,
        state_slots=inputs.state_slots,
        pools=pools,
        states=states,
        options=options,
        index_sharding=sharding,
    )
