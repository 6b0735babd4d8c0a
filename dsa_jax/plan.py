"""Will a model fit, which path does it take, how long will it take: answered without a device.

Bytes are those of one device. Weights and caches are counted exactly, from the declarations that the loader and the
cache follow; workspaces are an upper estimate of what a step holds at a time, to be compared with a compiled step
(`dsa_jax.plan_compile`).
"""

import dataclasses
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dsa_jax.batch import Request, Step, StepInputs, build_step
from dsa_jax.cache import DEFAULT_PAGE_SIZE, CacheGeometry, PagedCache, cache_shapes
from dsa_jax.config import ModelConfig
from dsa_jax.fp8_weights import declared_quantized, fp8_candidates, fp8_parameters
from dsa_jax.layers.context import StepOptions
from dsa_jax.layers.mlp import expert_capacity
from dsa_jax.model import Model, abstract_model, fill_parameters, parameter_specs
from dsa_jax.params import ParamSpec
from dsa_jax.plan_time import PredictedTime, predict_time
from dsa_jax.step import Execution, attention_facts, decide_step, plan_rows
from sharding.mesh import DATA, DCP, QSPLIT, planning_mesh, tp_size
from sharding.policy import Decision


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """What is planned: one prompt of `context` tokens a data group, prefilled in chunks.

    Attributes:
      tp: Tensor-parallel size.
      dcp: Decode-context-parallel size.
      data: Data groups.
      context: Tokens of the prompt.
      chunk_size: Most rows of a step.
      dtype: dtype of activations, and of weights that are not kept in FP8.
      keep_fp8: Whether the weights of an FP8 checkpoint stay FP8, and those of an NVFP4 one become FP8.
      fp8_matmul: How FP8 weights are multiplied, see `dsa_jax.model.abstract_model`.
      kv_format: Format of the compressed KV, see `CacheGeometry.for_model`.
      index_format: Format of the index keys.
      page_size: Tokens of a page that each DCP rank holds.
      interleave: Tokens in a run of one DCP rank.
      index_replicas: How often a DCP group holds the index keys.
      execution: How the steps run.
    """

    tp: int
    context: int
    dcp: int = 1
    data: int = 1
    chunk_size: int = 8192
    dtype: str = "bfloat16"
    keep_fp8: bool = True
    fp8_matmul: str | None = None
    kv_format: str = "auto"
    index_format: str = "auto"
    page_size: int = DEFAULT_PAGE_SIZE
    interleave: int = 1
    index_replicas: int = 1
    execution: Execution = dataclasses.field(default_factory=Execution)

    def __post_init__(self):
        """Check the sizes that no other object checks."""
        for name in ("context", "chunk_size"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {name}={getattr(self, name)}")

    def mesh(self) -> Mesh:
        """The mesh, without devices."""
        return planning_mesh(tp=self.tp, dcp=self.dcp, data=self.data)


@dataclasses.dataclass(frozen=True)
class AbstractStep:
    """The last and longest step of a prompt, as shapes.

    Attributes:
      model: The model.
      cache: Its cache.
      inputs: The step's arrays.
      options: Its static options, the decision among them.
    """

    model: Model
    cache: PagedCache
    inputs: StepInputs
    options: StepOptions


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a device holds and what a prompt takes.

    Attributes:
      weights: Bytes of the weights, by dtype.
      caches: Bytes of the caches: "ckv", "index_keys", and "state" of one request a data group where the model has any.
      workspaces: Bytes of what a step holds besides, by purpose; those of one layer at its fullest.
      cache_tokens_lost: Tokens that the cache could hold in the bytes of the gathered buffers.
      decision: The path of the prompt's last step.
      time: Predicted times.
    """

    weights: Mapping[str, int]
    caches: Mapping[str, int]
    workspaces: Mapping[str, int]
    cache_tokens_lost: int
    decision: Decision
    time: PredictedTime

    @property
    def total_bytes(self) -> int:
        """Bytes of a device that are needed at a time."""
        return sum(sum(part.values()) for part in (self.weights, self.caches, self.workspaces))


def abstract_step(config: ModelConfig, options: PlanOptions, mesh: Mesh) -> AbstractStep:
    """The prompt's last step on a mesh, which may have no devices.

    Raises:
      ValueError: The sizes do not fit the model, the mesh or each other.
    """
    dtype = jnp.dtype(options.dtype)
    if options.context > config.max_position_embeddings:
        raise ValueError(
            f"context={options.context} exceeds the model's maximum of {config.max_position_embeddings} tokens"
        )
    model = abstract_model(config, mesh)
    if options.keep_fp8 and config.quantization is not None:
        quantized = declared_quantized(config.quantization)
        kept = fp8_parameters(fp8_candidates(model), parameter_specs(model), quantized)
        model = abstract_model(config, mesh, kept, fp8_matmul=options.fp8_matmul)
    arrays = {
        name: jax.ShapeDtypeStruct(
            spec.shape, dtype if spec.dtype is None else spec.dtype, sharding=NamedSharding(mesh, spec.spec)
        )
        for name, spec in parameter_specs(model).items()
    }
    model = fill_parameters(model, arrays)
    sizes = {name: getattr(options, name) for name in ("page_size", "interleave", "index_replicas")}
    geometry = CacheGeometry.for_model(
        config, mesh, dtype, kv_format=options.kv_format, index_format=options.index_format, **sizes
    )
    pages = -(-options.context // geometry.tokens_per_page)
    step = last_step(options, geometry, pages)
    decision = decide_step(model, geometry, step.lengths, options.execution.policy)
    rows = step.inputs.tokens.shape[0] // options.data
    inputs = dataclasses.replace(
        step.inputs,
        plan=plan_rows(
            decision, step.lengths, rows, qsplit=mesh.shape[QSPLIT], dcp=mesh.shape[DCP], kpool=geometry.kpool
        ),
    )
    by_group = NamedSharding(mesh, PartitionSpec(DATA))
    inputs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=by_group), inputs)
    step_options = StepOptions(
        decision=decision,
        ckv_rows=step.ckv_rows,
        index_rows=step.index_rows,
        implementation=options.execution.implementation,
        workspace_bytes=options.execution.workspace_bytes,
        expert_exchange=options.execution.expert_exchange,
        single_rows=config.kda is not None and min(options.chunk_size, options.context) == 1,
    )
    return AbstractStep(model, cache_shapes(config, geometry, pages, mesh), inputs, step_options)


def last_step(options: PlanOptions, geometry: CacheGeometry, pages: int) -> Step:
    """The step of the last rows of one prompt in each data group."""
    rows = min(options.chunk_size, options.context)
    requests = [
        Request(np.zeros(options.context, np.int64), np.arange(pages), group=group, cached=options.context - rows)
        for group in range(options.data)
    ]
    step = build_step(requests, geometry, groups=options.data, chunk_size=options.chunk_size)
    assert step is not None
    return step


def make_plan(config: ModelConfig, options: PlanOptions) -> Plan:
    """Plan a prefill.

    Args:
      config: The model.
      options: Mesh, prompt, formats and policy.

    Raises:
      ValueError: The sizes do not fit the model, the mesh or each other.
    """
    mesh = options.mesh()
    step = abstract_step(config, options, mesh)
    geometry, dtype = step.cache.geometry, jnp.dtype(options.dtype)
    weights: dict[str, int] = {}
    for spec in parameter_specs(step.model).values():
        kind = dtype if spec.dtype is None else spec.dtype
        weights[kind.name] = weights.get(kind.name, 0) + local_elements(spec, mesh) * kind.itemsize
    parts = {"ckv": step.cache.ckv, "index_keys": step.cache.index_keys, "state": step.cache.state}
    caches = {name: sum(map(_local_bytes, jax.tree.leaves(part))) for name, part in parts.items()}
    workspaces = workspace_bytes(config, options, step)
    # What a token takes of a rank's memory; a page is dealt to all ranks of a group.
    per_token = geometry.bytes_per_token(config) / options.dcp
    return Plan(
        weights=weights,
        caches={name: count for name, count in caches.items() if count},
        workspaces=workspaces,
        cache_tokens_lost=int(workspaces["gathered_history"] / per_token),
        decision=step.options.decision,
        time=predict_time(
            config,
            attention_facts(config, geometry, dtype),
            options.execution.policy,
            qsplit=mesh.shape[QSPLIT],
            dcp=mesh.shape[DCP],
            context=options.context,
            chunk_size=options.chunk_size,
        ),
    )


def local_elements(spec: ParamSpec, mesh: Mesh) -> int:
    """Elements of a parameter that one device holds."""
    local = NamedSharding(mesh, spec.spec).shard_shape(spec.shape)
    return math.prod(local)


def _local_bytes(array: jax.ShapeDtypeStruct) -> int:
    """Bytes of an array of the cache that one device holds."""
    assert array.sharding is not None
    return math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize


def workspace_bytes(config: ModelConfig, options: PlanOptions, step: AbstractStep) -> dict[str, int]:
    """Bytes that a step holds besides weights and caches, by purpose; an upper estimate.

    What attention, indexer and experts hold is not there at the same time: their largest is counted.
    """
    rows, value = step.inputs.tokens.shape[0] // options.data, jnp.dtype(options.dtype).itemsize
    geometry, decision = step.cache.geometry, step.options.decision
    tp, bound = tp_size(step.model.mesh), step.options.workspace_bytes
    full = config.indexer_types.count("full")
    ckv, index = geometry.ckv.bytes_per_token, geometry.index_keys.bytes_per_token
    buffers = options.dcp * (2 if decision.prefetch else 1) if decision.ckv_gather else 1
    heads = config.num_heads // tp * (options.dcp if options.dcp > 1 and not decision.ckv_gather else 1)
    attention = rows * heads * (geometry.ckv.width + config.kv_lora_rank) * value
    # Scores, or gathered records, of a tile of rows; and ids and scores of the selection before they are merged.
    selection = rows * config.indexer.topk
    experts = 0
    if config.moe is not None:
        moe = config.moe
        served = expert_capacity(rows * moe.num_experts_per_tok, tp)
        experts = served * (2 * config.hidden_size + 2 * moe.intermediate_size) * value
        # The sum of the results in float32, and that of a round.
        experts += 2 * rows * config.hidden_size * 4
        if options.keep_fp8 and config.quantization is not None and options.fp8_matmul is None:
            # One projection of a layer's experts at a time is dequantised.
            experts += -(-moe.num_experts // tp) * moe.intermediate_size * config.hidden_size * value
    streams = 1 if config.hyper_connections is None else config.hyper_connections.streams
    linear = 0
    if config.kda is not None:
        # Queries, keys, values, decays and outputs in float32, before and behind their deal into blocks.
        linear = 10 * rows * config.kda.width // tp * 4
    return {
        "gathered_history": step.options.ckv_rows * ckv * buffers,
        "index_keys": step.options.index_rows * index * 2,
        "layer": max(attention + bound, experts, bound + selection * 8, linear + bound if linear else 0),
        "selection": selection * 8,
        "residual": 4 * rows * streams * config.hidden_size * value,
        # Every layer's records and index keys until they are written, and once more while they are joined.
        "records": 2 * rows * (len(config.sparse_layers) * ckv + full * index // config.index_kpool),
        "logits": step.inputs.logits_rows.shape[0] // options.data * -(-config.vocab_size // tp) * 4,
    }
