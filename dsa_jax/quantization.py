"""How checkpoints store quantised weights, and what the stored tensors mean.

Two formats are read. Block FP8 (`quant_method: fp8` of Hugging Face, DeepSeek-V3 and GLM-5): e4m3 values with one
float32 scale for each block of rows and columns. NVFP4 (NVIDIA ModelOpt): pairs of e2m1 values, one e4m3 scale for 16
neighbours of a row, and one float32 scale for the whole. NVFP4 becomes real values, or block FP8, while it is loaded.
"""

import dataclasses
from typing import Protocol

import jax
import jax.numpy as jnp

from pallas_kernels.ckv_records.rounding import E2M1_MAX, E4M3_MAX, decode_e2m1, round_to_e4m3

SCALE_SUFFIX = "_scale_inv"
FP4_SCALE_SUFFIX = "_scale"
FP4_GLOBAL_SUFFIX = "_scale_2"
# Values of a row that share a scale in NVFP4.
FP4_GROUP = 16


class Coding(Protocol):
    """What the bytes of a stored tensor mean. Codings are hashable: they are part of a compiled program."""

    def decode(
        self, piece: jax.Array, scales: tuple[jax.Array, ...], offset: tuple[jax.typing.ArrayLike, ...]
    ) -> jax.Array:
        """What goes into the parameter, float32, before it is cast to the parameter's dtype.

        Args:
          piece: Rows of the stored tensor.
          scales: The tensors that it is scaled by, whole; scalars as [1].
          offset: Row and column of the whole tensor where the piece begins.
        """
        ...


@dataclasses.dataclass(frozen=True)
class BlockFp8:
    """Real values of e4m3 weights with one float32 scale a block.

    Attributes:
      block: Rows and columns of a block.
    """

    block: tuple[int, int]

    def decode(self, piece, scales, offset):
        """See `Coding.decode`."""
        return dequantize_blocks(piece, scales[0], block_size=self.block, offset=offset)


@dataclasses.dataclass(frozen=True)
class Nvfp4:
    """Real values of NVFP4 weights."""

    def decode(self, piece, scales, offset):
        """See `Coding.decode`; the scales are those of 16 values and the one of the whole."""
        return nvfp4_products(piece, scales[0], offset[0]) * scales[1]


@dataclasses.dataclass(frozen=True)
class Nvfp4ToFp8:
    """NVFP4 weights as e4m3 values that go with the scales of `Nvfp4BlockScales`.

    Attributes:
      block: Rows and columns of a block of the FP8 weights.
    """

    block: tuple[int, int]

    def decode(self, piece, scales, offset):
        """See `Coding.decode`; the scales are those of 16 values and the one of the whole."""
        exponents = nvfp4_exponents(scales[0], self.block)
        rows, columns = piece.shape[0], 2 * piece.shape[1]
        row = jnp.asarray(offset[0], jnp.int32) + jnp.arange(rows, dtype=jnp.int32)
        exponents = jnp.repeat(exponents[row // self.block[0]], self.block[1], axis=1)[:, :columns]
        return round_to_e4m3(nvfp4_products(piece, scales[0], offset[0]) * _power_of_two(-exponents))


@dataclasses.dataclass(frozen=True)
class Nvfp4BlockScales:
    """Scales of the FP8 weights that `Nvfp4ToFp8` makes; what is stored is the e4m3 scales of 16 values, whole.

    Attributes:
      block: Rows and columns of a block of the FP8 weights.
    """

    block: tuple[int, int]

    def decode(self, piece, scales, offset):
        """See `Coding.decode`; the scale is the one of the whole."""
        del offset
        return _power_of_two(nvfp4_exponents(piece, self.block)) * scales[0]


def activation_scale(name: str) -> str:
    """Name of the scale that NVFP4 checkpoints hold for the inputs of a weight; nothing here quantises those."""
    return name.removesuffix(".weight") + ".input_scale"


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


def nvfp4_products(codes: jax.Array, scale: jax.Array, first_row: jax.typing.ArrayLike = 0) -> jax.Array:
    """e2m1 values times the scales of their groups, which is exact; the scale of the whole tensor is not applied.

    Args:
      codes: [rows, columns / 2] uint8, two values a byte, the low nibble first: rows from `first_row` on.
      scale: [all rows, columns / 16] e4m3.
      first_row: Row of the whole weight where the codes begin; an integer or a traced int32 scalar.

    Returns:
      [rows, columns] float32.

    Raises:
      ValueError: An argument has the wrong rank or dtype, or the columns do not match.
    """
    if codes.ndim != 2 or scale.ndim != 2 or 2 * codes.shape[1] != FP4_GROUP * scale.shape[1]:
        raise ValueError(f"codes [rows, columns / 2] and scale [rows, columns / 16], got {codes.shape=} {scale.shape=}")
    if codes.dtype != jnp.uint8 or scale.dtype != jnp.float8_e4m3fn:
        raise ValueError(f"codes must be uint8 and scale float8_e4m3fn, got {codes.dtype} and {scale.dtype}")
    rows, columns = codes.shape[0], 2 * codes.shape[1]
    values = decode_e2m1(jnp.stack([codes & 15, codes >> 4], axis=-1)).reshape(rows, -1, FP4_GROUP)
    factors = jax.lax.dynamic_slice_in_dim(scale.astype(jnp.float32), first_row, rows)
    return (values * factors[:, :, None]).reshape(rows, columns)


def nvfp4_exponents(scale: jax.Array, block: tuple[int, int]) -> jax.Array:
    """Powers of two that bring the products of `nvfp4_products` into the range of e4m3, one a block.

    A power of two costs no bit: a product whose e2m1 value is 0, 0.5, 1, 2 or 4 has the bits of its scale, which is
    e4m3 itself, and stays exact while it stays in e4m3's normal range. Only 1.5, 3 and 6 are rounded. The bound of a
    block is 6 times its largest scale, so that a shard needs no weights but its own.

    Args:
      scale: [rows, columns / 16] e4m3.
      block: Rows and columns of a block; columns are a multiple of 16.

    Returns:
      [row blocks, column blocks] int32, the smallest k with `6 * max(scale) <= 448 * 2**k`.

    Raises:
      ValueError: The columns of a block are not whole groups of 16.
    """
    if block[1] % FP4_GROUP:
        raise ValueError(f"{block=} must have a multiple of {FP4_GROUP} columns")
    groups = block[1] // FP4_GROUP
    rows, columns = scale.shape
    row_blocks, column_blocks = -(-rows // block[0]), -(-columns // groups)
    bound = jnp.pad(
        jnp.abs(scale.astype(jnp.float32)), ((0, row_blocks * block[0] - rows), (0, column_blocks * groups - columns))
    )
    bound = E2M1_MAX * jnp.max(bound.reshape(row_blocks, block[0], column_blocks, groups), axis=(1, 3))
    mantissa, exponent = jnp.frexp(bound)  # in [0.5, 1); 448 is 0.875 * 2**9
    return exponent - 9 + (mantissa > E4M3_MAX / 2**9).astype(jnp.int32)


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """2**exponent for int32 of a normal float32."""
    return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)
