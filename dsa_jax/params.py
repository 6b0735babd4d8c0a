"""Declaration of parameters: shape, sharding and checkpoint source of each, stated once."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from sharding.mesh import TP_AXES

# Logical axis of a parameter -> mesh axes. Everything that is split is split over the whole of TP.
RULES: dict[str | None, tuple[str, ...] | None] = {
    "heads": TP_AXES,
    "mlp": TP_AXES,
    "experts": TP_AXES,
    "vocab": TP_AXES,
    None: None,
}


@dataclasses.dataclass(frozen=True)
class Source:
    """One tensor of a Hugging Face checkpoint and where it goes in a parameter.

    Attributes:
      name: Name in the checkpoint.
      shape: Shape in the checkpoint.
      index: Leading indices of the parameter that the tensor fills; the rest of the parameter beyond `shape` is
        padding and stays 0.
    """

    name: str
    shape: tuple[int, ...]
    index: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """A parameter as the devices hold it.

    Attributes:
      shape: Global shape, padding included.
      dtype: dtype on the device; None takes the dtype the model is loaded with.
      spec: How it is split over the mesh.
      sources: The checkpoint's tensors that make it up.
    """

    shape: tuple[int, ...]
    dtype: jnp.dtype | None
    spec: PartitionSpec
    sources: tuple[Source, ...]


def round_up(value: int, multiple: int) -> int:
    """Smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def partition_spec(axes: Sequence[str | None]) -> PartitionSpec:
    """Mesh axes of a parameter with these logical axes."""
    return PartitionSpec(*(RULES[axis] for axis in axes))


def declare(
    *shape: int,
    axes: Sequence[str | None] = (),
    stack: int | None = None,
    stored: Sequence[int] | None = None,
    dtype: jax.typing.DTypeLike | None = None,
    whole: bool = False,
) -> nnx.Param:
    """A parameter to be filled from a checkpoint.

    Args:
      *shape: Global shape of one layer's parameter, padding included.
      axes: Logical axis of each dimension (see RULES); empty means not split.
      stack: Number of layers whose parameters are stacked on a leading axis, or None for no such axis.
      stored: Shape without padding, as in the checkpoint (for experts: [experts, ...]); None means `shape`.
      dtype: dtype on the device, or None for the dtype the model is loaded with.
      whole: Whether a layer is handed the parameters of the whole stack, and picks its own where it uses them: a kernel
        would else be fed a copy.
    """
    axes = tuple(axes) or (None,) * len(shape)
    if len(axes) != len(shape):
        raise ValueError(f"{axes=} must name each dimension of {shape=}")
    lead = () if stack is None else (stack,)
    value = jnp.zeros((*lead, *shape), jnp.float32 if dtype is None else dtype)
    return nnx.Param(
        value,
        axes=(*(None for _ in lead), *axes),
        stored=tuple(shape if stored is None else stored),
        stored_dtype=None if dtype is None else jnp.dtype(dtype),
        whole=whole and stack is not None,
    )
