"""One jitted step over a mesh: the whole forward pass inside a single `shard_map`, the cache donated."""

import dataclasses
import functools
import time
from typing import Any

import jax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from dsa_jax.batch import STEP_SPEC, Step, StepInputs
from dsa_jax.cache import CACHE_SPEC, PagedCache
from dsa_jax.layers.decoder import Execution
from dsa_jax.model import Model, StepOutputs
from dsa_jax.params import partition_spec
from sharding.mesh import DATA, TP_AXES


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """What besides the shapes of its arguments makes a step a program of its own.

    Attributes:
      key_capacity: How many keys the buffers of one data group hold.
      execution: How the operations run.
      return_selected: Whether selections are returned.
    """

    key_capacity: int
    execution: Execution
    return_selected: bool = False


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
        return nnx.merge(graphdef, state).forward(
            inputs,
            cache,
            key_capacity=options.key_capacity,
            execution=options.execution,
            return_selected=options.return_selected,
        )

    specs: dict[str, Any] = {"cache": CACHE_SPEC, "logits": PartitionSpec(DATA, TP_AXES), "selected": None}
    if options.return_selected:
        specs["selected"] = PartitionSpec(None, DATA)
    out_specs = StepOutputs(**specs)
    # check_vma=False: pallas kernels inside do not carry the varying-axes types that the check wants.
    return jax.shard_map(
        local, mesh=mesh, in_specs=(state_specs(state), STEP_SPEC, CACHE_SPEC), out_specs=out_specs, check_vma=False
    )(state, inputs, cache)


@functools.lru_cache(maxsize=512)
def _compile(graphdef: nnx.GraphDef, treedef, leaves: tuple[jax.ShapeDtypeStruct, ...], options: StepOptions):
    state, inputs, cache = jax.tree.unflatten(treedef, leaves)
    return run_step.lower(graphdef, state, inputs, cache, options).compile()


def _abstract(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def compile_step(model: Model, inputs: StepInputs, cache: PagedCache, options: StepOptions) -> jax.stages.Compiled:
    """Compiled step for arguments of these shapes and shardings, which may be `jax.ShapeDtypeStruct`s."""
    graphdef, state = nnx.split(model)
    leaves, treedef = jax.tree.flatten((state, inputs, cache))
    return _compile(graphdef, treedef, tuple(map(_abstract, leaves)), options)


class StepRunner:
    """Runs steps of one model and keeps count of the time spent compiling.

    Attributes:
      model: The model.
      execution: How the operations run.
      compile_seconds: Time spent compiling so far.
    """

    def __init__(self, model: Model, execution: Execution | None = None):
        """Prepare to run `model`."""
        self.model = model
        self.execution = Execution() if execution is None else execution
        self.compile_seconds = 0.0
        self._state = nnx.state(model)
        self._inputs_sharding = NamedSharding(model.mesh, PartitionSpec(DATA))

    def __call__(self, step: Step, cache: PagedCache, *, return_selected: bool = False) -> StepOutputs:
        """Run one step; `cache` is donated and must not be used again."""
        options = StepOptions(step.key_capacity, self.execution, return_selected)
        inputs = jax.device_put(step.inputs, self._inputs_sharding)
        started = time.perf_counter()
        compiled = compile_step(self.model, inputs, cache, options)
        self.compile_seconds += time.perf_counter() - started
        return compiled(self._state, inputs, cache)
