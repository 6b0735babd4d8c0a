"""Checks of arguments, so that every operation refuses bad input in the same words."""

import math
import operator

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer


def check_array(op: str, name: str, x, shape: tuple[int | str, ...], dtypes: tuple = ()) -> None:
    """Raise ValueError unless `x` is an array of that rank, of the given sizes, and of one of `dtypes`.

    Args:
      op: Name of the operation.
      name: Name of the argument.
      x: The argument.
      shape: An int fixes that dimension; a string only names it.
      dtypes: Accepted dtypes; empty accepts any.
    """
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise ValueError(f"{op}: {name} must be an array, got {type(x).__name__}")
    wanted = "[" + ", ".join(str(s) for s in shape) + "]"
    fits = len(x.shape) == len(shape) and all(
        isinstance(s, str) or s == got for s, got in zip(shape, x.shape, strict=True)
    )
    if not fits:
        raise ValueError(f"{op}: {name} must have shape {wanted}, got {list(x.shape)}")
    if dtypes and not any(x.dtype == jnp.dtype(d) for d in dtypes):
        names = ", ".join(jnp.dtype(d).name for d in dtypes)
        raise ValueError(f"{op}: {name} must have dtype {names}, got {x.dtype.name}")


def check_same_dtype(op: str, first: str, x: jax.Array, second: str, y: jax.Array) -> None:
    """Raise ValueError unless the two arguments have one dtype."""
    if x.dtype != y.dtype:
        raise ValueError(f"{op}: {first} and {second} must have one dtype, got {x.dtype.name} and {y.dtype.name}")


def check_dtype(op: str, name: str, value, dtypes: tuple) -> jnp.dtype:
    """`value` as a dtype; raise ValueError unless it is one of `dtypes`."""
    try:
        dtype = jnp.dtype(value)
    except TypeError:
        dtype = None
    if dtype is None or dtype not in [jnp.dtype(d) for d in dtypes]:
        names = ", ".join(jnp.dtype(d).name for d in dtypes)
        raise ValueError(f"{op}: {name} must be one of {names}, got {value if dtype is None else dtype.name}")
    return dtype


def check_positive(op: str, name: str, value) -> int:
    """`value` as a Python int; raise ValueError unless it is a positive integer known while tracing."""
    _refuse_traced(op, name, value)
    try:
        integer = None if isinstance(value, bool | jax.Array) else operator.index(value)
    except TypeError:
        integer = None
    if integer is None or integer <= 0:
        raise ValueError(f"{op}: {name} must be a positive int, got {value!r}")
    return integer


def check_positive_number(op: str, name: str, value) -> float:
    """`value` as a Python float; raise ValueError unless it is positive, finite and known while tracing."""
    _refuse_traced(op, name, value)
    is_number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{op}: {name} must be a positive finite number, got {value!r}")
    return float(value)


def _refuse_traced(op: str, name: str, value) -> None:
    if isinstance(value, Tracer):
        raise ValueError(f"{op}: {name} must be static, got the traced value {value}; see static_argnames of jax.jit")
