"""Exchange of tokens between the ranks of an expert-parallel group: each rank sends rows to the experts' ranks.

Whole experts are dealt to the ranks of TP in runs. `exchange_rows` is for rows that are dealt to the ranks too; where
every rank has every row already, as behind a sum over TP, serving them where they are moves fewer bytes. On NVIDIA
GPUs the rows travel in a ragged all_to_all, elsewhere in one that is padded to the most that a rank can send; both give
the same buffer (DeepEP's normal mode in its effect, without its kernels).
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from sharding.mesh import TP_AXES

# Maps rows [N, ...] sorted by local expert, and the rows of each expert [experts] int32, to results [N, ...].
Serve = Callable[[jax.Array, jax.Array], jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Route:
    """Which rows travel where; the same numbers on both sides of each transfer.

    Attributes:
      order: Assignment behind each row of the send buffer, sorted by expert [t * k] int32.
      send_offsets: First row for each rank in the send buffer of each source [sources, ranks] int32.
      recv_offsets: First row of each source in the receive buffer of each rank [sources, ranks] int32.
      sizes: Rows that each source sends to each rank [sources, ranks] int32.
      received: Rows from each source for each expert of this rank [sources, local experts] int32.
    """

    order: jax.Array
    send_offsets: jax.Array
    recv_offsets: jax.Array
    sizes: jax.Array
    received: jax.Array


def plan_route(experts: jax.Array, local_experts: int) -> Route:
    """Plan the exchange of this rank's rows. Call it inside `shard_map` on all ranks of TP alike.

    Args:
      experts: Experts of each of this rank's rows [t, k] int32; -1 sends the row nowhere.
      local_experts: Experts of each rank; rank r holds `r * local_experts` and those behind it.
    """
    ranks = jax.lax.axis_size(TP_AXES)
    total = ranks * local_experts
    ids = jnp.where(experts < 0, total, experts).reshape(-1)
    counts = jnp.bincount(ids, length=total + 1)[:total].astype(jnp.int32)
    counts = jax.lax.all_gather(counts.reshape(ranks, local_experts), TP_AXES)  # [sources, ranks, local experts]
    sizes = counts.sum(axis=2, dtype=jnp.int32)
    return Route(
        order=jnp.argsort(ids).astype(jnp.int32),  # stable
        send_offsets=jnp.cumsum(sizes, axis=1, dtype=jnp.int32) - sizes,
        recv_offsets=jnp.cumsum(sizes, axis=0, dtype=jnp.int32) - sizes,
        sizes=sizes,
        received=counts[:, jax.lax.axis_index(TP_AXES)],
    )


def exchange_rows(x: jax.Array, experts: jax.Array, weights: jax.Array, serve: Serve, *, local_experts: int):
    """Serve this rank's rows by the experts of all ranks. Call it inside `shard_map` on all ranks of TP alike.

    Args:
      x: This rank's rows [t, D].
      experts: Their experts [t, k] int32, -1 for none.
      weights: Weights of the experts' results [t, k] float32.
      serve: This rank's experts.
      local_experts: Experts of each rank.

    Returns:
      Weighted sums of the experts' results [t, D] float32.
    """
    rank, choices = jax.lax.axis_index(TP_AXES), experts.shape[1]
    route = plan_route(experts, local_experts)
    # The most that can come: every row of every rank, to this rank's experts.
    capacity = jax.lax.axis_size(TP_AXES) * x.shape[0] * min(choices, local_experts)
    rows = _ragged_all_to_all(
        x[route.order // choices],
        capacity,
        input_offsets=route.send_offsets[rank],
        send_sizes=route.sizes[rank],
        output_offsets=route.recv_offsets[rank],
        recv_sizes=route.sizes[:, rank],
        recv_offsets=route.recv_offsets[:, rank],
    )
    results = _serve_received(rows, route.received, serve)
    results = _ragged_all_to_all(
        results,
        experts.size,
        input_offsets=route.recv_offsets[:, rank],
        send_sizes=route.sizes[:, rank],
        output_offsets=route.send_offsets[:, rank],
        recv_sizes=route.sizes[rank],
        recv_offsets=route.send_offsets[rank],
    )
    results = results[jnp.argsort(route.order)].reshape(*experts.shape, -1)
    results = jnp.where((experts >= 0)[:, :, None], results.astype(jnp.float32), 0.0)
    return jnp.einsum("tkd,tk->td", results, weights, precision=jax.lax.Precision.HIGHEST)


def _serve_received(rows: jax.Array, received: jax.Array, serve: Serve) -> jax.Array:
    """Sort rows that lie source after source, by expert within each, by expert alone; and back."""
    sources, local_experts = received.shape
    ends = jnp.cumsum(received.reshape(-1), dtype=jnp.int32)
    run = jnp.searchsorted(ends, jnp.arange(rows.shape[0], dtype=jnp.int32), side="right").astype(jnp.int32)
    expert = jnp.where(run < sources * local_experts, run % local_experts, local_experts)
    order = jnp.argsort(expert)  # stable
    return serve(rows[order], received.sum(axis=0, dtype=jnp.int32))[jnp.argsort(order)]


def _ragged_all_to_all(
    rows: jax.Array,
    capacity: int,
    *,
    input_offsets: jax.Array,
    send_sizes: jax.Array,
    output_offsets: jax.Array,
    recv_sizes: jax.Array,
    recv_offsets: jax.Array,
) -> jax.Array:
    """Rows from every rank [capacity, D]; rows that nobody sends are 0.

    Args:
      rows: What this rank sends [n, D].
      capacity: Rows of the result.
      input_offsets: First row for each rank in `rows` [ranks] int32.
      send_sizes: Rows for each rank [ranks] int32.
      output_offsets: Where they go in each rank's result [ranks] int32.
      recv_sizes: Rows from each rank [ranks] int32.
      recv_offsets: Where they come in this rank's result [ranks] int32.
    """

    def ragged(rows, input_offsets, send_sizes, output_offsets, recv_sizes, recv_offsets):
        out = jnp.zeros((capacity, rows.shape[1]), rows.dtype)
        return jax.lax.ragged_all_to_all(
            rows, out, input_offsets, send_sizes, output_offsets, recv_sizes, axis_name=TP_AXES
        )

    def padded(rows, input_offsets, send_sizes, output_offsets, recv_sizes, recv_offsets):
        column = jnp.arange(rows.shape[0], dtype=jnp.int32)
        source = jnp.where(column < send_sizes[:, None], input_offsets[:, None] + column, rows.shape[0])
        sent = rows.at[source].get(mode="fill", fill_value=0)  # [ranks, n, D]
        came = jax.lax.all_to_all(sent, TP_AXES, 0, 0)
        # The buffer of a rank may be shorter than what another one could send it.
        column = jnp.arange(came.shape[1], dtype=jnp.int32)
        target = jnp.where(column < recv_sizes[:, None], recv_offsets[:, None] + column, capacity)
        out = jnp.zeros((capacity, rows.shape[1]), rows.dtype)
        return out.at[target].set(came, mode="drop", wrap_negative_indices=False)

    arguments = (rows, input_offsets, send_sizes, output_offsets, recv_sizes, recv_offsets)
    return jax.lax.platform_dependent(*arguments, cuda=ragged, default=padded)
