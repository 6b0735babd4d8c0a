"""Gather of the compressed KV over a DCP group, so that each rank attends with its own heads alone.

Every rank contributes its part of the history, all ranks get all of it, and no queries, log-sum-exps or partial
outputs travel. The gathered buffer is rank-major, [ranks, rows, width], each rank's part in the order of
`local_keys`; `remap` turns positions into its rows.
"""

from typing import Any

import jax
import jax.numpy as jnp

from sharding.local_keys import KeyLayout
from sharding.ownership import local_of, owner_of


def remap(
    positions: jax.Array,
    requests: jax.Array,
    layout: KeyLayout,
    *,
    rows: int,
    interleave: int,
    visible: jax.Array | None = None,
) -> jax.Array:
    """Rows of the gathered buffer that hold the given tokens; the order of the columns is kept.

    It depends on the selection and the lengths, not on the layer: compute it once for a full layer and all layers that
    share its selection.

    Args:
      positions: Selected tokens of each row, as positions in its request [T, K] int32, -1 for none.
      requests: Request of each row [T] int32, -1 for padding.
      layout: Where the ranks hold the tokens, those of this step included.
      rows: Rows of one rank's part of the buffer.
      interleave: Tokens in a run.
      visible: Tokens that each row may see over all ranks, its causal length [T] int32: never a rank's share of it.
        None allows the whole request.

    Returns:
      Rows [T, K] int32 of the buffer flattened to [ranks * rows]; -1 for none, and for tokens the row may not see.
    """
    real = requests >= 0
    request = jnp.where(real, requests, 0)
    allowed = layout.lens.sum(axis=0, dtype=jnp.int32)[request]
    allowed = jnp.where(real, allowed if visible is None else jnp.minimum(allowed, visible), 0)
    valid = (positions >= 0) & (positions < allowed[:, None])
    dealt: dict[str, Any] = {"ranks": layout.ranks, "interleave": interleave}
    owner = jnp.where(valid, owner_of(positions, **dealt), 0)
    starts = jnp.take_along_axis(layout.starts[:, request].T, owner, axis=1)  # [T, K]
    return jnp.where(valid, owner * rows + starts + local_of(positions, **dealt), -1)


def count_to_last_valid(slots: jax.Array) -> jax.Array:
    """How many leading columns of [T, K] hold every valid slot [T] int32, for kernels that stop there."""
    columns = jnp.arange(1, slots.shape[1] + 1, dtype=jnp.int32)
    return jnp.max(jnp.where(slots >= 0, columns, 0), axis=1, initial=0)
