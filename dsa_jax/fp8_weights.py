"""Weights that stay in block-scaled FP8 on the device, beside their scales.

A module that can hold such weights names them in its class attribute `FP8`. For a weight `X` that is kept, the module
holds `X` in e4m3 and `X_scale_inv`, the float32 scales of the checkpoint, and dequantises where it multiplies. In a
model that was made with `fp8_matmul` it quantises what it multiplies instead, and the weight stays as it is.
"""

# Modules gain attributes while they are built, which the type checker cannot see.
# pyright: reportAttributeAccessIssue=false

import dataclasses
from collections.abc import Callable, Collection, Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from dsa_jax.config_quantization import QuantizationConfig
from dsa_jax.params import RULES, ParamSpec, declare
from dsa_jax.quantization import SCALE_SUFFIX, dequantize_blocks, scale_shape
from pallas_kernels.scaled_matmul import quantize_rows, scaled_matmul
from pallas_kernels.scaled_matmul.api import BLOCK, IMPLEMENTATIONS

FP8 = jnp.dtype(jnp.float8_e4m3fn)


# Tensors that the published FP8 checkpoints of GLM-5 and DeepSeek-V3.2 leave in BF16 or float32.
_NEVER_PUBLISHED = ("embed_tokens.weight", "lm_head.weight", "norm.weight", "weights_proj.weight", ".gate.weight")


def published_fp8(name: str) -> bool:
    """Whether the published FP8 checkpoints quantise a tensor; for configurations that come without one."""
    return name.endswith(".weight") and not name.endswith(_NEVER_PUBLISHED)


def declared_quantized(quantization: QuantizationConfig) -> Callable[[str], bool]:
    """Predicate of the tensors that a checkpoint of this configuration quantises, as far as it can be told without."""
    return lambda name: published_fp8(name) and not quantization.excludes(name)


def fp8_candidates(model: nnx.Module) -> frozenset[str]:
    """Names of the parameters, as in `parameter_specs`, that their modules can hold in FP8."""
    return frozenset(
        ".".join(map(str, (*path, name)))
        for path, module in nnx.iter_modules(model)
        for name in getattr(module, "FP8", ())
    )


def fp8_parameters(
    candidates: Collection[str], specs: Mapping[str, ParamSpec], is_fp8: Callable[[str], bool]
) -> frozenset[str]:
    """Those of the candidates whose tensors are all FP8 in the checkpoint.

    A stack of layers is one parameter: where only some of its layers are FP8, they are dequantised.

    Args:
      candidates: From `fp8_candidates`.
      specs: From `parameter_specs`.
      is_fp8: Whether the checkpoint's tensor of this name is block-scaled FP8.
    """
    return frozenset(name for name in candidates if all(is_fp8(source.name) for source in specs[name].sources))


