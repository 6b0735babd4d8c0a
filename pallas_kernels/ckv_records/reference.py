"""The definition of the record operations in plain jnp."""

import jax
import jax.numpy as jnp

from pallas_kernels.ckv_records.formats import FP8_GROUP, NVFP4_GROUP, RecordFormat
from pallas_kernels.ckv_records.rounding import (
    E4M3_MAX,
    amax,
    decode_e2m1,
    divide,
    encode_e2m1,
    encode_e4m3,
    quantize_power_of_two,
    round_to_e4m3,
)

INDEX_AMAX_FLOOR = 1e-4
_SMALLEST_NORMAL = float(jnp.finfo(jnp.float32).tiny)


def _to_bytes(x: jax.Array) -> jax.Array:
    """Little-endian bytes of [..., n] elements, uint8 [..., n * itemsize]."""
    raw = jax.lax.bitcast_convert_type(x, jnp.uint8)
    return raw if x.dtype.itemsize == 1 else raw.reshape(*x.shape[:-1], x.shape[-1] * x.dtype.itemsize)


def _from_bytes(raw: jax.Array, dtype) -> jax.Array:
    """Inverse of `_to_bytes`."""
    itemsize = jnp.dtype(dtype).itemsize
    if itemsize > 1:
        raw = raw.reshape(*raw.shape[:-1], raw.shape[-1] // itemsize, itemsize)
    return jax.lax.bitcast_convert_type(raw, dtype)


def _as_words(raw: jax.Array) -> jax.Array:
    """View bytes [..., 4 * n] as uint32 [..., n], which lets XLA copy 16 bytes at a time on GPUs; no copy there."""
    return _from_bytes(raw, jnp.uint32)


def _in_groups(x: jax.Array, group: int) -> jax.Array:
    return x.reshape(*x.shape[:-1], x.shape[-1] // group, group)


def _flatten_groups(x: jax.Array) -> jax.Array:
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


def _zeros(like: jax.Array, count: int) -> jax.Array:
    return jnp.zeros((*like.shape[:-1], count), jnp.uint8)


# fp8_ds_mla


def _pack_fp8(fmt: RecordFormat, latent: jax.Array) -> list[jax.Array]:
    """e4m3 values and a float32 scale a group of 128, amax / 448.

    With rope as vLLM's `concat_and_cache_ds_mla` writes them: the scale is at least the smallest normal float32 and
    values are divided by it. Without rope as b12x's `concat_and_cache_glm_next_mla`: the scale is amax times the
    rounded reciprocal of 448, 1 for a group of zeros, and values are multiplied by the scale's reciprocal (which the
    deployed kernel takes from the hardware's approximation, within an ulp of the rounded one used here).
    """
    groups = _in_groups(latent, FP8_GROUP)  # [T, 4, 128]
    largest = amax(groups)
    if fmt.rope:
        scale = jnp.maximum(divide(largest, jnp.full_like(largest, E4M3_MAX)), _SMALLEST_NORMAL)
        values = divide(groups, scale)
    else:
        scale = jnp.maximum(largest * jnp.float32(1 / E4M3_MAX), _SMALLEST_NORMAL)
        scale = jnp.where(largest == 0, 1.0, scale)
        values = groups * divide(jnp.ones_like(scale), scale)
    return [_to_bytes(encode_e4m3(_flatten_groups(values))), _to_bytes(scale[..., 0])]


def _unpack_fp8(fmt: RecordFormat, records: jax.Array) -> jax.Array:
    groups = fmt.latent // FP8_GROUP
    values = _from_bytes(records[..., : fmt.latent], jnp.float8_e4m3fn).astype(jnp.float32)
    scale = _from_bytes(records[..., fmt.latent : fmt.latent + 4 * groups], jnp.float32)
    return _flatten_groups(_in_groups(values, FP8_GROUP) * scale[..., None])


# nvfp4_ds_mla


def _nvfp4_bytes(codes: jax.Array, scale: jax.Array) -> list[jax.Array]:
    """Pairs of codes, the even value in the low nibble, and the e4m3 scales."""
    codes = _flatten_groups(codes)
    return [codes[..., 0::2] | (codes[..., 1::2] << 4), _to_bytes(scale[..., 0].astype(jnp.float8_e4m3fn))]


def _pack_nvfp4(fmt: RecordFormat, latent: jax.Array) -> list[jax.Array]:
    """e2m1 values and an e4m3 scale a group of 16, amax / 6.

    With rope as vLLM's NVFP4 conversion with a global scale of 1, which the 432-byte writer calls: values are
    multiplied by the reciprocal of the rounded scale, 0 where that is 0. Without rope as b12x's 304-byte writer: an
    outer scale of the token, its amax / (6 * 448), brings the largest group's scale to the top of e4m3 and is stored
    behind 4 zero bytes. Both deployed kernels take reciprocals from the hardware's approximation, within an ulp of
    the rounded ones used here.
    """
    groups = _in_groups(latent, NVFP4_GROUP)  # [T, 32, 16]
    largest = amax(groups)
    sixth = jnp.float32(1 / 6)
    if fmt.rope:
        scale = round_to_e4m3(largest * sixth)
        reciprocal = divide(jnp.ones_like(scale), scale)
        codes = encode_e2m1(groups * jnp.where(scale > 0, reciprocal, 0.0))
        return [*_nvfp4_bytes(codes, scale), _zeros(latent, 16)]
    outer = amax(latent)[..., None] * jnp.float32(1 / (6 * E4M3_MAX))  # [T, 1, 1]
    outer = jnp.where(outer >= _SMALLEST_NORMAL, outer, 0.0)
    inverse = jnp.where(outer > 0, divide(jnp.ones_like(outer), outer), 0.0)
    scale = round_to_e4m3(largest * inverse * sixth)
    factor = divide(jnp.ones_like(scale), scale) * inverse
    codes = jnp.where(scale > 0, encode_e2m1(groups * factor), jnp.uint8(0))
    return [*_nvfp4_bytes(codes, scale), _zeros(latent, 4), _to_bytes(outer[..., 0]), _zeros(latent, 8)]


def _unpack_nvfp4(fmt: RecordFormat, records: jax.Array) -> jax.Array:
    half, groups = fmt.latent // 2, fmt.latent // NVFP4_GROUP
    pairs = records[..., :half]
    codes = jnp.stack([pairs & 0xF, pairs >> 4], axis=-1).reshape(*pairs.shape[:-1], fmt.latent)
    scale = _from_bytes(records[..., half : half + groups], jnp.float8_e4m3fn).astype(jnp.float32)
    values = _flatten_groups(_in_groups(decode_e2m1(codes), NVFP4_GROUP) * scale[..., None])
    if fmt.rope:
        return values
    start = half + groups + 4
    return values * _from_bytes(records[..., start : start + 4], jnp.float32)


# Every format


def pack(fmt: RecordFormat, values: jax.Array, outer_scale: jax.Array | None) -> jax.Array:
    """See `pallas_kernels.ckv_records.api.pack`."""
    if fmt.encoding == "plain":
        return values.astype(fmt.dtype)
    if fmt.encoding == "index_fp8":
        codes, scale = quantize_power_of_two(values, INDEX_AMAX_FLOOR)
        return jnp.concatenate([_to_bytes(codes), _to_bytes(scale)], axis=-1)
    latent = values[..., : fmt.latent].astype(jnp.float32)
    if outer_scale is not None:
        # The deployed writer sees the quotient in the model's dtype.
        quotient = divide(latent, outer_scale)
        latent = quotient.astype(values.dtype).astype(jnp.float32)
    pack_latent = _pack_fp8 if fmt.encoding == "fp8_ds_mla" else _pack_nvfp4
    parts = pack_latent(fmt, latent)
    if fmt.rope:
        parts.append(_to_bytes(values[..., fmt.latent :].astype(jnp.bfloat16)))
    return jnp.concatenate(parts, axis=-1)


def unpack(fmt: RecordFormat, records: jax.Array, dtype: jnp.dtype, outer_scale: jax.Array | None) -> jax.Array:
    """See `pallas_kernels.ckv_records.api.unpack`."""
    if fmt.encoding == "plain":
        return records.astype(dtype)
    if fmt.encoding == "index_fp8":
        codes, scale = split_index_keys(fmt, records)
        assert scale is not None
        return (codes.astype(jnp.float32) * scale[..., None]).astype(dtype)
    unpack_latent = _unpack_fp8 if fmt.encoding == "fp8_ds_mla" else _unpack_nvfp4
    latent = unpack_latent(fmt, records)
    if outer_scale is not None:
        latent = latent * outer_scale
    if not fmt.rope:
        return latent.astype(dtype)
    rope = _from_bytes(records[..., -2 * fmt.rope :], jnp.bfloat16)
    return jnp.concatenate([latent.astype(dtype), rope.astype(dtype)], axis=-1)


def split_index_keys(fmt: RecordFormat, records: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """See `pallas_kernels.ckv_records.api.split_index_keys`."""
    if fmt.encoding == "plain":
        return records, None
    codes = _from_bytes(records[..., : fmt.latent], jnp.float8_e4m3fn)
    return codes, _from_bytes(records[..., fmt.latent :], jnp.float32)[..., 0]


def _windows(fmt: RecordFormat, page_size: int, page: jax.Array, offset: jax.Array) -> list[tuple[list, int]]:
    """Where the parts of a record lie: index of each part's first element, without layers, and its width.

    Pages and offsets stay separate indices: a flat byte offset would pass 2**31 in a cache of 2 GiB.
    """
    if not fmt.planar:
        return [([page, offset], fmt.record_width)]
    values = fmt.latent * offset
    scales = fmt.latent * page_size + 4 * offset
    return [([page, values], fmt.latent), ([page, scales], fmt.record_width - fmt.latent)]


def append(fmt: RecordFormat, pages: jax.Array, records: jax.Array, slot_mapping: jax.Array) -> jax.Array:
    """See `pallas_kernels.ckv_records.api.append`. One scatter of whole records, or one a plane."""
    rank = len(fmt.page_shape(1))
    page_size = fmt.page_size(pages.shape[-rank:])
    num_pages = pages.shape[-rank - 1]
    page, offset = slot_mapping // page_size, slot_mapping % page_size
    # Dropped rows get pages past the end, each its own: the promise of unique indices then holds for padding too.
    # Without that promise XLA writes bytes on GPUs one by one, in compare-and-swap loops.
    past_the_end = num_pages + jnp.arange(slot_mapping.shape[0], dtype=slot_mapping.dtype)
    page = jnp.where((page >= 0) & (page < num_pages), page, past_the_end)
    written = 0
    for index, width in _windows(fmt, page_size, page, offset):
        part = records[..., written : written + width]
        written += width
        if pages.ndim > rank + 1:
            layers = jnp.arange(pages.shape[0], dtype=slot_mapping.dtype)[:, None]
            index = [layers, *index]
        indices = jnp.stack(jnp.broadcast_arrays(*index), axis=-1)  # [(L,) T, n]
        # Every dimension but the last is indexed, so that the scatter needs no transposed copy of the pages.
        numbers = jax.lax.ScatterDimensionNumbers(
            update_window_dims=(part.ndim - 1,),
            inserted_window_dims=tuple(range(pages.ndim - 1)),
            scatter_dims_to_operand_dims=tuple(range(indices.shape[-1])),
        )
        mode = jax.lax.GatherScatterMode.FILL_OR_DROP
        pages = jax.lax.scatter(pages, indices, part, numbers, unique_indices=True, mode=mode)
    return pages


def gather(
    fmt: RecordFormat,
    pages: jax.Array,
    block_table: jax.Array,
    seq_lens: jax.Array,
    *,
    num_rows: int,
    first_row: jax.Array,
    layer: jax.Array | None,
) -> jax.Array:
    """See `pallas_kernels.ckv_records.api.gather`."""
    rank = len(fmt.page_shape(1))
    page_size = fmt.page_size(pages.shape[-rank:])
    row = first_row + jnp.arange(num_rows, dtype=jnp.int32)
    ends = jnp.cumsum(seq_lens, dtype=jnp.int32)
    # How many requests end at or before the row; a request of length 0 ends where it starts and is stepped over.
    request = jnp.sum((ends[None, :] <= row[:, None]).astype(jnp.int32), axis=1)
    inside = (row >= 0) & (request < seq_lens.shape[0])
    request = jnp.where(inside, request, 0)
    token = row - (ends - seq_lens)[request]
    page = block_table.at[request, token // page_size].get(mode="fill", fill_value=-1)
    return _read(fmt, pages, jnp.where(inside, page, -1), token % page_size, layer)


def read(fmt: RecordFormat, pages: jax.Array, slots: jax.Array, layer: jax.Array | None) -> jax.Array:
    """See `pallas_kernels.ckv_records.api.read`."""
    page_size = fmt.page_size(pages.shape[-len(fmt.page_shape(1)) :])
    page = jnp.where(slots < 0, -1, slots // page_size)
    return _read(fmt, pages, page, slots % page_size, layer)


def _read(
    fmt: RecordFormat, pages: jax.Array, page: jax.Array, offset: jax.Array, layer: jax.Array | None
) -> jax.Array:
    """Records at pages and offsets [rows]; zeros where the page is none."""
    if fmt.dtype.itemsize > 1:
        return _gather_records(fmt, pages, page, offset, layer)

    def read_words(pages: jax.Array, page: jax.Array, offset: jax.Array) -> jax.Array:
        return _gather_records(fmt, _as_words(pages), page, offset, layer)

    def read_bytes(pages: jax.Array, page: jax.Array, offset: jax.Array) -> jax.Array:
        return _gather_records(fmt, pages, page, offset, layer)

    # On CPUs the view as words would be a copy of all pages.
    return jax.lax.platform_dependent(pages, page, offset, cuda=read_words, default=read_bytes)


def _gather_records(
    fmt: RecordFormat, pages: jax.Array, page: jax.Array, offset: jax.Array, layer: jax.Array | None
) -> jax.Array:
    """`_read` of pages of the format's dtype, or of their view as words."""
    words = pages.dtype != fmt.dtype
    rank = len(fmt.page_shape(1))
    page_size = fmt.page_size((*pages.shape[-rank:-1], pages.shape[-1] * (4 if words else 1)))
    parts = []
    for index, width in _windows(fmt, page_size, page, offset):
        if words:
            width = width // 4
            index = [*index[:-1], index[-1] // 4] if fmt.planar else index
        if layer is not None:
            index = [layer, *index]
        # The barrier keeps XLA from working out the index again for every element it copies.
        indices = jax.lax.optimization_barrier(jnp.stack(jnp.broadcast_arrays(*index), axis=-1))  # [rows, n]
        numbers = jax.lax.GatherDimensionNumbers(
            offset_dims=(1,),
            collapsed_slice_dims=tuple(range(pages.ndim - 1)),
            start_index_map=tuple(range(indices.shape[-1])),
        )
        sizes = (*(1 for _ in range(pages.ndim - 1)), width)
        mode = jax.lax.GatherScatterMode.FILL_OR_DROP
        part = jax.lax.gather(pages, indices, numbers, sizes, mode=mode, fill_value=0)
        parts.append(_to_bytes(part) if words else part)
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)
