"""One jitted step over a mesh: the whole forward pass inside a single `shard_map`, the cache donated."""

import dataclasses
import functools
import time
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from dsa_jax.batch import GroupLengths, Step, StepInputs, step_specs
from dsa_jax.cache import CacheGeometry, PagedCache, cache_specs
from dsa_jax.config import ModelConfig
from dsa_jax.layers.context import StepOptions
from dsa_jax.model import Model, StepOutputs
from dsa_jax.multihost import check_agreement, to_devices
from dsa_jax.params import partition_spec
from sharding.cost_model import AttentionFacts
from sharding.indexer_sharding import IndexSharding, split_size
from sharding.mesh import DATA, DCP, QSPLIT, TP_AXES
from sharding.policy import Decision, PrefillPolicy, decide
from sharding.row_partition import RowPlan, balanced_plan, contiguous_plan, plan_contiguous, row_costs

# Consecutive rows of the indexer that are dealt together: small tiles balance small steps.
PLAN_TILE = 16


@dataclasses.dataclass(frozen=True)
class Execution:
    """How steps run.

    Attributes:
      policy: Which sharded paths a step may take.
      implementation: Implementation of the kernels, or None for the fastest the device supports.
      workspace_bytes: Bound on the temporaries of one operation, in bytes.
      expert_exchange: Whether ranks send rows to their experts. The residual stream is the same on every rank, so that
        all rows are where their experts are already: an exchange moves more bytes and routes a share of the rows.
    """

    policy: PrefillPolicy = dataclasses.field(default_factory=PrefillPolicy)
    implementation: str | None = None
    workspace_bytes: int = 1 << 30
    expert_exchange: bool = False


def attention_facts(config: ModelConfig, geometry: CacheGeometry, dtype: jax.typing.DTypeLike) -> AttentionFacts:
    """What the cost model needs to know of a model."""
    return AttentionFacts(
        heads=config.num_heads,
        index_heads=config.indexer.num_heads,
        index_dim=config.indexer.head_dim,
        top_k=config.indexer.topk,
        record_bytes=geometry.ckv.bytes_per_token,
        kpool=geometry.kpool,
        record_width=geometry.ckv.width,
        kv_lora_rank=config.kv_lora_rank,
        value_dim=config.v_head_dim,
        value_bytes=np.dtype(dtype).itemsize,
    )


def decide_step(
    model: Model, geometry: CacheGeometry, lengths: tuple[GroupLengths, ...], policy: PrefillPolicy
) -> Decision:
    """The path of a step: that of its heaviest data group, since all groups run one program.

    A function of lengths that every process knows.

    Raises:
      ValueError: The policy does not fit the mesh or the cache.
    """
    if policy.index_replicas != geometry.index_replicas:
        raise ValueError(
            f"the policy has index_replicas={policy.index_replicas}, the cache has {geometry.index_replicas}"
        )
    heaviest = max(lengths, key=lambda group: (int(group.seq_lens.sum()), int(group.query_lens.sum())))
    return decide(
        policy,
        heaviest.seq_lens.tolist(),
        heaviest.query_lens.tolist(),
        attention_facts(model.config, geometry, model.dtype),
        qsplit=model.mesh.shape[QSPLIT],
        dcp=model.mesh.shape[DCP],
    )


def _program(decision: Decision, dcp: int) -> Decision:
    """The decision without what the layers do not ask for, so that steps that run alike share one program."""
    return dataclasses.replace(decision, select_all=False, project_first=decision.project_first and dcp > 1)


def _without_costs(options: StepOptions) -> StepOptions:
    """The options without what the cost model says in floats, which may round differently on another host."""
    return dataclasses.replace(options, decision=dataclasses.replace(options.decision, candidates=()))


