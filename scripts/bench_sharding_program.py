"""Programs and operands of `bench_sharding.py`: the sparse attention of some layers, on keys made on the devices.

A key is a hash of its layer and its position in the request, so every rank of every mesh makes the keys that it holds
by itself, and one device can make all of them to check the others.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench_prefill import hashed, uniform
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dsa_jax.batch import StepInputs, step_specs
from dsa_jax.cache import CacheGeometry, PagedCache, cache_specs
from dsa_jax.config import ModelConfig
from dsa_jax.layers.attention import Selection, attend, gather_layer, locate, no_selection
from dsa_jax.layers.context import StepContext, StepOptions, make_context
from dsa_jax.layers.decoder import QUERY_AMAX_FLOOR
from dsa_jax.segments import layer_kinds
from pallas_kernels.ckv_records import RecordFormat, append, pack, quantize_power_of_two, read, split_index_keys
from pallas_kernels.index_topk import index_topk
from pallas_kernels.sparse_mla import sparse_mla
from sharding.ckv_gather import gather_history_windows, history_windows
from sharding.dcp_attention import project_values
from sharding.indexer_sharding import sharded_index_topk
from sharding.mesh import DCP, TP_AXES
from sharding.ownership import global_of, owner_of, pool_interleave

# What a hash is for, so that no two arrays are alike.
CKV, INDEX_KEY, INDEX_QUERY, INDEX_WEIGHT, QUERY, VALUE_UP = range(6)
WINDOW = 8192  # rows of a rank in one window of a gather


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Operands:
    """What projections would have made of a chunk's hidden states.

    Attributes:
      index_q: Index queries [T, Hi, D] in the dtype of the index keys.
      weights: Head weights [T, Hi] float32.
      index_keys: The chunk's own index keys of each full layer, as they are stored [full layers, T, width].
      q: Absorbed queries [T, H, latent + rope], split over TP by heads.
      records: The chunk's own records of each layer, as they are stored [layers, T, width].
      value_rows: Rows of the value up-projection [H, V, latent], split over TP by heads.
    """

    index_q: Any
    weights: Any
    index_keys: Any
    q: Any
    records: Any
    value_rows: Any


SPECS = Operands(P(), P(), P(), P(None, TP_AXES), P(), P(TP_AXES))


def values(purpose: int, *indices: Any) -> jax.Array:
    """Values in [-1, 1), a hash of what they are for and of indices that broadcast against each other."""
    return 2 * uniform(hashed(*(jnp.asarray(index) for index in (purpose, *indices))))


def keys_at(purpose: int, fmt: RecordFormat, layer: Any, positions: jax.Array) -> jax.Array:
    """Keys of a layer at positions [N], as they are stored [N, fmt.record_width]."""
    return pack(fmt, values(purpose, layer, positions[:, None], jnp.arange(fmt.width)))


def _iota(*sizes: int) -> list[jax.Array]:
    """Indices of an array's dimensions, each of a shape that broadcasts against the others."""
    return [jnp.arange(n).reshape(-1, *[1] * (len(sizes) - 1 - i)) for i, n in enumerate(sizes)]


def make_operands(config: ModelConfig, geometry: CacheGeometry, dtype: jnp.dtype, *, rows: int, history: int):
    """Function that makes the operands of a chunk of `rows` behind `history` tokens."""
    index, fmt = config.indexer, geometry.index_keys
    width, full = geometry.ckv.width, config.indexer_types.count("full")

    def make() -> Operands:
        own = history + jnp.arange(rows)
        index_q = values(INDEX_QUERY, *_iota(rows, index.num_heads, index.head_dim))
        # Of both signs, as trained ones are.
        weights = values(INDEX_WEIGHT, *_iota(rows, index.num_heads)) + 0.25
        if fmt.encoding == "plain":
            index_q = index_q.astype(fmt.dtype)
        else:
            index_q, scale = quantize_power_of_two(index_q, QUERY_AMAX_FLOOR)
            weights = weights * scale[..., 0]
        return Operands(
            index_q=index_q,
            weights=weights,
            index_keys=jnp.stack([keys_at(INDEX_KEY, fmt, layer, own) for layer in range(full)]),
            q=values(QUERY, *_iota(rows, config.num_heads, width)).astype(dtype),
            records=jnp.stack([keys_at(CKV, geometry.ckv, layer, own) for layer in range(config.num_layers)]),
            value_rows=values(VALUE_UP, *_iota(config.num_heads, config.v_head_dim, config.kv_lora_rank)).astype(dtype),
        )

    return make


