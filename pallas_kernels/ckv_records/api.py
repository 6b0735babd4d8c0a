"""Public functions of the cache records."""

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.checks import check_array, check_positive
from pallas_kernels.ckv_records import reference
from pallas_kernels.ckv_records.formats import RecordFormat

VALUE_DTYPES = (jnp.float32, jnp.bfloat16)
MAX_SLOTS = 2**31 - 1


def _resolve(op: str, implementation: str | None) -> None:
    dispatch.resolve(op, implementation, {"reference": (dispatch.always, dispatch.always)})


def _check_last(op: str, name: str, x, width: int, dtypes: tuple) -> None:
    """Check an array of any rank by its last dimension."""
    if not hasattr(x, "shape") or len(x.shape) == 0:
        raise ValueError(f"{op}: {name} must be an array of rank 1 or more, got {x!r}")
    check_array(op, name, x, (*(f"d{i}" for i in range(len(x.shape) - 1)), width), dtypes)


def _check_outer_scale(op: str, fmt: RecordFormat, outer_scale) -> None:
    if outer_scale is None:
        return
    if fmt.encoding != "nvfp4_ds_mla" or not fmt.rope:
        raise ValueError(
            f"{op}: outer_scale belongs to 'nvfp4_ds_mla' with rope, got format {fmt.name!r} with rope={fmt.rope}"
        )
    check_array(op, "outer_scale", outer_scale, (), (jnp.float32,))


def _check_pages(op: str, fmt: RecordFormat, pages, *, layers: bool) -> int:
    """Check the pages and return how many tokens they hold a layer."""
    page = fmt.page_shape(1)
    rank = 1 + len(page) + layers
    check_array(op, "pages", pages, tuple(f"d{i}" for i in range(rank)), (fmt.dtype,))
    page_size = fmt.page_size(pages.shape[-len(page) :])
    slots = pages.shape[layers] * page_size
    if slots > MAX_SLOTS:
        raise ValueError(f"{op}: pages hold {slots} tokens, more than int32 slots can name ({MAX_SLOTS})")
    return slots


def pack(
    fmt: RecordFormat, values: jax.Array, *, outer_scale: jax.Array | None = None, implementation: str | None = None
) -> jax.Array:
    """Store the values of tokens as records.

    The rounding is the same to the last bit on every backend, so that ranks that pack the same token agree.

    - plain formats: converted to the format's dtype.
    - `fp8_ds_mla`: each group of 128 of the latent as e4m3 with a float32 scale, amax / 448; the rope as bfloat16.
    - `nvfp4_ds_mla`: each group of 16 of the latent as e2m1, low nibble first, with an e4m3 scale, amax / 6; the rope
      as bfloat16. Without rope the scales are relative to an outer float32 scale of the token, amax / (6 * 448).
    - index keys `fp8`: the key as e4m3 with one float32 scale, the least power of two that is at least
      max(amax, 1e-4) / 448.

    Rounding is to nearest even and saturates. A NaN does not touch its group's scale and stays NaN in e4m3; e2m1 has
    none, and stores 6. Layouts and rules: vLLM `concat_and_cache_ds_mla`, `indexer_k_quant_and_cache`,
    `concat_and_cache_nvfp4_mla`; b12x for the records without rope (`reference.py` says where they differ).

    Args:
      fmt: Format of the records.
      values: [..., fmt.width], latent then rope, or index keys; float32 or bfloat16.
      outer_scale: float32 scalar that the latent is divided by first; only `nvfp4_ds_mla` with rope takes it, and
        `unpack` needs the same. A layer's largest magnitude / (6 * 448) is the usual choice. None means 1.
      implementation: "reference"; None takes the first that supports the call and the device.

    Returns:
      Records [..., fmt.record_width] of dtype fmt.dtype.

    Raises:
      ValueError: An argument has the wrong shape or dtype, or the format takes no outer scale.
    """
    _check_last("pack", "values", values, fmt.width, VALUE_DTYPES)
    _check_outer_scale("pack", fmt, outer_scale)
    _resolve("pack", implementation)
    return reference.pack(fmt, values, outer_scale)