@dataclasses.dataclass(frozen=True)
class Fp8Matmul:
    """How kept weights are multiplied without being dequantised.

    Attributes:
      implementation: That of `pallas_kernels.scaled_matmul`.
      power_of_two: Whether the scales of the activations are powers of two.
    """

    implementation: str
    power_of_two: bool

    def __post_init__(self):
        if self.implementation not in IMPLEMENTATIONS:
            raise ValueError(f"fp8_matmul must be None or one of {IMPLEMENTATIONS}, got {self.implementation!r}")

    def quantize(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Rows [M, K] as e4m3, and their scales; see `quantize_rows`."""
        return quantize_rows(x, power_of_two=self.power_of_two)


def keep_fp8(
    model: nnx.Module,
    names: Collection[str],
    block: tuple[int, int] | None,
    *,
    matmul: Fp8Matmul | None = None,
    tp: int = 1,
) -> None:
    """Declare parameters of a model that is not filled yet as FP8 with scales.

    The scales of a whole matrix are replicated: they are a 4096th of its bytes, and a rank's share may begin inside a
    block. Those of experts are split with the experts.

    Args:
      model: Changed in place.
      names: Parameters among `fp8_candidates(model)`.
      block: Rows and columns of a block of the checkpoint.
      matmul: How the weights are multiplied; None dequantises them.
      tp: Ranks that split axes are dealt to.

    Raises:
      ValueError: There are no blocks, a name is no candidate, or `matmul` cannot take a rank's share of a weight.
    """
    unknown = set(names) - fp8_candidates(model)
    if block is None or unknown:
        raise ValueError(f"cannot keep {sorted(unknown or names)[:4]} in FP8 with {block=}")
    for path, module in list(nnx.iter_modules(model)):
        for name in getattr(module, "FP8", ()):
            label = ".".join(map(str, (*path, name)))
            if label in names:
                if matmul is not None:
                    _check_share(label, getattr(module, name), block, matmul, tp)
                _declare_fp8(module, name, block, matmul)


def _check_share(label: str, weight: nnx.Param, block: tuple[int, int], matmul: Fp8Matmul, tp: int) -> None:
    """Raise ValueError unless a rank's share of a matrix is made of whole blocks.

    The last blocks of rows of a matrix that is not split may be partial; the copy engine takes 8 rows at a time.
    """
    axes = weight.get_metadata()["axes"][-2:]
    rows, columns = (n if RULES[axis] is None else n // tp for n, axis in zip(weight.shape[-2:], axes, strict=True))
    whole = BLOCK if RULES[axes[0]] is not None else 8
    if block != (BLOCK, BLOCK) or rows % whole or columns % BLOCK:
        raise ValueError(
            f"fp8_matmul={matmul.implementation!r} cannot multiply {label}: a share of {rows} x {columns} at {tp=} in "
            f"blocks of {block[0]} x {block[1]}; it needs blocks of {BLOCK} x {BLOCK}, multiples of {whole} rows and "
            f"of {BLOCK} columns"
        )


def _declare_fp8(module: nnx.Module, name: str, block: tuple[int, int], matmul: Fp8Matmul | None) -> None:
    weight = getattr(module, name)
    metadata = weight.get_metadata()
    stored, lead = metadata["stored"], len(metadata["axes"]) - len(metadata["stored"])
    axes, shape, stack = metadata["axes"][lead:], weight.shape[lead:], weight.shape[0] if lead else None
    whole = metadata["whole"]
    setattr(module, name, declare(*shape, axes=axes, stack=stack, stored=stored, dtype=FP8, whole=whole))
    scales = declare(
        *scale_shape(shape, block),
        axes=(*axes[:-2], None, None),
        stack=stack,
        stored=scale_shape(stored, block),
        dtype=jnp.float32,
        whole=whole,
    )
    scales.set_metadata(block=block, matmul=matmul)
    setattr(module, name + SCALE_SUFFIX, scales)


def matmul_of(scale: nnx.Param | None) -> Fp8Matmul | None:
    """How the weight of these scales is multiplied; None for one that is dequantised, or that was never FP8."""
    return None if scale is None else scale.get_metadata()["matmul"]


def multiply_shard(
    x: jax.Array, weight: nnx.Param, scale: nnx.Param, matmul: Fp8Matmul, dtype: jax.typing.DTypeLike
) -> jax.Array:
    """`x @ weight.T` of a rank's share of a matrix in FP8, x being quantised for it. Call it inside `shard_map`.

    Args:
      x: [..., columns], float32 or bfloat16.
      weight: [rows, columns] e4m3, this rank's, whole blocks.
      scale: [row blocks, column blocks] float32 of the whole matrix.
      matmul: How to multiply.
      dtype: dtype of the result, bfloat16 or float32.
    """
    values, scales = weight[...], scale[...]
    starts = [_start(axis, size) for axis, size in zip(weight.get_metadata()["axes"][-2:], values.shape, strict=True)]
    blocks = [-(-size // BLOCK) for size in values.shape]
    own = jax.lax.dynamic_slice(scales, [start // BLOCK for start in starts], blocks)
    rows, row_scales = matmul.quantize(x.reshape(-1, x.shape[-1]))
    out = scaled_matmul(rows, row_scales, values, own, out_dtype=dtype, implementation=matmul.implementation)
    return out.reshape(*x.shape[:-1], -1)


def dequantize_shard(weight: nnx.Param, scale: nnx.Param, dtype: jnp.dtype) -> jax.Array:
    """A rank's share of a matrix in `dtype`, from its share in FP8 and the scales of the whole matrix.

    Call it inside `shard_map`.

    Args:
      weight: [rows, columns] e4m3, this rank's.
      scale: [row blocks, column blocks] float32 of the whole matrix, padding included.
      dtype: dtype of the result, rounded to once.
    """
    values, scales, block = weight[...], scale[...], scale.get_metadata()["block"]
    starts = [_start(axis, size) for axis, size in zip(weight.get_metadata()["axes"][-2:], values.shape, strict=True)]
    if any(size % width for size, width in zip(values.shape, block, strict=True)):
        return dequantize_blocks(values, scales, block_size=block, offset=(starts[0], starts[1])).astype(dtype)
    blocks = [size // width for size, width in zip(values.shape, block, strict=True)]
    firsts = [start // width for start, width in zip(starts, block, strict=True)]
    return scale_whole_blocks(values, jax.lax.dynamic_slice(scales, firsts, blocks), block).astype(dtype)


def scale_whole_blocks(values: jax.Array, scales: jax.Array, block: tuple[int, int]) -> jax.Array:
    """float32 values of weights [..., rows, columns] that are cut into whole blocks with scales [..., r, c].

    Broadcasts and no gathers, so that the compiler fuses it with what reads it.
    """
    *lead, rows, columns = values.shape
    tiles = values.reshape(*lead, rows // block[0], block[0], columns // block[1], block[1])
    scaled = tiles.astype(jnp.float32) * scales[..., :, None, :, None]
    return scaled.reshape(values.shape)


def _start(axis: str | None, size: int) -> jax.Array:
    """Where this rank's share of a dimension begins in the whole."""
    mesh_axes = RULES[axis]
    return jnp.int32(0) if mesh_axes is None else jax.lax.axis_index(mesh_axes) * jnp.int32(size)