def placed_operands(make, mesh: Mesh) -> Operands:
    """The operands on the devices of a mesh, made there."""
    return jax.jit(make, out_shardings=jax.tree.map(lambda spec: NamedSharding(mesh, spec), SPECS))()


def abstract_operands(make, mesh: Mesh) -> Operands:
    """The operands as shapes on the devices of a mesh, which may not be there."""

    def place(shape, spec):
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(place, jax.eval_shape(make), SPECS)


def random_cache(shapes: PagedCache, mesh: Mesh) -> PagedCache:
    """A cache of one request whose pages are in order, filled by each rank; what is kept of requests is 0."""
    geometry, specs = shapes.geometry, cache_specs(shapes)

    def pages_of(purpose: int, shape, fmt: RecordFormat, page_size: int, rank, **dealt: int) -> jax.Array:
        slots = jnp.arange(shape.shape[1] * page_size, dtype=jnp.int32)
        empty = jnp.zeros((shape.shape[1], *fmt.page_shape(page_size)), fmt.dtype)

        def layer_pages(layer):
            return append(fmt, empty, keys_at(purpose, fmt, layer, global_of(slots, rank, **dealt)), slots)

        return jax.lax.map(layer_pages, jnp.arange(shape.shape[0]))

    def local() -> PagedCache:
        kpool = geometry.kpool
        shards, rank = geometry.index_shards, jax.lax.axis_index(DCP)
        ckv = pages_of(
            CKV,
            shapes.ckv,
            geometry.ckv,
            geometry.page_size,
            rank,
            ranks=geometry.dcp,
            interleave=geometry.interleave,
        )
        index_keys = pages_of(
            INDEX_KEY,
            shapes.index_keys,
            geometry.index_keys,
            geometry.index_page_size,
            rank % shards,
            ranks=shards,
            interleave=pool_interleave(geometry.interleave, kpool),
        )
        return PagedCache(ckv, index_keys, local_state(), geometry)

    def local_state():
        return jax.tree.map(
            lambda x: jnp.zeros(NamedSharding(mesh, x.sharding.spec).shard_shape(x.shape), x.dtype), shapes.state
        )

    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(), out_specs=specs, check_vma=False))()


def _select(operands: Operands, full: int, context: StepContext, cache: PagedCache, config: ModelConfig) -> Selection:
    """What a full layer selects, as `DecoderLayer.select` does behind its projections."""
    k, k_scale = split_index_keys(
        context.index_keys.fmt, context.index_keys.fill(cache.index_keys, jnp.int32(full), operands.index_keys[full])
    )
    ids = sharded_index_topk(
        operands.index_q,
        k,
        operands.weights,
        context.requests,
        context.index_visible,
        context.index_keys.layout,
        config.indexer.topk,
        sharding=context.index_sharding,
        plan=context.plan,
        k_scale=k_scale,
        **context.options.kernels,
    )
    return locate(ids, context)


def _windows(pages: jax.Array, layer: jax.Array, inputs: StepInputs, context: StepContext) -> jax.Array:
    """The gathered history of a layer, window by window."""
    ckv, rows = context.ckv, context.options.ckv_rows
    window = min(WINDOW, rows)
    lens = inputs.seq_lens - (inputs.query_start_loc[1:] - inputs.query_start_loc[:-1])
    count = history_windows(ckv.layout, lens, interleave=ckv.interleave, window=window)
    buffer = jnp.zeros((ckv.layout.ranks, rows, ckv.fmt.record_width), ckv.fmt.dtype)
    return gather_history_windows(
        lambda slots: read(ckv.fmt, pages, slots, layer=layer), ckv.slots, count, buffer, window=window
    )