def plan_rows(
    decision: Decision, lengths: tuple[GroupLengths, ...], rows: int, *, qsplit: int, dcp: int, kpool: int = 1
) -> RowPlan | None:
    """Which rank selects for which rows, of each data group one after another; None when every rank does for all.

    Args:
      decision: The path of the step.
      lengths: Lengths in each data group.
      rows: Rows of a group, padding included.
      qsplit: Size of the mesh's "qsplit" axis.
      dcp: Size of the mesh's "dcp" axis.
      kpool: Tokens of an index key, which is what a row costs.
    """
    if not decision.query_split:
        return None
    ranks = split_size(qsplit, dcp, IndexSharding(decision.index_shards))
    plans = []
    for group in lengths:
        costs = row_costs(group.seq_lens, group.query_lens, kpool)
        if decision.partition == "balanced":
            plans.append(balanced_plan(costs, rows=rows, ranks=ranks, tile=min(PLAN_TILE, max(1, rows // ranks))))
            continue
        # A fixed capacity, so that a new plan compiles nothing: what a fresh prompt gives the first rank.
        capacity = min(rows, int(np.ceil(rows / np.sqrt(ranks))) + 1)
        sizes = None
        if len(costs):
            sizes = plan_contiguous(
                group.seq_lens,
                group.query_lens,
                ratio=kpool,
                ranks=ranks,
                min_rows_per_rank=1,
                max_rows_per_rank=capacity,
            )
        if sizes is None:
            sizes = tuple(len(part) for part in np.array_split(costs, ranks))
        plans.append(contiguous_plan(sizes, rows=rows, capacity=capacity))
    return jax.tree.map(lambda *parts: np.concatenate(parts), *plans)


def state_specs(state: nnx.State) -> nnx.State:
    """Mesh axes of each parameter, in the structure of `state`."""
    return jax.tree.map(
        lambda variable: variable.replace(partition_spec(variable.get_metadata()["axes"])),
        state,
        is_leaf=lambda x: isinstance(x, nnx.Variable),
    )


@functools.partial(jax.jit, static_argnames=("graphdef", "options"), donate_argnames=("cache",))
def run_step(
    graphdef: nnx.GraphDef, state: nnx.State, inputs: StepInputs, cache: PagedCache, options: StepOptions
) -> StepOutputs:
    """Run the model on one step.

    Args:
      graphdef: Structure of the `Model`, from `nnx.split`.
      state: Its parameters, sharded as declared.
      inputs: The step's arrays, sharded over "data".
      cache: The cache, donated.
      options: Static options.

    Returns:
      New cache, logits [data * M, padded vocabulary] float32 sharded over "data" and TP, selections if asked for.
    """
    mesh = nnx.merge(graphdef, state).mesh

    def local(state: nnx.State, inputs: StepInputs, cache: PagedCache) -> StepOutputs:
        return nnx.merge(graphdef, state).forward(inputs, cache, options)

    in_specs = (state_specs(state), step_specs(inputs), cache_specs(cache))
    specs: dict[str, Any] = {"cache": in_specs[2], "logits": PartitionSpec(DATA, TP_AXES), "selected": None}
    if options.return_selected:
        specs["selected"] = PartitionSpec(None, DATA)
    # check_vma=False: pallas kernels inside do not carry the varying-axes types that the check wants. The functions of
    # `sharding` are tested under both.
    step = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=StepOutputs(**specs), check_vma=False)
    return step(state, inputs, cache)


@functools.lru_cache(maxsize=512)
def _compile(graphdef: nnx.GraphDef, treedef, leaves: tuple[jax.ShapeDtypeStruct, ...], options: StepOptions):
    state, inputs, cache = jax.tree.unflatten(treedef, leaves)
    return run_step.lower(graphdef, state, inputs, cache, options).compile()


def _abstract(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def compile_step(model: Model, inputs: StepInputs, cache: PagedCache, options: StepOptions) -> jax.stages.Compiled:
    """Compiled step for arguments of these shapes and shardings, which may be `jax.ShapeDtypeStruct`s."""
    graphdef, state = nnx.split(model)
    # As declared: what a step returns may spell the same sharding in another way, which would compile another program.
    cache = jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(model.mesh, spec)),
        cache,
        cache_specs(cache),
    )
    leaves, treedef = jax.tree.flatten((state, inputs, cache))
    return _compile(graphdef, treedef, tuple(map(_abstract, leaves)), options)


class StepRunner:
    """Plans and runs the steps of one model, and keeps count of the time spent compiling.

    Attributes:
      model: The model.
      execution: How the steps run.
      compile_seconds: Time spent compiling so far.
      programs: Compiled programs that have run.
      decision: The path of the last step.
    """

    def __init__(self, model: Model, execution: Execution | None = None):
        """Prepare to run `model`; with several processes, in all of them.

        Raises:
          DisagreementError: The processes have different models, meshes, versions of jax or options.
        """
        self.model = model
        self.execution = Execution() if execution is None else execution
        self.compile_seconds = 0.0
        self.programs: list[jax.stages.Compiled] = []
        self.decision: Decision | None = None
        self._state = nnx.state(model)
        self._inputs_sharding = NamedSharding(model.mesh, PartitionSpec(DATA))
        ranks = np.array([device.id for device in model.mesh.devices.flat]).reshape(model.mesh.devices.shape)
        runs = (model.config, model.dtype, model.mesh.axis_types, jax.__version__, self.execution)
        check_agreement("model, mesh or options", ranks, *runs)

    def prepare(
        self, step: Step, geometry: CacheGeometry, *, return_selected: bool = False
    ) -> tuple[StepInputs, StepOptions]:
        """The step's arrays on the devices, its plan of rows among them, and its static options."""
        mesh = self.model.mesh
        self.decision = decide_step(self.model, geometry, step.lengths, self.execution.policy)
        rows = step.inputs.tokens.shape[0] // mesh.shape[DATA]
        split = {"qsplit": mesh.shape[QSPLIT], "dcp": mesh.shape[DCP]}
        plan = plan_rows(self.decision, step.lengths, rows, kpool=geometry.kpool, **split)
        most = max(int(group.query_lens.max(initial=0)) for group in step.lengths)
        options = StepOptions(
            decision=_program(self.decision, mesh.shape[DCP]),
            ckv_rows=step.ckv_rows,
            index_rows=step.index_rows,
            implementation=self.execution.implementation,
            workspace_bytes=self.execution.workspace_bytes,
            return_selected=return_selected,
            expert_exchange=self.execution.expert_exchange,
            single_rows=self.model.config.kda is not None and most <= 1,
        )
        inputs = dataclasses.replace(step.inputs, plan=plan)
        return to_devices(inputs, self._inputs_sharding), options

    def __call__(self, step: Step, cache: PagedCache, *, return_selected: bool = False) -> StepOutputs:
        """Run one step; `cache` is donated and must not be used again.

        Raises:
          DisagreementError: Processes are about to run different steps; the cache is as it was.
        """
        inputs, options = self.prepare(step, cache.geometry, return_selected=return_selected)
        sizes = (cache.geometry, cache.ckv.shape, cache.index_keys.shape, _without_costs(options))
        check_agreement("requests, cache or options of a step", *jax.tree.leaves(step.inputs), *sizes)
        started = time.perf_counter()
        compiled = compile_step(self.model, inputs, cache, options)
        self.compile_seconds += time.perf_counter() - started
        if compiled not in self.programs:
            self.programs.append(compiled)
        return compiled(self._state, inputs, cache)
