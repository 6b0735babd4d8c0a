"""Sparse attention of a layer on the path that the step's decision names."""

import dataclasses

import jax
import jax.numpy as jnp

from dsa_jax.layers.context import StepContext
from pallas_kernels.ckv_records import read
from pallas_kernels.sparse_mla import sparse_mla
from sharding.ckv_gather import append_chunk, gather_history, remap
from sharding.dcp_attention import dcp_sparse_mla, owned_slots, project_values
from sharding.mesh import DCP, QSPLIT, TP_AXES
from sharding.token_split import token_split

# Consecutive rows dealt together by the token split: bucket padding then spreads over all ranks.
TOKEN_SPLIT_TILE = 16


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Selection:
    """Selected tokens, and where they are; found once for a full layer and used by all layers that share it.

    Attributes:
      ids: Positions in the request [T, index_topk] int32, -1 for none.
      slots: Rows of the buffer that is attended to [T, index_topk] int32, -1 for none; cache slots with `own`.
      count: How many leading slots count [T] int32.
      own: Which of the step's own records each is [T, index_topk] int32, -1 for none or one of the cache. None where
        the records are attended to in a buffer that holds all of them.
    """

    ids: jax.Array
    slots: jax.Array
    count: jax.Array
    own: jax.Array | None = None


def local_only(context: StepContext) -> bool:
    """Whether a rank attends to the records it holds, for the heads of its whole DCP group."""
    return jax.lax.axis_size(DCP) > 1 and not context.options.decision.ckv_gather


def few_rows(rows: int, width: int, context: StepContext) -> bool:
    """Whether the selected records are fewer than all records, as in decoding: only they are read then."""
    local = jax.lax.axis_size(DCP) == 1 or local_only(context)
    return local and rows * width < context.options.ckv_rows


def _picked(selection: Selection, context: StepContext) -> Selection:
    """The selection by cache slot and own record in place of buffer rows, when the selected records are few."""
    rows, width = selection.slots.shape
    if not few_rows(rows, width, context):
        return selection

    def at(values: jax.Array) -> jax.Array:
        return jnp.where(selection.slots < 0, -1, values[jnp.maximum(selection.slots, 0)])

    slots, own = at(context.ckv.slots), at(context.ckv.own_rows())
    return dataclasses.replace(selection, slots=slots, own=own)


def locate(topk_indices: jax.Array, context: StepContext) -> Selection:
    """Where the selected tokens [T, index_topk] are on the step's path."""
    layout, interleave = context.ckv.layout, context.ckv.interleave
    if local_only(context):
        slots, count = owned_slots(
            topk_indices,
            context.requests,
            layout,
            jax.lax.axis_index(DCP),
            interleave=interleave,
            visible=context.visible,
        )
        return _picked(Selection(topk_indices, slots, count), context)
    slots = remap(
        topk_indices,
        context.requests,
        layout,
        rows=context.options.ckv_rows,
        interleave=interleave,
        visible=context.visible,
    )
    count = jnp.minimum(context.visible, slots.shape[1])
    return _picked(Selection(topk_indices, slots, count), context)


def no_selection(rows: int, width: int, context: StepContext) -> Selection:
    """What stands in front of the first full layer."""
    empty = jnp.full((rows, width), -1, jnp.int32)
    own = empty if few_rows(rows, width, context) else None
    return Selection(empty, empty, jnp.zeros((rows,), jnp.int32), own)


def gather_layer(pages: jax.Array, layer: jax.Array, context: StepContext) -> jax.Array:
    """History of a layer's records on all ranks [ranks, rows, width]."""
    ckv = context.ckv
    with jax.named_scope("history"):
        return gather_history(lambda slots: read(ckv.fmt, pages, slots, layer=layer), ckv.slots)