def attention_program(
    config: ModelConfig, mesh: Mesh, cache: PagedCache, inputs: StepInputs, options: StepOptions, *, windows: bool
):
    """Jitted sparse attention of all layers of `config`, one after another, as the model's layers order it.

    Returns:
      A function of inputs, cache and operands that gives values [layers, T, H, V] split by heads and, of each TP rank,
      the selections of the full layers [tp, full layers, T, top_k].
    """
    decision, kinds = options.decision, layer_kinds(config)

    def local(inputs: StepInputs, cache: PagedCache, operands: Operands) -> tuple[jax.Array, jax.Array]:
        context = make_context(config, inputs, cache.geometry, options)
        pages, rows = cache.ckv, operands.q.shape[0]
        selection, full = no_selection(rows, config.indexer.topk, context), 0
        ahead = gather_layer(pages, jnp.int32(0), context) if decision.prefetch else None
        out = jnp.zeros((rows, operands.q.shape[1], config.v_head_dim), operands.q.dtype)
        outs, ids = [], []
        for layer, kind in enumerate(kinds):
            # Layers have operands of their own in a model: none of their work is common, none can run early.
            mine, place, out = jax.lax.optimization_barrier((operands, jnp.int32(layer), out))
            history, fetch = ahead, decision.prefetch and layer + 1 < len(kinds)
            if fetch:
                ahead = gather_layer(pages, place + 1, context)
            if windows:
                history = _windows(pages, place, inputs, context)
            if kind.full:
                selection, full = _select(mine, full, context, cache, config), full + 1
                ids.append(selection.ids)
            out = attend(
                mine.q,
                mine.value_rows,
                pages,
                place,
                mine.records[layer],
                selection,
                context,
                softmax_scale=config.softmax_scale,
                history=history,
            )
            if fetch:
                out, ahead = jax.lax.optimization_barrier((out, ahead))
            outs.append(out)
        return jnp.stack(outs), jnp.stack(ids)[None]

    in_specs = (step_specs(inputs), cache_specs(cache), SPECS)
    run = jax.shard_map(
        local, mesh=mesh, in_specs=in_specs, out_specs=(P(None, None, TP_AXES), P(TP_AXES)), check_vma=False
    )
    return jax.jit(run)


@jax.jit
def selected_otherwise(ids: jax.Array, stock: jax.Array) -> jax.Array:
    """How many rows of all ranks and layers select another set than the stock path does."""
    return jnp.sum(jnp.any(jnp.sort(ids, axis=-1) != jnp.sort(stock, axis=-1), axis=-1))


@functools.partial(jax.jit, static_argnames=("dcp", "interleave", "rows"))
def missing_in_union(ids: jax.Array, stock: jax.Array, *, dcp: int, interleave: int, rows: int = 16) -> jax.Array:
    """How many of the stock path's ids their owners lack without a merge, in the last `rows` rows."""
    rank = jnp.arange(ids.shape[0], dtype=jnp.int32)[:, None, None, None] % dcp
    ids, wanted = ids[:, :, -rows:], stock[:, :, -rows:]
    owned = owner_of(wanted, ranks=dcp, interleave=interleave) == rank
    found = jax.lax.map(lambda pair: jnp.any(pair[0][..., :, None] == pair[1][..., None, :], axis=-1), (wanted, ids))
    return jnp.sum(owned & ~found)


@jax.jit
def relative_error(got: jax.Array, want: jax.Array) -> jax.Array:
    """Norm of the difference over the norm."""
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    return jnp.linalg.norm((got - want).ravel()) / jnp.linalg.norm(want.ravel())


def one_device_errors(
    config: ModelConfig, geometry: CacheGeometry, operands: Operands, outputs: Any, *, history: int, rows: int = 32
) -> dict[str, float]:
    """Errors of the first layer's outputs against one device that makes and holds all keys, on some rows.

    Returns:
      Rows that select another set, and the relative error of the values.
    """
    out, ids = outputs
    total = operands.q.shape[0]
    chosen = np.linspace(0, total - 1, min(rows, total)).astype(np.int32)
    device = jax.devices()[0]
    index_q, weights, q = (
        jax.device_put(np.asarray(x[chosen]), device) for x in (operands.index_q, operands.weights, operands.q)
    )
    value_rows = jax.device_put(np.asarray(operands.value_rows), device)
    visible = jnp.asarray(history + chosen + 1, jnp.int32)

    @jax.jit
    def one_device(index_q, weights, q, value_rows):
        positions = jnp.arange(history + total, dtype=jnp.int32)
        k, k_scale = split_index_keys(geometry.index_keys, keys_at(INDEX_KEY, geometry.index_keys, 0, positions))
        start = jnp.zeros_like(visible)
        found = index_topk(index_q, k, weights, start, visible, config.indexer.topk, k_scale=k_scale)
        assert isinstance(found, jax.Array)
        fmt = geometry.ckv
        kv_format = None if fmt.encoding == "plain" else fmt
        values, _ = sparse_mla(
            q if kv_format is not None else q.astype(fmt.dtype),
            keys_at(CKV, fmt, 0, positions),
            found,
            softmax_scale=config.softmax_scale,
            kv_lora_rank=fmt.latent,
            kv_format=kv_format,
            out_dtype=q.dtype,
        )
        return found, project_values(values, value_rows)

    found, wanted = one_device(index_q, weights, q, value_rows)
    mine = jax.device_put(np.asarray(ids[0, 0, chosen]), device)
    got = jax.device_put(np.asarray(out[0, chosen]), device)
    return {
        "rows": len(chosen),
        "selected_otherwise": int(selected_otherwise(mine, found)),
        "error": float(relative_error(got, wanted)),
    }
