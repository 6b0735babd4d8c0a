"""The lightning indexer over the ranks of a TP group: its rows split, its keys dealt, its top-k exact.

Two splits combine. The keys are dealt to `shards` ranks of the DCP group, the first `shards` neighbours, then again
the next: with fewer shards than ranks the keys are held `dcp / shards` times. The rows are split over the ranks that
hold the same keys: those of the "qsplit" axis and the copies inside a DCP group (LIL #110, #178, #179; vLLM #54394
without DCP).
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.index_topk import index_topk
from pallas_kernels.index_topk.api import DEFAULT_WORKSPACE_BYTES
from sharding.local_keys import KeyLayout, row_key_ranges
from sharding.mesh import DCP, QSPLIT, TP_AXES
from sharding.ownership import global_of
from sharding.row_partition import RowPlan
from sharding.topk_merge import merge_candidates, pack, unpack

MERGES = ("owner", "replicated", "union")


@dataclasses.dataclass(frozen=True)
class IndexSharding:
    """How the index keys are dealt and how the ranks agree on a selection.

    Attributes:
      shards: Ranks that the keys are dealt to, a divisor of the DCP size. 1 holds all keys on every rank.
      interleave: Keys in a run; with kpool, pools.
      merge: "owner": each rank merges its share of the rows, and ids come back; the fewest bytes. "replicated": every
        rank merges every row; one collective less, for few rows. "union": no merge, each rank keeps its own best,
        so that up to `shards * top_k` keys of a row are attended; not equal to one device.
    """

    shards: int = 1
    interleave: int = 1
    merge: str = "owner"

    def __post_init__(self):
        """Check the values."""
        if self.merge not in MERGES:
            raise ValueError(f"merge must be one of {MERGES}, got {self.merge!r}")
        for name in ("shards", "interleave"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {name}={getattr(self, name)}")


def split_size(qsplit: int, dcp: int, sharding: IndexSharding) -> int:
    """How many ranks the rows are split over: the `ranks` to plan for."""
    if dcp % sharding.shards:
        raise ValueError(f"{dcp=} must be divisible by shards={sharding.shards}")
    return qsplit * (dcp // sharding.shards)


def index_shard(sharding: IndexSharding) -> jax.Array:
    """Which shard of the index keys this rank holds; inside `shard_map`."""
    return jax.lax.axis_index(DCP) % sharding.shards


def sharded_index_topk(
    q: jax.Array,
    k: jax.Array,
    weights: jax.Array,
    requests: jax.Array,
    visible: jax.Array,
    layout: KeyLayout,
    top_k: int,
    *,
    sharding: IndexSharding,
    plan: RowPlan | None = None,
    initial: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES,
    implementation: str | None = None,
) -> jax.Array:
    """Select the `top_k` best keys of each row over all ranks. Call it inside `shard_map` on all ranks alike.

    The set of a row equals that of one device which holds all keys, whatever the split and the merge (but "union"):
    each key is scored by one rank from the same operands. Collectives depend on shapes and `sharding` alone, so a
    rank without keys or rows takes part like any other.

    Args:
      q: Index queries [T, Hi, D], the same on all TP ranks.
      k: This rank's index keys [N, D], laid out as `layout` says for shard `index_shard(sharding)`.
      weights: Head weights [T, Hi] float32.
      requests: Request of each row [T] int32, -1 for padding.
      visible: Keys of its request that each row sees, over all shards [T] int32; with kpool, pools.
      layout: Where the shards hold the keys.
      top_k: How many keys to keep.
      sharding: How keys are dealt and selections agreed on.
      plan: Rows of each rank, for `split_size` ranks; None computes every row on every rank.
      initial: Ids of rows outside the plan [T, top_k] int32, returned unchanged; None means -1.
      k_scale: Scale of each key [N] float32, or None for 1.
      workspace_bytes: Bound on the scores held at once.
      implementation: Of the kernels.

    Returns:
      Ids [T, top_k] int32 relative to the request, valid ones first in unspecified order, then -1; the same on all TP
      ranks, except that with "union" each shard returns its own.

    Raises:
      ValueError: The plan, the layout or the sharding do not fit the mesh or each other.
    """
    rank, splits = _split_rank(sharding)
    if layout.ranks != sharding.shards:
        raise ValueError(f"layout is for {layout.ranks} ranks, sharding has shards={sharding.shards}")
    if plan is None and initial is not None:
        raise ValueError("initial is for the rows outside a plan, got plan=None")
    if plan is not None:
        if plan.rows.shape[0] != splits:
            raise ValueError(f"plan is for {plan.rows.shape[0]} ranks, rows are split over {splits}")
        if plan.source.shape != requests.shape:
            raise ValueError(f"plan is for {plan.source.shape[0]} rows, got {requests.shape[0]}")
        rows = jnp.asarray(plan.rows)[rank]
        taken = jnp.maximum(rows, 0)
        q, weights, visible = q[taken], weights[taken], visible[taken]
        requests = jnp.where(rows < 0, -1, requests[taken])
    visible = jnp.where(requests < 0, 0, visible)
    shard = index_shard(sharding)
    start, end = row_key_ranges(layout, requests, visible, shard, interleave=sharding.interleave)
    found = index_topk(
        q,
        k,
        weights,
        start,
        end,
        min(top_k, k.shape[0]),
        k_scale=k_scale,
        return_scores=sharding.shards > 1 and sharding.merge != "union",
        workspace_bytes=workspace_bytes,
        implementation=implementation,
    )
    merged = isinstance(found, tuple)
    local = found[0] if merged else found
    ids = global_of(local, shard, ranks=sharding.shards, interleave=sharding.interleave)
    if merged:
        ids = _merge(ids, found[1], visible, top_k, sharding, implementation)
    else:
        ids = jnp.pad(ids, ((0, 0), (0, top_k - ids.shape[1])), constant_values=-1)
    by_shard = merged and sharding.merge == "owner"
    ids = _gather(ids, sharding, split=plan is not None, by_shard=by_shard)
    if plan is None:
        return ids[0, : requests.shape[0]]
    # The owner's merge pads the rows of a rank to a multiple of the shards.
    ids = ids[:, : plan.rows.shape[1]].reshape(-1, top_k)
    source = jnp.asarray(plan.source)[:, None]
    initial = jnp.int32(-1) if initial is None else initial
    return jnp.where(source >= 0, ids[jnp.maximum(source[:, 0], 0)], initial)


def _split_rank(sharding: IndexSharding) -> tuple[jax.Array, int]:
    """Number of this rank among those that the rows are split over, and how many there are."""
    dcp = jax.lax.axis_size(DCP)
    splits = split_size(jax.lax.axis_size(QSPLIT), dcp, sharding)
    copies = dcp // sharding.shards
    return jax.lax.axis_index(QSPLIT) * copies + jax.lax.axis_index(DCP) // sharding.shards, splits


def _shard_groups(sharding: IndexSharding) -> list[list[int]] | None:
    """Neighbours in a DCP group that together hold all keys; None for the whole group."""
    dcp, shards = jax.lax.axis_size(DCP), sharding.shards
    return None if shards == dcp else [list(range(first, first + shards)) for first in range(0, dcp, shards)]


def _copy_groups(sharding: IndexSharding) -> list[list[int]]:
    """Ranks in a DCP group that hold the same keys."""
    dcp, shards = jax.lax.axis_size(DCP), sharding.shards
    return [list(range(shard, dcp, shards)) for shard in range(shards)]


def _merge(
    ids: jax.Array, scores: jax.Array, visible: jax.Array, top_k: int, sharding: IndexSharding, implementation
) -> jax.Array:
    """Merge the shards' candidates [t, k]: all rows on every shard, or with "owner" this shard's share of them."""
    packed = pack(ids, scores)
    shards, groups = sharding.shards, _shard_groups(sharding)
    if sharding.merge == "replicated":
        packed = jax.lax.all_gather(packed, DCP, axis_index_groups=groups)
    else:
        padding = -len(visible) % shards
        packed = jnp.pad(packed, ((0, padding), (0, 0), (0, 0)), constant_values=-1)
        packed = packed.reshape(shards, -1, *packed.shape[1:])
        packed = jax.lax.all_to_all(packed, DCP, 0, 0, axis_index_groups=groups)
        visible = jnp.pad(visible, (0, padding)).reshape(shards, -1)[index_shard(sharding)]
    return merge_candidates(*unpack(packed), visible, top_k, implementation=implementation)


def _gather(ids: jax.Array, sharding: IndexSharding, *, split: bool, by_shard: bool) -> jax.Array:
    """Bring the ids of all ranks together as [splits, rows, k].

    Args:
      ids: This rank's ids [t, k].
      sharding: How keys are dealt.
      split: Whether ranks with the same keys computed different rows.
      by_shard: Whether the shards hold different rows, one run each.
    """
    k = ids.shape[-1]
    if split and (by_shard or sharding.shards == 1):
        # One collective over TP: its order, q then copy then shard, is the order of splits and of the runs in them.
        gathered = _all_gather(ids, TP_AXES)
        splits = gathered.shape[0] // sharding.shards
        return gathered.reshape(splits, -1, k)
    if by_shard:
        return _all_gather(ids, DCP, _shard_groups(sharding)).reshape(1, -1, k)
    if not split:
        return ids[None]
    if sharding.shards < jax.lax.axis_size(DCP):
        ids = _all_gather(ids, DCP, _copy_groups(sharding)).reshape(-1, k)
    copies = jax.lax.axis_size(DCP) // sharding.shards
    gathered = _all_gather(ids, QSPLIT)
    return gathered.reshape(gathered.shape[0] * copies, -1, k)


def _all_gather(x: jax.Array, axes: str | tuple[str, ...], groups: list[list[int]] | None = None) -> jax.Array:
    """[ranks, *x.shape]; without a collective where there is one rank."""
    if jax.lax.axis_size(axes) == 1:
        return x[None]
    return jax.lax.all_gather(x, axes, axis_index_groups=groups)
