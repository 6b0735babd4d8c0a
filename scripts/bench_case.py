"""What a benchmark of an operation tells `bench_kernels.py`."""

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Peer:
    """Another implementation of a case.

    Attributes:
      name: Its name and what it does otherwise than the case, if anything.
      run: Starts one call and returns its outputs, which keeps them alive until the call is over.
      wait: Waits for all calls.
    """

    name: str
    run: Callable[[], Any]
    wait: Callable[[], None]


@dataclasses.dataclass(frozen=True)
class Case:
    """One measurement.

    Attributes:
      name: What runs, with its sizes.
      run: Starts one call and returns its outputs.
      error: Error of the outputs of `run` against a reference; how it is measured is the operation's business.
      tolerance: Highest error that counts as right.
      flops: Floating point operations of a call, counted as the peers count them, or 0.
      bytes: Fewest bytes that a call must move, or 0.
      peer: Makes the peer, or None. Called after the check, so that its memory is not held before.
      extra: More to report, such as a configuration.
    """

    name: str
    run: Callable[[], Any]
    error: Callable[[Any], float]
    tolerance: float
    flops: float = 0.0
    bytes: float = 0.0
    peer: Callable[[], Peer] | None = None
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)
