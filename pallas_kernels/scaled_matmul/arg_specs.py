"""Shapes of block-scaled FP8 products in published models, named once for tests and benchmarks.

A rank of 8 of tensor parallelism, chunks of 8192 rows. Experts are either dealt whole (EP8: 32 of 256 on a rank) or all
on every rank with an eighth of their width (TP8). Rows of experts are those of even routing, 8 experts a row.
"""

import dataclasses

import jax
import jax.numpy as jnp

BLOCK = 128


@dataclasses.dataclass(frozen=True)
class ArgSpec:
    """Shapes of one call.

    Attributes:
      name: The model and the layer.
      rows: Rows, M.
      contracted: Columns of the rows, K.
      columns: Columns of the result, N.
      groups: Weights, G; None for a dense product.
    """

    name: str
    rows: int
    contracted: int
    columns: int
    groups: int | None = None

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The arguments of `scaled_matmul` or `grouped_scaled_matmul` by name."""
        of, fp8 = jax.ShapeDtypeStruct, jnp.float8_e4m3fn
        blocks = self.contracted // BLOCK
        weight, scale = (self.columns, self.contracted), (-(-self.columns // BLOCK), blocks)
        rows = {"x": of((self.rows, self.contracted), fp8), "x_scale": of((blocks, self.rows), jnp.float32)}
        if self.groups is None:
            return {**rows, "weight": of(weight, fp8), "weight_scale": of(scale, jnp.float32)}
        return {
            **rows,
            "weights": of((self.groups, *weight), fp8),
            "weight_scales": of((self.groups, *scale), jnp.float32),
            "group_sizes": of((self.groups,), jnp.int32),
        }


ARG_SPECS = (
    ArgSpec("glm-5.2 q_a", 8192, 6144, 2048),
    ArgSpec("glm-5.2 q_b", 8192, 2048, 2048),
    ArgSpec("glm-5.2 kv_a", 8192, 6144, 576),
    ArgSpec("glm-5.2 o_proj", 8192, 2048, 6144),
    ArgSpec("glm-5.2 shared up", 8192, 6144, 256),
    ArgSpec("glm-5.2 shared down", 8192, 256, 6144),
    ArgSpec("deepseek-v3.2 q_a", 8192, 7168, 1536),
    ArgSpec("deepseek-v3.2 q_b", 8192, 1536, 3072),
    ArgSpec("deepseek-v3.2 o_proj", 8192, 2048, 7168),
    ArgSpec("deepseek-v3.2 shared up", 8192, 7168, 256),
    ArgSpec("deepseek-v3.2 shared down", 8192, 256, 7168),
    ArgSpec("one row", 1, 6144, 2048),
    ArgSpec("glm-5.2 experts up EP8", 8192, 6144, 2048, 32),
    ArgSpec("glm-5.2 experts down EP8", 8192, 2048, 6144, 32),
    ArgSpec("glm-5.2 experts up TP8", 65536, 6144, 256, 256),
    ArgSpec("glm-5.2 experts down TP8", 65536, 256, 6144, 256),
    ArgSpec("deepseek-v3.2 experts up EP8", 8192, 7168, 2048, 32),
    ArgSpec("deepseek-v3.2 experts down EP8", 8192, 2048, 7168, 32),
    ArgSpec("deepseek-v3.2 experts up TP8", 65536, 7168, 256, 256),
    ArgSpec("deepseek-v3.2 experts down TP8", 65536, 256, 7168, 256),
)
