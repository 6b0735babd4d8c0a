"""Exact top-k over candidates that several ranks found in their own keys.

A key that is among the k best of all is among the k best of its rank, so the k best of the ranks' candidates are the
answer, and ties go to the lowest global id whoever holds it: the same set on every rank and in every run.
"""

import typing

import jax
import jax.numpy as jnp

from pallas_kernels.topk import topk
from pallas_kernels.topk.reference import sortable_key

# Added to an id, it makes the id's bits those of a normal float32: no id is rounded, none is flushed to zero.
_NORMAL = 1 << 23


def merge_candidates(
    ids: jax.Array, scores: jax.Array, visible: jax.Array, k: int, *, implementation: str | None = None
) -> jax.Array:
    """The k best candidates of each row by (score descending, id ascending).

    Args:
      ids: Global ids of the candidates [T, C] int32, -1 for none, below 2**31 - 2**24. Each rank brings its
        `min(k, keys it holds of the row)` best, so a row that sees more than k keys has at least k candidates.
      scores: Their scores [T, C] float32; unspecified where the id is -1. NaN ranks last.
      visible: Keys that the row sees over all ranks [T] int32.
      k: How many to keep.
      implementation: Of the top-k.

    Returns:
      Ids [T, k] int32: `min(k, visible)` valid ones first, in unspecified order, then -1.
    """
    scores = jnp.where(ids >= 0, scores, jnp.nan)
    _, best = topk(scores, k, return_scores=True, implementation=implementation)
    worst = jnp.min(sortable_key(best), axis=1, keepdims=True)
    key = sortable_key(scores)
    # Whoever beats the k-th score is in; among those that equal it the lowest ids are. Positive floats order as their
    # bits do, so the negated bits of the ids let one more top-k apply the rule, exactly.
    by_id = -jax.lax.bitcast_convert_type(jnp.maximum(ids, 0) + _NORMAL, jnp.float32)
    tied = (key == worst) & (ids >= 0)
    rank = jnp.where(key > worst, jnp.inf, jnp.where(tied, by_id, -jnp.inf))
    columns = typing.cast(jax.Array, topk(rank, k, implementation=implementation))
    chosen = jnp.take_along_axis(ids, jnp.maximum(columns, 0), axis=1)
    # A row that sees no more than k keys takes them all; it may have too few candidates to fill the columns.
    everything = jnp.arange(k, dtype=jnp.int32)[None, :]
    short = jnp.where(everything < visible[:, None], everything, -1)
    return jnp.where(visible[:, None] > k, chosen, short)


def pack(ids: jax.Array, scores: jax.Array) -> jax.Array:
    """Ids and the bits of their scores as [T, 2, k] int32, to travel in one collective."""
    return jnp.stack([ids, jax.lax.bitcast_convert_type(scores, jnp.int32)], axis=1)


def unpack(packed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rank-major packed candidates [ranks, T, 2, k] as ids and scores [T, ranks * k]."""
    ranks, rows, _, k = packed.shape
    ids, bits = (jnp.swapaxes(packed[:, :, i], 0, 1).reshape(rows, ranks * k) for i in (0, 1))
    return ids, jax.lax.bitcast_convert_type(bits, jnp.float32)
