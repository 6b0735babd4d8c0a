"""Block quantization of checkpoints: FP8 weights with one scale for each block of rows and columns."""

import jax
import jax.numpy as jnp

SCALE_SUFFIX = "_scale_inv"


def scale_shape(shape: tuple[int, ...], block_size: tuple[int, int]) -> tuple[int, ...]:
    """Shape of the scales of a weight: one for each block, the blocks at the edges being partial.

    Args:
      shape: Shape of the weight; its last two dimensions are cut into blocks.
      block_size: Rows and columns of a block.
    """
    *lead, rows, columns = shape
    return (*lead, -(-rows // block_size[0]), -(-columns // block_size[1]))


def dequantize_blocks(
    weight: jax.Array,
    scale: jax.Array,
    *,
    block_size: tuple[int, int],
    offset: tuple[jax.typing.ArrayLike, jax.typing.ArrayLike] = (0, 0),
) -> jax.Array:
    """Real values of a block-quantized weight, or of a slab of it: each element times the scale of its block.

    The blocks are those of `quant_method: fp8` in Hugging Face checkpoints (DeepSeek-V3, GLM-5). Despite its name
    `weight_scale_inv` is what multiplies. A slab of a sharded weight may begin inside a block.

    Args:
      weight: [rows, columns] e4m3, rows and columns `offset` to `offset + shape` of the whole weight.
      scale: [row blocks, column blocks] float32, scales of the whole weight.
      block_size: Rows and columns of a block.
      offset: Row and column of the whole weight where the slab begins; integers or traced int32 scalars.

    Returns:
      [rows, columns] float32.

    Raises:
      ValueError: An argument has the wrong rank or dtype, or a block has no rows or columns.
    """
    if weight.ndim != 2 or scale.ndim != 2:
        raise ValueError(f"weight and scale must have 2 dimensions, got {weight.shape=} {scale.shape=}")
    if scale.dtype != jnp.float32:
        raise ValueError(f"scale must be float32, got {scale.dtype}")
    if min(block_size) < 1:
        raise ValueError(f"{block_size=} must be positive")
    row_block, column_block = (
        (jnp.asarray(start, jnp.int32) + jnp.arange(size, dtype=jnp.int32)) // size_of_block
        for start, size, size_of_block in zip(offset, weight.shape, block_size, strict=True)
    )
    # A scale that has too few blocks shows as NaN.
    scale = jnp.take(scale, row_block, axis=0, mode="fill")
    return weight.astype(jnp.float32) * jnp.take(scale, column_block, axis=1, mode="fill")
