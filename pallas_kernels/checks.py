"""Checks of arguments, so that every operation refuses bad input in the same words."""

import jax
import jax.numpy as jnp


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


def check_positive(op: str, name: str, value) -> None:
    """Raise ValueError unless `value` is a positive Python int."""
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ValueError(f"{op}: {name} must be a positive int, got {value!r}")
