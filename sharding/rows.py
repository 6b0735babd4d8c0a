"""Rows of a step: which request each belongs to, at which position, and how many keys it sees.

The rows of a step are the new tokens of its requests, request after request. `query_start_loc` [requests + 1] holds
the first row of each and, at the end, the number of real rows; rows from there on are padding. Requests without rows
are allowed. The functions take NumPy arrays on the host or jax arrays inside a step.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def row_requests(query_start_loc: Any, rows: int) -> Any:
    """Request of each row.

    Args:
      query_start_loc: First row of each request and the number of real rows [requests + 1], ascending.
      rows: Number of rows, padding included.

    Returns:
      Requests [rows] of the same dtype, -1 for padding.
    """
    xp = jnp if isinstance(query_start_loc, jax.Array) else np
    row = xp.arange(rows, dtype=query_start_loc.dtype)
    # The last request that starts at or before the row: requests without rows share their start with the next one.
    request = xp.searchsorted(query_start_loc[:-1], row, side="right").astype(query_start_loc.dtype) - 1
    return xp.where(row < query_start_loc[-1], request, -1)


def row_positions(seq_lens: Any, query_start_loc: Any, rows: int) -> Any:
    """Position of each row's token in its request, whose last row is its last token.

    Args:
      seq_lens: Tokens of each request with those of this step [requests].
      query_start_loc: First row of each request and the number of real rows [requests + 1].
      rows: Number of rows, padding included.

    Returns:
      Positions [rows], -1 for padding. A row sees `position + 1` keys: its causal length.
    """
    xp = jnp if isinstance(query_start_loc, jax.Array) else np
    request = row_requests(query_start_loc, rows)
    safe = xp.where(request < 0, 0, request)
    row = xp.arange(rows, dtype=query_start_loc.dtype)
    position = seq_lens[safe] - query_start_loc[safe + 1] + row
    return xp.where(request < 0, -1, position)
