"""The model as a `flax.nnx` module, and its forward pass on one rank."""

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from dsa_jax.batch import StepInputs
from dsa_jax.cache import PagedCache, init_cache
from dsa_jax.config import ModelConfig
from dsa_jax.layers.decoder import DecoderLayer, Execution, StepContext
from dsa_jax.layers.linear import RMSNorm, contract
from dsa_jax.layers.rope import cos_sin
from dsa_jax.params import ParamSpec, Source, declare, partition_spec, round_up
from dsa_jax.segments import Segment, plan_segments
from sharding.mesh import TP_AXES, check_mesh, tp_size

if TYPE_CHECKING:
    from dsa_jax.prefill import Batch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepOutputs:
    """What a step computes.

    Attributes:
      cache: The cache with the chunk's records written.
      logits: Logits of the wanted rows [M, padded vocabulary] float32.
      selected: Selected positions of each layer [layers, T, index_topk] int32, -1 for none; None unless asked for.
    """

    cache: PagedCache
    logits: jax.Array
    selected: jax.Array | None


class Model(nnx.Module):
    """A GLM-5 or DeepSeek-V3.2 language model.

    Parameters are global arrays sharded over `mesh`; `forward` runs inside `shard_map`, where the same module holds
    each rank's share.
    """

    def __init__(self, config: ModelConfig, mesh: Mesh):
        """Declare the parameters; they are filled from a checkpoint.

        Raises:
          ValueError: The heads do not divide by the mesh's TP size.
        """
        check_mesh(mesh)
        tp = tp_size(mesh)
        if config.num_heads % tp:
            raise ValueError(f"num_attention_heads={config.num_heads} must be divisible by {tp=}")
        self.config = config
        self.mesh = mesh
        vocab, hidden = round_up(config.vocab_size, tp), config.hidden_size
        stored = (config.vocab_size, hidden)
        self.embed_tokens = declare(vocab, hidden, axes=("vocab", None), stored=stored)
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        if not config.tie_word_embeddings:
            self.lm_head = declare(vocab, hidden, axes=("vocab", None), stored=stored)
        self.plan = plan_segments(config)
        self.segments = nnx.List(
            nnx.List(DecoderLayer(config, kind, tp, stack=segment.repeats) for kind in segment.pattern)
            for segment in self.plan
        )

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the embeddings and, by default, of the cache."""
        return jnp.dtype(self.embed_tokens.dtype)

    def init_cache(self, batch: "Batch", dtype: jax.typing.DTypeLike | None = None) -> PagedCache:
        """An empty cache with room for `batch`, in `dtype` or, when None, the model's dtype."""
        return init_cache(self.config, batch.pages, batch.page_size, dtype or self.dtype, self.mesh)

    def prefill(self, batch: "Batch", cache: PagedCache, *, execution: Execution | None = None, **options):
        """Process every pending token of `batch`; `cache` is donated. See `dsa_jax.prefill.prefill` for the options."""
        # Imported here, since the step is built on this class.
        from dsa_jax.prefill import prefill
        from dsa_jax.step import StepRunner

        return prefill(StepRunner(self, execution), batch, cache, **options)

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Embeddings [T, hidden] of tokens [T] from the vocabulary's shares."""
        table = self.embed_tokens[...]
        local = tokens - jax.lax.axis_index(TP_AXES) * table.shape[0]
        owned = (local >= 0) & (local < table.shape[0])
        rows = table[jnp.where(owned, local, 0)]
        return jax.lax.psum(jnp.where(owned[:, None], rows, jnp.zeros_like(rows)), TP_AXES)

    def logits(self, x: jax.Array) -> jax.Array:
        """Local share of the logits [M, vocabulary / tp] float32 of x [M, hidden]."""
        table = self.embed_tokens if self.config.tie_word_embeddings else self.lm_head
        return contract("mi,vi->mv", self.norm(x), table[...], jnp.dtype(jnp.float32))

    def forward(
        self,
        inputs: StepInputs,
        cache: PagedCache,
        *,
        key_capacity: int,
        execution: Execution,
        return_selected: bool,
    ) -> StepOutputs:
        """One step of one data group on this rank.

        Args:
          inputs: The group's arrays.
          cache: The group's pages; read while the layers run, written once at the end.
          key_capacity: N, size of the buffers of keys.
          execution: How the operations run.
          return_selected: Whether to return the selections.

        Returns:
          New cache, this rank's share of the logits, selections.
        """
        context = make_context(self.config, inputs, cache, key_capacity)
        x = self.embed(inputs.tokens)
        topk_indices = jnp.full((x.shape[0], self.config.indexer.topk), -1, jnp.int32)
        written = []
        for segment, layers in zip(self.plan, self.segments, strict=True):
            (x, topk_indices), outputs = run_segment(
                segment, layers, (x, topk_indices), context, cache, execution, return_selected
            )
            written.append(outputs)
        with jax.named_scope("logits"):
            logits = self.logits(x[inputs.logits_rows])
        selected = None
        if return_selected:
            selected = jnp.concatenate([merge_layers(w.selected) for w in written])
        return StepOutputs(write_cache(cache, inputs.slot_mapping, self.plan, written), logits, selected)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SegmentOutputs:
    """What the layers of a segment leave behind, one entry a position of the pattern, repeats on axis 0.

    Attributes:
      records: [repeats, T, kv_lora_rank + rope] for each position.
      index_keys: [repeats, T, D] for each full position.
      selected: [repeats, T, index_topk] for each position; empty unless asked for.
    """

    records: list[jax.Array]
    index_keys: list[jax.Array]
    selected: list[jax.Array]