def unpack(
    fmt: RecordFormat,
    records: jax.Array,
    *,
    dtype: jax.typing.DTypeLike = jnp.float32,
    outer_scale: jax.Array | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Read the values of records; computed in float32 and rounded once to `dtype`.

    Args:
      fmt: Format of the records.
      records: [..., fmt.record_width] of dtype fmt.dtype. A record of zeros holds zeros.
      dtype: float32 or bfloat16.
      outer_scale: What `pack` was given.
      implementation: "reference"; None takes the first that supports the call and the device.

    Returns:
      Values [..., fmt.width] of `dtype`.

    Raises:
      ValueError: An argument has the wrong shape or dtype, or the format takes no outer scale.
    """
    _check_last("unpack", "records", records, fmt.record_width, (fmt.dtype,))
    _check_outer_scale("unpack", fmt, outer_scale)
    dtype = jnp.dtype(dtype)
    if dtype not in [jnp.dtype(d) for d in VALUE_DTYPES]:
        raise ValueError(f"unpack: dtype must be float32 or bfloat16, got {dtype.name}")
    _resolve("unpack", implementation)
    return reference.unpack(fmt, records, dtype, outer_scale)


def split_index_keys(fmt: RecordFormat, records: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """The operands `k` and `k_scale` of the lightning indexer, without leaving the format.

    Args:
      fmt: Format from `index_key_format`.
      records: [..., fmt.record_width] of dtype fmt.dtype.

    Returns:
      Keys [..., index_head_dim], float8_e4m3fn for `fp8` and the format's dtype otherwise; and their scale [...]
      float32, or None for the formats without.

    Raises:
      ValueError: The records do not have the format's width and dtype, or it is no format of index keys.
    """
    if fmt.encoding not in ("plain", "index_fp8") or fmt.rope:
        raise ValueError(f"split_index_keys: {fmt.name!r} with rope={fmt.rope} is no format of index keys")
    _check_last("split_index_keys", "records", records, fmt.record_width, (fmt.dtype,))
    return reference.split_index_keys(fmt, records)


def append(
    fmt: RecordFormat,
    pages: jax.Array,
    records: jax.Array,
    slot_mapping: jax.Array,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """Write records into their slots of the paged cache; in place when the caller's jit donates `pages`.

    Args:
      fmt: Format of the pages.
      pages: [num_pages, *fmt.page_shape(page_size)], or with all layers of a cache in front,
        [L, num_pages, *fmt.page_shape(page_size)].
      records: [T, fmt.record_width], or [L, T, fmt.record_width]; every layer uses the same slots.
      slot_mapping: Slot of each record [T] int32, `page * page_size + offset`. A negative slot (-1 pads) or one past
        the last page drops its record. The slots that are not dropped must be distinct.
      implementation: "reference"; None takes the first that supports the call and the device.

    Returns:
      The pages with the records written; all other bytes as they were.

    Raises:
      ValueError: An argument has the wrong shape or dtype, or the cache holds more tokens than int32 can name.
    """
    stacked = getattr(records, "ndim", 2) == 3
    _check_pages("append", fmt, pages, layers=stacked)
    leading = (pages.shape[0],) if stacked else ()
    check_array("append", "records", records, (*leading, "T", fmt.record_width), (fmt.dtype,))
    check_array("append", "slot_mapping", slot_mapping, (records.shape[-2],), (jnp.int32,))
    _resolve("append", implementation)
    return reference.append(fmt, pages, records, slot_mapping)


def gather(
    fmt: RecordFormat,
    pages: jax.Array,
    block_table: jax.Array,
    seq_lens: jax.Array,
    *,
    num_rows: int,
    first_row: jax.Array | int = 0,
    layer: jax.Array | int | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Copy the records of requests out of their pages into one contiguous buffer, bit for bit.

    The buffer is a window of `num_rows` rows, from `first_row` on, onto the records of request 0, then of request 1
    and so on (vLLM `cp_gather_cache`, with the padding cleared).

    Args:
      fmt: Format of the pages.
      pages: [num_pages, *fmt.page_shape(page_size)], or [L, num_pages, *fmt.page_shape(page_size)] with `layer`.
      block_table: Pages of each request [N, P] int32. Entries past what `seq_lens` needs are not read and may be -1;
        where one that is needed is -1 or names no page, its rows are 0.
      seq_lens: Tokens to copy of each request [N] int32, 0 or more, together below 2**31.
      num_rows: Rows of the buffer.
      first_row: First row of the window, int32 scalar; may be traced.
      layer: Which layer to read of pages with layers, int32 scalar; may be traced. Reading `pages[layer]` instead
        can copy that layer's whole cache.
      implementation: "reference"; None takes the first that supports the call and the device.

    Returns:
      Records [num_rows, fmt.record_width] of dtype fmt.dtype; rows before the first request or past the last are 0.

    Raises:
      ValueError: An argument has the wrong shape or dtype, or the cache holds more tokens than int32 can name.
    """
    _check_pages("gather", fmt, pages, layers=layer is not None)
    check_array("gather", "block_table", block_table, ("N", "P"), (jnp.int32,))
    check_array("gather", "seq_lens", seq_lens, (block_table.shape[0],), (jnp.int32,))
    check_positive("gather", "num_rows", num_rows)
    first_row = jnp.asarray(first_row, jnp.int32)
    check_array("gather", "first_row", first_row, ())
    if layer is not None:
        layer = jnp.asarray(layer, jnp.int32)
        check_array("gather", "layer", layer, ())
    _resolve("gather", implementation)
    return reference.gather(fmt, pages, block_table, seq_lens, num_rows=num_rows, first_row=first_row, layer=layer)


def read(
    fmt: RecordFormat,
    pages: jax.Array,
    slots: jax.Array,
    *,
    layer: jax.Array | int | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Copy the records at the given slots, bit for bit.

    Args:
      fmt: Format of the pages.
      pages: [num_pages, *fmt.page_shape(page_size)], or [L, num_pages, *fmt.page_shape(page_size)] with `layer`.
      slots: `page * page_size + offset` of each record [N] int32; -1 for none.
      layer: Which layer to read of pages with layers, int32 scalar; may be traced.
      implementation: "reference"; None takes the first that supports the call and the device.

    Returns:
      Records [N, fmt.record_width] of dtype fmt.dtype, zeros where the slot is negative or names no page.

    Raises:
      ValueError: An argument has the wrong shape or dtype, or the cache holds more tokens than int32 can name.
    """
    _check_pages("read", fmt, pages, layers=layer is not None)
    check_array("read", "slots", slots, ("N",), (jnp.int32,))
    if layer is not None:
        layer = jnp.asarray(layer, jnp.int32)
        check_array("read", "layer", layer, ())
    _resolve("read", implementation)
    return reference.read(fmt, pages, slots, layer)
