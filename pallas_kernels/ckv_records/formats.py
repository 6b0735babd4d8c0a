"""Byte layouts of the records that the paged caches hold, one record a token.

What a format costs: relative error of sparse MLA's output (Frobenius norm) against float32 records, on latents of unit
mean square whose channels differ in size (`tests/kernels/test_ckv_records.py` has the inputs and bounds it).

| format | bytes | error |
|---|---|---|
| float32 | 4 a value | 0 |
| bf16 | 2 a value | 0.003 |
| fp8_ds_mla | 656, without rope 528 | 0.04 |
| nvfp4_ds_mla | 432, without rope 304 | 0.17 |
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

Encoding = Literal["plain", "fp8_ds_mla", "nvfp4_ds_mla", "index_fp8"]

FP8_LATENT = 512
FP8_GROUP = 128
NVFP4_LATENT = 512
NVFP4_GROUP = 16
PACKED_ROPE = 64
INDEX_FP8_DIM = 128

CKV_FORMATS = ("float32", "bf16", "fp8_ds_mla", "nvfp4_ds_mla")
INDEX_KEY_FORMATS = ("float32", "bf16", "fp8")
_PLAIN_DTYPES = {"float32": np.dtype(np.float32), "bf16": np.dtype(jnp.bfloat16)}


@dataclasses.dataclass(frozen=True)
class RecordFormat:
    """How the values of one token are stored. Make one with `ckv_format` or `index_key_format`.

    The plain formats are held as arrays of their own dtype, which XLA gathers and scatters in whole words and which
    need no packing; the quantised ones as raw bytes (uint8), so that pages can be copied, gathered over ranks and read
    by kernels without a dtype of their own.

    Attributes:
      name: The name users choose the format by.
      encoding: How values become a record.
      latent: Leading values of a token; the width of the latent, or of an index key.
      rope: Values after the latent that carry the rotary position; 0 for a model without, and for index keys.
      dtype: Dtype of the stored elements.
      record_width: Stored elements of a token.
      planar: Whether a page holds the values of all its tokens and then all their scales, instead of record after
        record (DeepGEMM's layout of index keys).
    """

    name: str
    encoding: Encoding
    latent: int
    rope: int
    dtype: np.dtype
    record_width: int
    planar: bool = False

    @property
    def width(self) -> int:
        """Values of a token: latent and rope."""
        return self.latent + self.rope

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one record."""
        return self.record_width * self.dtype.itemsize

    def page_shape(self, page_size: int) -> tuple[int, ...]:
        """Shape of one page: [page_size, record_width], or flat [page_size * record_width] when planar."""
        if self.planar:
            return (page_size * self.record_width,)
        return (page_size, self.record_width)

    def page_size(self, page_shape: tuple[int, ...]) -> int:
        """Tokens of a page of that shape.

        Raises:
          ValueError: No page of this format has that shape.
        """
        rank = 1 if self.planar else 2
        fits = len(page_shape) == rank and page_shape[-1] > 0
        if fits and self.planar and page_shape[0] % self.record_width == 0:
            return page_shape[0] // self.record_width
        if fits and not self.planar and page_shape[1] == self.record_width:
            return page_shape[0]
        wanted = f"[page_size * {self.record_width}]" if self.planar else f"[page_size, {self.record_width}]"
        raise ValueError(f"a page of format {self.name!r} must have shape {wanted}, got {list(page_shape)}")


def _plain_name(name: str, model_dtype) -> str:
    """Resolve "auto" to the plain format of the model's dtype."""
    if name != "auto":
        return name
    for plain, dtype in _PLAIN_DTYPES.items():
        if np.dtype(model_dtype) == dtype:
            return plain
    raise ValueError(f"format 'auto' follows a model of float32 or bfloat16, got model_dtype={np.dtype(model_dtype)}")


def _positive(format_name: str, **widths: int) -> None:
    for argument, value in widths.items():
        if value <= 0:
            raise ValueError(f"format {format_name!r} needs a positive {argument}, got {argument}={value}")


def ckv_format(
    name: str, *, kv_lora_rank: int, qk_rope_head_dim: int, model_dtype: jax.typing.DTypeLike | None = None
) -> RecordFormat:
    """Format of the compressed KV of a model: `[latent | rope]` of each token.

    Args:
      name: "float32", "bf16", "fp8_ds_mla", "nvfp4_ds_mla", or "auto" for the model's dtype.
      kv_lora_rank: Width of the latent.
      qk_rope_head_dim: Width of the rotary part, 0 when the model has none.
      model_dtype: float32 or bfloat16; only "auto" reads it.

    Returns:
      The format. `fp8_ds_mla` takes 656 bytes a token with rope and 528 without, `nvfp4_ds_mla` 432 and 304.

    Raises:
      ValueError: The name is unknown, or the format needs a width that the model does not have.
    """
    name = _plain_name(name, model_dtype)
    if name in _PLAIN_DTYPES:
        _positive(name, kv_lora_rank=kv_lora_rank)
        if qk_rope_head_dim < 0:
            raise ValueError(f"format {name!r} needs {qk_rope_head_dim=} to be 0 or more")
        return RecordFormat(
            name, "plain", kv_lora_rank, qk_rope_head_dim, _PLAIN_DTYPES[name], kv_lora_rank + qk_rope_head_dim
        )
    if name not in CKV_FORMATS:
        raise ValueError(f"KV format {name!r} is not one of {['auto', *CKV_FORMATS]}")
    if kv_lora_rank != FP8_LATENT:
        raise ValueError(f"KV format {name!r} needs kv_lora_rank={FP8_LATENT}, got {kv_lora_rank=}")
    if qk_rope_head_dim not in (0, PACKED_ROPE):
        raise ValueError(f"KV format {name!r} needs qk_rope_head_dim={PACKED_ROPE} or 0, got {qk_rope_head_dim=}")
    if name == "fp8_ds_mla":
        width = FP8_LATENT + 4 * (FP8_LATENT // FP8_GROUP) + 2 * qk_rope_head_dim
        return RecordFormat(name, "fp8_ds_mla", FP8_LATENT, qk_rope_head_dim, np.dtype(np.uint8), width)
    # 16 bytes between the scales and the rope: zeros, or the outer scale of a token of a model without rope.
    width = NVFP4_LATENT // 2 + NVFP4_LATENT // NVFP4_GROUP + 16 + 2 * qk_rope_head_dim
    return RecordFormat(name, "nvfp4_ds_mla", NVFP4_LATENT, qk_rope_head_dim, np.dtype(np.uint8), width)


def index_key_format(
    name: str, *, index_head_dim: int, model_dtype: jax.typing.DTypeLike | None = None
) -> RecordFormat:
    """Format of the keys of the lightning indexer.

    Args:
      name: "float32", "bf16", "fp8", or "auto" for the model's dtype.
      index_head_dim: Width of an index key.
      model_dtype: float32 or bfloat16; only "auto" reads it.

    Returns:
      The format. `fp8` takes 132 bytes a token: a page holds 128 e4m3 values of each token, then one float32
      power-of-two scale of each (DeepGEMM, vLLM).

    Raises:
      ValueError: The name is unknown, or the format needs a width that the model does not have.
    """
    name = _plain_name(name, model_dtype)
    if name in _PLAIN_DTYPES:
        _positive(name, index_head_dim=index_head_dim)
        return RecordFormat(name, "plain", index_head_dim, 0, _PLAIN_DTYPES[name], index_head_dim)
    if name not in INDEX_KEY_FORMATS:
        raise ValueError(f"index key format {name!r} is not one of {['auto', *INDEX_KEY_FORMATS]}")
    if index_head_dim != INDEX_FP8_DIM:
        raise ValueError(f"index key format {name!r} needs index_head_dim={INDEX_FP8_DIM}, got {index_head_dim=}")
    return RecordFormat(name, "index_fp8", INDEX_FP8_DIM, 0, np.dtype(np.uint8), INDEX_FP8_DIM + 4, planar=True)
