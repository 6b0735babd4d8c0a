"""The model as a `flax.nnx` module, and its forward pass on one rank."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from dsa_jax.batch import StepInputs
from dsa_jax.cache import PagedCache, RequestState
from dsa_jax.config import ModelConfig
from dsa_jax.fp8_weights import Fp8Matmul, keep_fp8
from dsa_jax.layers.attention import gather_layer, no_selection
from dsa_jax.layers.context import StepContext, StepOptions, make_context
from dsa_jax.layers.decoder import DecoderLayer, LayerCarry, LayerOutputs
from dsa_jax.layers.linear import RMSNorm, contract
from dsa_jax.layers.mhc import close_streams, open_streams
from dsa_jax.params import ParamSpec, Source, declare, partition_spec, round_up
from dsa_jax.quantization import SCALE_SUFFIX
from dsa_jax.segments import Segment, plan_segments
from sharding.mesh import TP_AXES, check_mesh, tp_size

if TYPE_CHECKING:
    from dsa_jax.prefill import Batch
    from dsa_jax.step import Execution


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepOutputs:
    """What a step computes.

    Attributes:
      cache: The cache with the chunk's records written.
      logits: Logits of the wanted rows [M, padded vocabulary] float32.
      selected: Selected positions of each layer of sparse attention [sparse layers, T, selected_width] int32, -1 for
        none; None unless asked for.
    """

    cache: PagedCache
    logits: jax.Array
    selected: jax.Array | None


class Model(nnx.Module):
    """A GLM-5, GLM-5.3-Flash or DeepSeek-V3.2 language model.

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
        if config.kda is not None and config.kda.num_heads % tp:
            raise ValueError(f"linear_attn_config.num_heads={config.kda.num_heads} must be divisible by {tp=}")
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

    def prefill(self, batch: "Batch", cache: PagedCache, *, execution: "Execution | None" = None, **options):
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

    def forward(self, inputs: StepInputs, cache: PagedCache, options: StepOptions) -> StepOutputs:
        """One step of one data group on this rank.

        Args:
          inputs: The group's arrays.
          cache: This rank's pages, read while the layers run and written once at the end; and the state of its
            requests, which each layer writes in place.
          options: Static options.

        Returns:
          New cache, this rank's share of the logits, selections.
        """
        with jax.named_scope("layout"):
            context = make_context(self.config, inputs, cache.geometry, options)
        with jax.named_scope("embedding"):
            x = open_streams(self.embed(inputs.tokens), self.config.hyper_connections)
        ahead = gather_layer(cache.ckv, jnp.int32(0), context) if options.decision.prefetch else None
        selection = no_selection(x.shape[0], self.config.selected_width, context)
        carry = LayerCarry(x, cache.state, selection, ahead)
        written = []
        for segment, layers in zip(self.plan, self.segments, strict=True):
            carry, outputs = run_segment(segment, layers, carry, context, cache)
            written.append(outputs)
        with jax.named_scope("logits"):
            logits = self.logits(close_streams(carry.x[inputs.logits_rows], self.config.hyper_connections))
        new = {
            field.name: in_layer_order([[getattr(o, field.name) for o in outputs] for outputs in written])
            for field in dataclasses.fields(LayerOutputs)
        }
        with jax.named_scope("cache_write"):
            written_cache = write_cache(cache, context, carry.state, new)
        return StepOutputs(written_cache, logits, new["selected"])


def write_cache(
    cache: PagedCache, context: StepContext, state: RequestState, new: dict[str, jax.Array | None]
) -> PagedCache:
    """The cache with `state`, and with what all layers left behind, by the names of `LayerOutputs`, in one go."""
    records, index_keys = new["record"], new["index_keys"]
    assert records is not None and index_keys is not None
    return PagedCache(
        context.ckv.store(cache.ckv, records),
        context.index_keys.store(cache.index_keys, index_keys),
        state,
        cache.geometry,
    )


def in_layer_order(segments: list[list[jax.Array | None]]) -> jax.Array | None:
    """[layers, ...] from [repeats, ...] for each position of each segment's pattern; layers with None are left out."""
    runs = []
    for positions in segments:
        arrays = [array for array in positions if array is not None]
        if arrays:
            stacked = jnp.stack(arrays, axis=1)
            runs.append(stacked.reshape(-1, *stacked.shape[2:]))
    if not runs:
        return None
    return runs[0] if len(runs) == 1 else jnp.concatenate(runs)


