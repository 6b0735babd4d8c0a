"""Inputs of the lightning indexer, shared by the cases of scoring and of scoring with selection."""

import dataclasses

import jax.numpy as jnp
import numpy as np

DTYPES = ("float32", "bfloat16", "float8_e4m3fn")


@dataclasses.dataclass
class IndexInputs:
    """Operands of one call, NumPy arrays in the operands' dtypes."""

    q: np.ndarray
    k: np.ndarray
    weights: np.ndarray
    key_start: np.ndarray
    key_end: np.ndarray
    k_scale: np.ndarray | None = None

    def ranges(self, start, end) -> "IndexInputs":
        """The same operands with other ranges."""
        return dataclasses.replace(self, key_start=np.asarray(start, np.int32), key_end=np.asarray(end, np.int32))

    def arrays(self) -> tuple[np.ndarray, ...]:
        """Positional arguments of the operation."""
        return self.q, self.k, self.weights, self.key_start, self.key_end


def make(kind: str, *, rows: int, heads: int, keys: int, dim: int = 32, dtype: str = "float32", seed: int = 0):
    """Operands of `kind` with full ranges.

    Args:
      kind: "integers": small integers, eighths as weights and powers of two as scales, so that every product and sum
        is exact in float32 whatever the order, and ties abound. "normal": continuous values.
      rows: T.
      heads: Hi.
      keys: S.
      dim: D.
      dtype: dtype of q and k.
      seed: Seed of the generator.
    """
    rng = np.random.default_rng(seed)
    if kind == "integers":
        q, k = rng.integers(-3, 4, (rows, heads, dim)), rng.integers(-3, 4, (keys, dim))
        weights = rng.integers(-8, 9, (rows, heads)) / 8
        scale = 2.0 ** rng.integers(-2, 3, keys)
    else:
        q, k = rng.standard_normal((rows, heads, dim)), rng.standard_normal((keys, dim))
        weights = rng.standard_normal((rows, heads))
        scale = rng.uniform(0.5, 2.0, keys)
    return IndexInputs(
        q.astype(np.float32).astype(jnp.dtype(dtype)),
        k.astype(np.float32).astype(jnp.dtype(dtype)),
        weights.astype(np.float32),
        np.zeros(rows, np.int32),
        np.full(rows, keys, np.int32),
        scale.astype(np.float32),
    )
