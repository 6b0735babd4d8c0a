"""What several processes need besides a mesh of all their devices: inputs on it, results off it, proof that they agree.

Every process runs the same script and calls the same functions in the same order. In a single process these functions
communicate nothing.
"""

import hashlib
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Sharding


class DisagreementError(RuntimeError):
    """Processes were about to run different programs or different inputs; raised in all of them."""


def check_agreement(what: str, *values: Any) -> None:
    """Raise unless `values` are the same in every process. Call it in all of them.

    One all_gather of 16 bytes, whatever there is to compare. Without it processes that differ hang in a collective that
    the others never enter, or mix the shards of different requests.

    Args:
      what: What the values are, for the message.
      *values: NumPy arrays, which are compared with their shape and dtype, or objects that are compared by their repr.

    Raises:
      DisagreementError: Some process has other values.
    """
    if jax.process_count() == 1:
        return
    digest = hashlib.blake2b(digest_size=16)
    for value in values:
        if isinstance(value, np.ndarray):
            digest.update(f"{value.dtype}{value.shape}".encode() + np.ascontiguousarray(value).tobytes())
        else:
            digest.update(repr(value).encode())
        digest.update(b"\0")
    every = np.asarray(multihost_utils.process_allgather(np.frombuffer(digest.digest(), np.uint32)))
    if (every != every[0]).any():
        others = np.flatnonzero((every != every[0]).any(axis=1)).tolist()
        raise DisagreementError(f"{what} of processes {others} differ from those of process 0")


def to_devices(tree: Any, sharding: Sharding) -> Any:
    """Put NumPy arrays, the same in every process, on all devices of a sharding.

    `jax.device_put` would compare each of them over the processes first; see `check_agreement`.
    """
    if jax.process_count() == 1:
        return jax.device_put(tree, sharding)
    return jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, sharding, lambda index: x[index]), tree)


def to_host(x: jax.Array) -> np.ndarray:
    """All of an array in every process, wherever its shards are; a collective over the processes where they differ."""
    if x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(x)
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))