def _rank_buffer(
    pages: jax.Array, layer: jax.Array, record: jax.Array, selection: Selection, context: StepContext
) -> tuple[jax.Array, jax.Array]:
    """The records that this rank holds and attends to [N, width], and where in them the selected ones are [T, K]."""
    if selection.own is None:
        return context.ckv.fill(pages, layer, record), selection.slots
    picked = selection.slots.reshape(-1), selection.own.reshape(-1)
    rows = jnp.arange(selection.slots.size, dtype=jnp.int32).reshape(selection.slots.shape)
    rows = jnp.where((selection.slots < 0) & (selection.own < 0), -1, rows)
    return context.ckv.pick(pages, layer, record, picked), rows


def attend(
    q: jax.Array,
    value_rows: jax.Array,
    pages: jax.Array,
    layer: jax.Array,
    record: jax.Array,
    selection: Selection,
    context: StepContext,
    *,
    softmax_scale: float,
    history: jax.Array | None = None,
) -> jax.Array:
    """Attend to the selected tokens and project the result to values.

    Args:
      q: Absorbed queries of this rank's heads [T, h, latent + rope].
      value_rows: Rows of the value up-projection of this rank's heads [h, V, latent].
      pages: The cache of records, only read.
      layer: This layer's place in it.
      record: The step's own records, as they are stored [T, width].
      selection: What to attend to.
      context: What the layers of the step share.
      softmax_scale: Factor on the logits.
      history: The gathered history, when a layer before has gathered it.

    Returns:
      Values of this rank's heads [T, h, V], dtype of q.
    """
    decision, dtype = context.options.decision, q.dtype
    fmt = context.ckv.fmt
    # Plain records are attended to in their own dtype, packed ones are unpacked as they are read.
    kv_format = None if fmt.encoding == "plain" else fmt
    q = q.astype(fmt.dtype) if kv_format is None else q
    arguments = {"softmax_scale": softmax_scale, "kv_lora_rank": fmt.latent, "kv_format": kv_format}
    arguments |= context.options.kernels
    if local_only(context):
        buffer, slots = _rank_buffer(pages, layer, record, selection, context)
        rows = (slots, selection.count)
        value_up = value_rows if decision.project_first else None
        if value_up is not None and decision.token_split:
            value_up = jax.lax.all_gather(value_up, QSPLIT, axis=0, tiled=True)

        def attend_owned(q: jax.Array, rows: tuple[jax.Array, jax.Array]) -> jax.Array:
            return dcp_sparse_mla(q, buffer, *rows, value_up=value_up, out_dtype=dtype, **arguments)[0]

        out = _split(q, attend_owned, rows, decision.token_split, (QSPLIT,))
        return out if decision.project_first else _project(out, value_rows, dtype)
    if jax.lax.axis_size(DCP) > 1:
        history = gather_layer(pages, layer, context) if history is None else history
        with jax.named_scope("history"):
            buffer = append_chunk(history, record, context.gathered_own)
        buffer, slots = buffer.reshape(-1, buffer.shape[-1]), selection.slots
    else:
        buffer, slots = _rank_buffer(pages, layer, record, selection, context)
    rows = (slots, selection.count)

    def attend_all(q: jax.Array, rows: tuple[jax.Array, jax.Array]) -> jax.Array:
        slots, count = rows
        return sparse_mla(q, buffer, slots, num_valid=count, out_dtype=dtype, **arguments)[0]

    out = _split(q, attend_all, rows, decision.token_split, TP_AXES)
    return _project(out, value_rows, dtype)


def _project(out: jax.Array, value_rows: jax.Array, dtype: jnp.dtype) -> jax.Array:
    with jax.named_scope("projections"):
        return project_values(out, value_rows).astype(dtype)


def _split(q: jax.Array, attend_rows, rows: tuple[jax.Array, jax.Array], split: bool, axes) -> jax.Array:
    if not split:
        return attend_rows(q, rows)
    return token_split(q, attend_rows, rows, axes=axes, tile=TOKEN_SPLIT_TILE)
