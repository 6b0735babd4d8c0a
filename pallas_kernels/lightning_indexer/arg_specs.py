"""Shapes of the lightning indexer in published models, named once for tests and benchmarks."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class ArgSpec:
    """Shapes of one call.

    Attributes:
      name: The model or the situation.
      rows: Query rows, T.
      heads: Index heads, Hi.
      dim: Size of a head, D.
      keys: Keys, S.
      dtype: Of queries and keys.
      scaled: Whether keys carry a scale each.
    """

    name: str
    rows: int
    heads: int
    dim: int
    keys: int
    dtype: Any
    scaled: bool

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The arguments of `lightning_indexer` by name."""
        of = jax.ShapeDtypeStruct
        arguments = {
            "q": of((self.rows, self.heads, self.dim), self.dtype),
            "k": of((self.keys, self.dim), self.dtype),
            "weights": of((self.rows, self.heads), jnp.float32),
            "key_start": of((self.rows,), jnp.int32),
            "key_end": of((self.rows,), jnp.int32),
        }
        if self.scaled:
            arguments["k_scale"] = of((self.keys,), jnp.float32)
        return arguments


ARG_SPECS = (
    ArgSpec("deepseek-v3.2 fp8", 4096, 64, 128, 131072, jnp.float8_e4m3fn, True),
    ArgSpec("glm-5 fp8", 4096, 32, 128, 131072, jnp.float8_e4m3fn, True),
    ArgSpec("deepseek-v3.2 bf16", 4096, 64, 128, 131072, jnp.bfloat16, False),
    ArgSpec("glm-5 bf16", 4096, 32, 128, 131072, jnp.bfloat16, False),
    ArgSpec("16 heads fp8", 4096, 16, 128, 131072, jnp.float8_e4m3fn, True),
    ArgSpec("8 heads bf16", 4096, 8, 128, 131072, jnp.bfloat16, False),
    ArgSpec("narrow heads fp8", 4096, 32, 64, 131072, jnp.float8_e4m3fn, True),
    ArgSpec("narrow heads bf16", 4096, 32, 64, 131072, jnp.bfloat16, False),
    ArgSpec("long context fp8", 256, 32, 128, 1048576, jnp.float8_e4m3fn, True),
    ArgSpec("ragged fp8", 70, 32, 128, 3001, jnp.float8_e4m3fn, True),
    ArgSpec("one row bf16", 1, 64, 128, 100, jnp.bfloat16, True),
)