def merge_layers(per_position: list[jax.Array]) -> jax.Array:
    """[repeats, ...] of each position -> [layers, ...] in the order of the layers."""
    stacked = jnp.stack(per_position, axis=1)
    return stacked.reshape(-1, *stacked.shape[2:])


def run_segment(
    segment: Segment,
    layers: nnx.List,
    carry: tuple[jax.Array, jax.Array],
    context: StepContext,
    cache: PagedCache,
    execution: Execution,
    return_selected: bool,
) -> tuple[tuple[jax.Array, jax.Array], SegmentOutputs]:
    """Scan the segment's pattern over its repeats."""
    split = [nnx.split(layer) for layer in layers]

    def body(carry, scanned):
        repeat, states = scanned
        outputs = SegmentOutputs([], [], [])
        for position, ((graphdef, _), state) in enumerate(zip(split, states, strict=True)):
            layer = segment.first + repeat * len(segment.pattern) + position
            index_layer = segment.first_index + repeat * segment.full_per_repeat + segment.index_position(position)
            x, topk_indices, record, index_keys = nnx.merge(graphdef, state)(
                *carry, context, cache, layer, index_layer, execution
            )
            carry = (x, topk_indices)
            outputs.records.append(record)
            if index_keys is not None:
                outputs.index_keys.append(index_keys)
            if return_selected:
                outputs.selected.append(topk_indices)
        return carry, outputs

    repeats = jnp.arange(segment.repeats, dtype=jnp.int32)
    return jax.lax.scan(body, carry, (repeats, [state for _, state in split]))


