"""Choice of an implementation, the same for every operation."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator

import jax

# A support check returns None when the implementation can run the call, else the reason why not.
Support = Callable[[], str | None]


_target: contextvars.ContextVar[tuple[int, int] | None] = contextvars.ContextVar("target", default=None)


@contextlib.contextmanager
def compiling_for(compute_capability: tuple[int, int]) -> Iterator[None]:
    """Choose implementations for a GPU that is not there while its programs are traced."""
    token = _target.set(compute_capability)
    try:
        yield
    finally:
        _target.reset(token)


def gpu_compute_capability() -> tuple[int, int] | None:
    """Compute capability of the GPU that is compiled for, else of the first default device; None for other devices."""
    target = _target.get()
    if target is not None:
        return target
    device = jax.devices()[0]
    capability = getattr(device, "compute_capability", None)
    if device.platform != "gpu" or capability is None:
        return None
    major, minor = str(capability).split(".")
    return int(major), int(minor)


def resolve(op: str, implementation: str | None, candidates: dict[str, tuple[Support, Support]]) -> str:
    """Name of the implementation to run.

    Args:
      op: Name of the operation, for messages.
      implementation: An explicit choice, or None for the first candidate that supports both the call and the device.
      candidates: In order of preference, name -> (check of the arguments, check of the device). An explicit choice
        is held to the first check only, so that it can be traced and compiled for a GPU that is not there.

    Raises:
      ValueError: `implementation` is not a candidate, cannot run these arguments, or nothing can.
    """
    if implementation is not None:
        if implementation not in candidates:
            raise ValueError(f"{op}: {implementation=} is not one of {sorted(candidates)}")
        reason = candidates[implementation][0]()
        if reason is not None:
            raise ValueError(f"{op}: {implementation=} cannot run this call: {reason}")
        return implementation
    reasons = []
    for name, checks in candidates.items():
        failed = next((reason for reason in (check() for check in reversed(checks)) if reason is not None), None)
        if failed is None:
            return name
        reasons.append(f"{name}: {failed}")
    raise ValueError(f"{op}: no implementation supports this call: " + "; ".join(reasons))


def always() -> None:
    """Support check of an implementation without limits."""


def needs_compute_capability(*majors: int) -> Support:
    """Device check: the default device is a GPU whose major compute capability is one of `majors`."""

    def check() -> str | None:
        found = gpu_compute_capability()
        if found is None:
            return "the default device is no NVIDIA GPU"
        return None if found[0] in majors else f"compute capability {found} is not among major versions {majors}"

    return check