def run_segment(
    segment: Segment, layers: nnx.List, carry: LayerCarry, context: StepContext, cache: PagedCache
) -> tuple[LayerCarry, list[LayerOutputs]]:
    """Scan the segment's pattern over its repeats; the outputs of each position, repeats in front."""
    split = [nnx.split(layer, _is_whole, ...) for layer in layers]

    def body(carry: LayerCarry, scanned):
        repeat, states = scanned
        outputs = []
        for position, ((graphdef, whole, _), state) in enumerate(zip(split, states, strict=True)):
            layer = nnx.merge(graphdef, whole, state)
            carry, left = layer(carry, context, cache, segment.place(position, repeat), repeat)
            outputs.append(left)
        return carry, outputs

    repeats = jnp.arange(segment.repeats, dtype=jnp.int32)
    return jax.lax.scan(body, carry, (repeats, [state for _, _, state in split]))


def _is_whole(path, variable) -> bool:
    """Whether every layer of a stack is handed the whole of a parameter."""
    del path
    return isinstance(variable, nnx.Param) and variable.get_metadata()["whole"]


def abstract_model(
    config: ModelConfig, mesh: Mesh, fp8: Collection[str] = (), *, fp8_matmul: str | None = None
) -> Model:
    """The model with shapes in place of arrays.

    Args:
      config: Its sizes.
      mesh: Mesh that its parameters are split over.
      fp8: Parameters that stay FP8, see `dsa_jax.fp8_weights`.
      fp8_matmul: Implementation of `pallas_kernels.scaled_matmul` that multiplies them; None dequantises them first.

    Raises:
      ValueError: The heads do not divide by the mesh's TP size, a parameter of `fp8` cannot be FP8, or `fp8_matmul`
        cannot multiply a rank's share of it.
    """

    def declared() -> Model:
        model = Model(config, mesh)
        if fp8:
            quantization = config.quantization
            block = None if quantization is None else quantization.block
            power_of_two = quantization is not None and quantization.power_of_two
            matmul = None if fp8_matmul is None else Fp8Matmul(fp8_matmul, power_of_two)
            keep_fp8(model, fp8, block, matmul=matmul, tp=tp_size(mesh))
        return model

    return nnx.eval_shape(declared)


def parameter_specs(model: Model) -> dict[str, ParamSpec]:
    """Declaration of each parameter, by its path in the module, for the checkpoint loader."""
    specs = {}
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        metadata = variable.get_metadata()
        specs[".".join(map(str, path))] = ParamSpec(
            shape=tuple(variable.shape),
            dtype=metadata["stored_dtype"],
            spec=partition_spec(metadata["axes"]),
            sources=tuple(_sources(model.plan, path, metadata["stored"], model.config.tensor_prefix)),
        )
    return specs


def _sources(plan: tuple[Segment, ...], path: tuple, stored: tuple[int, ...], tensor_prefix: str):
    """The checkpoint's tensors behind the parameter at `path`."""
    if path[0] != "segments":
        name = "lm_head.weight" if path[0] == "lm_head" else tensor_prefix + ".".join(map(str, path))
        yield Source(name if name.endswith(".weight") else name + ".weight", stored)
        return
    segment, position, names = plan[path[1]], path[2], [str(p) for p in path[3:]]
    for repeat in range(segment.repeats):
        prefix = f"{tensor_prefix}layers.{segment.layer(position, repeat)}"
        if "experts" in names:
            projection = names[-1].removesuffix(SCALE_SUFFIX)
            tensor = f"{projection}.weight{names[-1][len(projection) :]}"
            for expert in range(stored[0]):
                yield Source(f"{prefix}.mlp.experts.{expert}.{tensor}", stored[1:], (repeat, expert))
        else:
            # The parameters of the residual connections have no module of their own in checkpoints.
            name = "_".join(names) if names[0].startswith("hc_") else ".".join(names)
            yield Source(f"{prefix}.{name}", stored, (repeat,))


def fill_parameters(model: Model, arrays: Mapping[str, jax.Array | jax.ShapeDtypeStruct]) -> Model:
    """The abstract `model` with `arrays` (by the names of `parameter_specs`) as its parameters."""
    graphdef, state = nnx.split(model)
    flat = {path: variable.replace(arrays[".".join(map(str, path))]) for path, variable in nnx.to_flat_state(state)}
    return nnx.merge(graphdef, nnx.from_flat_state(flat))