def make_context(config: ModelConfig, inputs: StepInputs, cache: PagedCache, key_capacity: int) -> StepContext:
    """Where the keys of a step are and which of them each row sees; see `StepContext`."""
    cos, sin = cos_sin(config.rope, config.qk_rope_head_dim, inputs.positions)
    starts = jnp.cumsum(inputs.seq_lens, dtype=jnp.int32) - inputs.seq_lens  # [R]
    real = inputs.request_ids >= 0
    key_start = jnp.where(real, starts[jnp.maximum(inputs.request_ids, 0)], 0)
    key_end = jnp.where(real, key_start + inputs.positions + 1, 0)
    own_row = jnp.where(real, key_start + inputs.positions, key_capacity)
    keys = jnp.arange(key_capacity, dtype=jnp.int32)
    request = jnp.searchsorted(starts, keys, side="right").astype(jnp.int32) - 1  # the last that starts at or before
    position = keys - starts[request]
    history = position < inputs.context_lens[request]
    page = inputs.block_table[request, jnp.where(history, position // cache.page_size, 0)]
    return StepContext(
        cos=cos,
        sin=sin,
        key_start=key_start,
        key_end=key_end,
        own_row=own_row,
        history_page=jnp.where(history, page, cache.pages),
        history_offset=position % cache.page_size,
    )


def write_cache(
    cache: PagedCache, slot_mapping: jax.Array, plan: tuple[Segment, ...], written: list[SegmentOutputs]
) -> PagedCache:
    """Scatter the records of all layers into their pages; slots of -1 are dropped."""
    real = slot_mapping >= 0
    page = jnp.where(real, slot_mapping // cache.page_size, cache.pages)
    offset = jnp.where(real, slot_mapping % cache.page_size, 0)

    def write(pages: jax.Array, first: int, rows: jax.Array) -> jax.Array:
        layers = first + jnp.arange(rows.shape[0], dtype=jnp.int32)
        return pages.at[layers[:, None], page[None], offset[None]].set(
            rows.astype(pages.dtype), mode="drop", wrap_negative_indices=False
        )

    ckv, index_keys = cache.ckv, cache.index_keys
    for segment, outputs in zip(plan, written, strict=True):
        ckv = write(ckv, segment.first, merge_layers(outputs.records))
        if outputs.index_keys:
            index_keys = write(index_keys, segment.first_index, merge_layers(outputs.index_keys))
    return PagedCache(ckv, index_keys)


def abstract_model(config: ModelConfig, mesh: Mesh) -> Model:
    """The model with shapes in place of arrays."""
    return nnx.eval_shape(lambda: Model(config, mesh))


def parameter_specs(model: Model) -> dict[str, ParamSpec]:
    """Declaration of each parameter, by its path in the module, for the checkpoint loader."""
    specs = {}
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        metadata = variable.get_metadata()
        specs[".".join(map(str, path))] = ParamSpec(
            shape=tuple(variable.shape),
            dtype=metadata["stored_dtype"],
            spec=partition_spec(metadata["axes"]),
            sources=tuple(_sources(model.plan, path, metadata["stored"])),
        )
    return specs


def _sources(plan: tuple[Segment, ...], path: tuple, stored: tuple[int, ...]):
    """The checkpoint's tensors behind the parameter at `path`."""
    if path[0] != "segments":
        name = "lm_head.weight" if path[0] == "lm_head" else "model." + ".".join(map(str, path))
        yield Source(name if name.endswith(".weight") else name + ".weight", stored)
        return
    segment, position, names = plan[path[1]], path[2], [str(p) for p in path[3:]]
    for repeat in range(segment.repeats):
        prefix = f"model.layers.{segment.layer(position, repeat)}"
        if "experts" in names:
            for expert in range(stored[0]):
                yield Source(f"{prefix}.mlp.experts.{expert}.{names[-1]}.weight", stored[1:], (repeat, expert))
        else:
            yield Source(f"{prefix}.{'.'.join(names)}", stored, (repeat,))


def fill_parameters(model: Model, arrays: dict[str, jax.Array]) -> Model:
    """The abstract `model` with `arrays` (by the names of `parameter_specs`) as its parameters."""
    graphdef, state = nnx.split(model)
    flat = {path: variable.replace(arrays[".".join(map(str, path))]) for path, variable in nnx.to_flat_state(state)}
    return nnx.merge(graphdef, nnx.from_flat_state(flat))


def parameter_shardings(model: Model) -> nnx.State:
    """Shardings of the parameters in the structure of the module's state."""
    state = nnx.state(model)
    return jax.tree.map(
        lambda variable: variable.replace(NamedSharding(model.mesh, partition_spec(variable.get_metadata()["axes"]))),
        state,
        is_leaf=lambda x: isinstance(x, nnx.Variable),
    )
