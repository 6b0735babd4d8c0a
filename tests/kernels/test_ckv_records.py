"""Cache records against a packer written on its own in NumPy, and attention through every format."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import ckv_records
from pallas_kernels.ckv_records import ckv_format, index_key_format, quantize_power_of_two, rounding, split_index_keys
from pallas_kernels.sparse_mla import sparse_mla

pack = jax.jit(ckv_records.pack, static_argnums=0, static_argnames="implementation")
unpack = jax.jit(ckv_records.unpack, static_argnums=0, static_argnames=("dtype", "implementation"))
attend = jax.jit(sparse_mla, static_argnames=("softmax_scale", "kv_lora_rank"))

E4M3 = ml_dtypes.float8_e4m3fn
E2M1 = ml_dtypes.float4_e2m1fn
BF16 = ml_dtypes.bfloat16
TINY = np.float32(np.finfo(np.float32).tiny)

FORMATS = {
    "float32": ckv_format("float32", kv_lora_rank=32, qk_rope_head_dim=8),
    "bf16": ckv_format("bf16", kv_lora_rank=32, qk_rope_head_dim=8),
    "fp8_656": ckv_format("fp8_ds_mla", kv_lora_rank=512, qk_rope_head_dim=64),
    "fp8_528": ckv_format("fp8_ds_mla", kv_lora_rank=512, qk_rope_head_dim=0),
    "nvfp4_432": ckv_format("nvfp4_ds_mla", kv_lora_rank=512, qk_rope_head_dim=64),
    "nvfp4_304": ckv_format("nvfp4_ds_mla", kv_lora_rank=512, qk_rope_head_dim=0),
    "index_float32": index_key_format("float32", index_head_dim=16),
    "index_bf16": index_key_format("bf16", index_head_dim=16),
    "index_fp8": index_key_format("fp8", index_head_dim=128),
}
QUANTISED = ("fp8_656", "fp8_528", "nvfp4_432", "nvfp4_304", "index_fp8")
every_format = pytest.mark.parametrize("key", FORMATS)
quantised_format = pytest.mark.parametrize("key", QUANTISED)


# The packer of the tests: one token at a time, dtypes of ml_dtypes, no code shared with the package.


def np_e4m3(x):
    return np.clip(x, -448, 448).astype(E4M3)


def np_e2m1(x):
    x = np.where(np.isnan(x), np.float32(6), x)
    return np.clip(x, -6, 6).astype(E2M1).view(np.uint8) & 15


def np_amax(x):
    return np.float32(np.nanmax(np.abs(x)))


def np_pairs(codes):
    return bytes(int(a) | int(b) << 4 for a, b in zip(codes[0::2], codes[1::2], strict=True))


def np_pack_fp8(latent, rope):
    values, scales = b"", b""
    for group in latent.reshape(4, 128):
        if rope is not None:
            scale = max(np.float32(np_amax(group) / np.float32(448)), TINY)
            codes = np_e4m3(group / scale)
        else:
            scale = np.float32(1) if np_amax(group) == 0 else np_amax(group) * np.float32(1 / 448)
            codes = np_e4m3(group * (np.float32(1) / scale))
        values += codes.tobytes()
        scales += np.float32(scale).tobytes()
    return values + scales


def np_pack_nvfp4(latent, rope):
    values, scales, sixth = b"", b"", np.float32(1 / 6)
    outer = np_amax(latent) * np.float32(1 / 2688)
    for group in latent.reshape(32, 16):
        if rope is not None:
            scale = np_e4m3(np_amax(group) * sixth)
            factor = np.float32(0) if scale == 0 else np.float32(1) / np.float32(scale)
        elif outer == 0:
            scale, factor = E4M3(0), None
        else:
            inverse = np.float32(1) / outer
            scale = np_e4m3(np_amax(group) * inverse * sixth)
            factor = None if scale == 0 else np.float32(1) / np.float32(scale) * inverse
        codes = np.zeros(16, np.uint8) if factor is None else np_e2m1(group * factor)
        values += np_pairs(codes)
        scales += scale.tobytes()
    return values + scales + (bytes(16) if rope is not None else bytes(4) + outer.tobytes() + bytes(8))


def np_pack_index(key):
    amax = max(np_amax(key), np.float32(1e-4))
    scale = np.float32(2.0 ** int(np.ceil(np.log2(np.float64(amax) / 448))))
    return np_e4m3(key / scale).tobytes() + scale.tobytes()


def np_pack(key, values):
    """Records uint8 [T, bytes] of values [T, width] float32."""
    fmt = FORMATS[key]
    records = []
    for row in values:
        latent, rope = row[: fmt.latent], row[fmt.latent :] if fmt.rope else None
        if fmt.encoding == "plain":
            record = row.astype(fmt.dtype).tobytes()
        elif fmt.encoding == "index_fp8":
            record = np_pack_index(row)
        else:
            record = (np_pack_fp8 if fmt.encoding == "fp8_ds_mla" else np_pack_nvfp4)(latent, rope)
            record += b"" if rope is None else rope.astype(BF16).tobytes()
        records.append(np.frombuffer(record, np.uint8))
    return np.stack(records)


def np_unpack(key, raw):
    """Values float32 of records uint8 [T, bytes]."""
    fmt = FORMATS[key]
    rows = []
    for record in raw:
        data = record.tobytes()
        if fmt.encoding == "plain":
            rows.append(np.frombuffer(data, fmt.dtype).astype(np.float32))
            continue
        if fmt.encoding == "index_fp8":
            rows.append(np.frombuffer(data[:128], E4M3).astype(np.float32) * np.frombuffer(data[128:], np.float32))
            continue
        if fmt.encoding == "fp8_ds_mla":
            scales = np.frombuffer(data[512:528], np.float32)
            latent = np.frombuffer(data[:512], E4M3).astype(np.float32) * np.repeat(scales, 128)
        else:
            nibbles = np.array([n for b in data[:256] for n in (b & 15, b >> 4)], np.uint8)
            scales = np.frombuffer(data[256:288], E4M3).astype(np.float32)
            latent = nibbles.view(E2M1).astype(np.float32) * np.repeat(scales, 16)
            if not fmt.rope:
                latent = latent * np.frombuffer(data[292:296], np.float32)
        rope = np.frombuffer(data[len(data) - 2 * fmt.rope :], BF16).astype(np.float32)
        rows.append(np.concatenate([latent, rope]))
    return np.stack(rows)


def raw_bytes(records):
    array = np.ascontiguousarray(records)
    return array.view(np.uint8).reshape(*array.shape[:-1], -1)


def tokens(key, count, seed=0):
    """Values of many magnitudes, float32 [count, width], rounded to bfloat16 as a model's are."""
    rng = np.random.default_rng(seed)
    width = FORMATS[key].width
    values = rng.standard_normal((count, width)) * np.exp2(rng.integers(-12, 12, (count, 1)))
    return values.astype(BF16).astype(np.float32)


def awkward_tokens(key):
    """Rows of values that sit on rounding ties, of zeros, of extremes."""
    fmt = FORMATS[key]
    width = fmt.width
    ramp = np.arange(width) % 128
    rows = [
        np.zeros(width),
        np.where(ramp == 5, -0.0, 0.0),
        ramp * 3.5,  # group maxima 444.5 (448 groups) and a full range of small codes
        ramp / 16.0 * 0.75,
        np.where(ramp == 0, 6.0, ramp / 32.0),
        np.where(ramp == 1, 448.0, (ramp % 29) + 0.5),
        np.full(width, 1e-7),
        np.where(ramp == 3, 3.0e4, 1e-3),
        np.where(ramp == 3, -1.0, 0.75),
        -np.square(ramp + 1.0),
        np.where(ramp % 16 == 0, 1.0, 2.0**-9),
    ]
    return np.stack(rows).astype(np.float32)


# Formats


@pytest.mark.parametrize(
    ("name", "rope", "size"),
    [
        ("float32", 64, 2304),
        ("bf16", 64, 1152),
        ("bf16", 0, 1024),
        ("fp8_ds_mla", 64, 656),
        ("fp8_ds_mla", 0, 528),
        ("nvfp4_ds_mla", 64, 432),
        ("nvfp4_ds_mla", 0, 304),
    ],
)
def test_bytes_of_a_ckv_token(name, rope, size):
    fmt = ckv_format(name, kv_lora_rank=512, qk_rope_head_dim=rope)
    assert fmt.bytes_per_token == size
    assert fmt.page_shape(64) == (64, fmt.record_width)
    assert fmt.page_size(fmt.page_shape(64)) == 64


@pytest.mark.parametrize(("name", "size"), [("float32", 512), ("bf16", 256), ("fp8", 132)])
def test_bytes_of_an_index_key(name, size):
    fmt = index_key_format(name, index_head_dim=128)
    assert fmt.bytes_per_token == size
    assert fmt.page_size(fmt.page_shape(64)) == 64
    assert fmt.page_shape(64) == ((64 * 132,) if name == "fp8" else (64, 128))


def test_auto_follows_the_model():
    assert ckv_format("auto", kv_lora_rank=8, qk_rope_head_dim=4, model_dtype=jnp.bfloat16).name == "bf16"
    assert index_key_format("auto", index_head_dim=8, model_dtype=jnp.float32).name == "float32"
    with pytest.raises(ValueError, match="model_dtype=float16"):
        ckv_format("auto", kv_lora_rank=8, qk_rope_head_dim=4, model_dtype=jnp.float16)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ckv_format("fp8_ds_mla", kv_lora_rank=32, qk_rope_head_dim=64), "'fp8_ds_mla' needs kv_lora_rank=512"),
        (lambda: ckv_format("nvfp4_ds_mla", kv_lora_rank=512, qk_rope_head_dim=32), "'nvfp4_ds_mla' needs qk_rope"),
        (lambda: index_key_format("fp8", index_head_dim=64), "'fp8' needs index_head_dim=128, got index_head_dim=64"),
        (lambda: ckv_format("fp8", kv_lora_rank=512, qk_rope_head_dim=64), "'fp8' is not one of"),
        (lambda: index_key_format("fp4", index_head_dim=128), "'fp4' is not one of"),
        (lambda: ckv_format("bf16", kv_lora_rank=0, qk_rope_head_dim=64), "kv_lora_rank=0"),
    ],
)
def test_a_width_that_the_model_lacks_is_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# Rounding


def test_divide_rounds_as_ieee():
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(200_000) * np.exp2(rng.integers(-40, 40, 200_000))).astype(np.float32)
    y = (rng.uniform(1, 2, 200_000) * np.exp2(rng.integers(-40, 40, 200_000))).astype(np.float32)
    x[:8] = [0, -0.0, 448, 7, np.inf, -np.inf, 3e38, 1]
    y[:8] = [3, 3, 448, 448, 2, 2, 1, np.float32(1 + 2**-23)]
    got = np.asarray(jax.jit(rounding.divide)(x, y))
    np.testing.assert_array_equal(got.view(np.uint32), (x / y).view(np.uint32))
    assert np.isnan(rounding.divide(jnp.float32(np.nan), jnp.float32(1)))


def test_e4m3_and_e2m1_round_every_tie_to_even():
    grid = np.arange(0, 512, 2**-8, dtype=np.float32)
    near = np.concatenate([grid, np.nextafter(grid, np.float32(1e9)), np.nextafter(grid, np.float32(-1))])
    x = np.concatenate([near, -near, [np.float32(1e-30), np.float32(np.inf)]])
    np.testing.assert_array_equal(raw_bytes(rounding.encode_e4m3(x)[None])[0], np_e4m3(x).view(np.uint8))
    small = x[np.abs(x) < 9]
    codes = np.asarray(rounding.encode_e2m1(small))
    np.testing.assert_array_equal(codes, np_e2m1(small))
    np.testing.assert_array_equal(np.asarray(rounding.decode_e2m1(codes)), codes.view(E2M1).astype(np.float32))


@pytest.mark.parametrize(
    ("amax", "floor", "scale"),
    [
        (448.0, 1e-4, 1.0),
        (np.nextafter(np.float32(448), np.float32(449)), 1e-4, 2.0),
        (1.0, 1e-4, 2.0**-8),
        (0.0, 1e-4, 2.0**-22),
        (0.0, 1e-10, 2.0**-42),
        (1e-4, 1e-10, 2.0**-22),
    ],
)
def test_index_scale_is_the_next_power_of_two(amax, floor, scale):
    key = jnp.zeros((1, 128), jnp.float32).at[0, 7].set(-amax)
    codes, got = jax.jit(quantize_power_of_two, static_argnums=1)(key, floor)
    assert float(got[0, 0]) == scale
    assert float(codes[0, 7].astype(jnp.float32)) == np.float32(np_e4m3(np.float32(-amax) / np.float32(scale)))


# Packing


@every_format
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_records_are_those_of_the_numpy_packer(key, dtype):
    values = np.concatenate([tokens(key, 24), awkward_tokens(key)])
    if dtype == "float32":
        values = np.concatenate([values, np.random.default_rng(1).standard_normal((24, values.shape[1]))])
        values = values.astype(np.float32)
    else:
        values = values.astype(BF16).astype(np.float32)
    packed = pack(FORMATS[key], jnp.asarray(values).astype(dtype))
    assert packed.dtype == FORMATS[key].dtype
    assert packed.shape == (len(values), FORMATS[key].record_width)
    np.testing.assert_array_equal(raw_bytes(packed), np_pack(key, values))


@every_format
def test_values_read_are_those_of_the_numpy_reader(key):
    raw = np_pack(key, np.concatenate([tokens(key, 24), awkward_tokens(key)]))
    fmt = FORMATS[key]
    records = jnp.asarray(raw.view(fmt.dtype))
    np.testing.assert_array_equal(unpack(fmt, records), np_unpack(key, raw))
    np.testing.assert_array_equal(
        np.asarray(unpack(fmt, records, dtype=jnp.bfloat16)), np_unpack(key, raw).astype(BF16)
    )


def test_leading_dimensions_are_free():
    values = tokens("fp8_656", 6)
    flat = pack(FORMATS["fp8_656"], jnp.asarray(values))
    stacked = pack(FORMATS["fp8_656"], jnp.asarray(values.reshape(2, 3, -1)))
    np.testing.assert_array_equal(stacked.reshape(6, -1), flat)
    np.testing.assert_array_equal(pack(FORMATS["fp8_656"], jnp.asarray(values[0])), flat[0])


@every_format
def test_no_records_are_packed_and_unpacked(key):
    fmt = FORMATS[key]
    records = pack(fmt, jnp.zeros((0, fmt.width)))
    assert records.shape == (0, fmt.record_width)
    assert unpack(fmt, records).shape == (0, fmt.width)


def test_layout_of_an_nvfp4_record_by_hand():
    latent = np.zeros(512, np.float32)
    latent[:4] = [6.0, -0.5, 3.0, 1.5]  # scale 1: codes 7, 9, 5, 3
    latent[16:18] = [12.0, -12.0]  # scale 2: codes 7, 15
    rope = np.arange(64, dtype=np.float32)
    record = np.asarray(pack(FORMATS["nvfp4_432"], jnp.asarray(np.concatenate([latent, rope]))))
    assert record[:2].tolist() == [0x97, 0x35]
    assert record[8] == 0xF7
    assert record[256:259].view(E4M3).astype(float).tolist() == [1.0, 2.0, 0.0]
    assert not record[288:304].any()
    np.testing.assert_array_equal(record[304:].view(BF16).astype(np.float32), rope)
    bare = np.asarray(pack(FORMATS["nvfp4_304"], jnp.asarray(latent)))
    assert bare[256:258].view(E4M3).astype(float).tolist() == [224.0, 448.0]
    assert bare[292:296].view(np.float32)[0] == np.float32(12) * np.float32(1 / 2688)
    assert not bare[288:292].any()
    assert not bare[296:].any()


def test_outer_scale_divides_before_and_multiplies_after():
    fmt = FORMATS["nvfp4_432"]
    values = tokens("nvfp4_432", 24)
    scale = np.float32(0.0123)
    got = raw_bytes(pack(fmt, jnp.asarray(values).astype(jnp.bfloat16), outer_scale=jnp.float32(scale)))
    scaled = values.copy()
    scaled[:, :512] = (values[:, :512] / scale).astype(BF16).astype(np.float32)
    np.testing.assert_array_equal(got[:, :304], np_pack("nvfp4_432", scaled)[:, :304])
    np.testing.assert_array_equal(got[:, 304:], np_pack("nvfp4_432", values)[:, 304:])
    read = np_unpack("nvfp4_432", got)
    read[:, :512] *= scale
    np.testing.assert_array_equal(unpack(fmt, jnp.asarray(got), outer_scale=jnp.float32(scale)), read)
    with pytest.raises(ValueError, match="outer_scale belongs to 'nvfp4_ds_mla' with rope"):
        pack(FORMATS["nvfp4_304"], jnp.zeros((1, 512)), outer_scale=jnp.float32(scale))


@quantised_format
def test_nan_stays_in_its_place(key):
    values = tokens(key, 4)
    clean = np_pack(key, values)
    spoiled = values.copy()
    spoiled[2, 77] = np.nan
    got = raw_bytes(pack(FORMATS[key], jnp.asarray(spoiled)))
    changed = np.flatnonzero((got != clean).any(axis=0))
    assert changed.tolist() == [38 if "nvfp4" in key else 77]
    assert (got[[0, 1, 3]] == clean[[0, 1, 3]]).all()


def test_split_index_keys_gives_the_operands_of_the_indexer():
    key = tokens("index_fp8", 5)
    raw = np_pack("index_fp8", key)
    k, scale = split_index_keys(FORMATS["index_fp8"], jnp.asarray(raw))
    assert k.dtype == jnp.float8_e4m3fn
    np.testing.assert_array_equal(raw_bytes(k), raw[:, :128])
    np.testing.assert_array_equal(scale, raw[:, 128:].copy().view(np.float32)[:, 0])
    k, scale = split_index_keys(FORMATS["index_bf16"], jnp.ones((3, 16), jnp.bfloat16))
    assert scale is None
    assert k.dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="no format of index keys"):
        split_index_keys(FORMATS["fp8_656"], jnp.zeros((3, 656), jnp.uint8))


# Attention through each format


def attention_error(name, rope, magnitude=1.0, outer_scale=None):
    """Relative error of sparse MLA over packed records against float32, on normalised latents of one layer.

    Channels differ in size by a lognormal factor, as the weight of the norm before the cache makes them.
    """
    rng = np.random.default_rng(3)
    fmt = ckv_format(name, kv_lora_rank=512, qk_rope_head_dim=rope)
    rows, heads, keys, k = 16, 4, 384, 96
    latent = rng.standard_normal((keys, 512))
    latent *= np.exp(0.5 * rng.standard_normal(512)) / np.sqrt((latent**2).mean(axis=1, keepdims=True))
    kv = np.concatenate([magnitude * latent, rng.standard_normal((keys, rope))], axis=1).astype(np.float32)
    q = rng.standard_normal((rows, heads, 512 + rope)).astype(np.float32)
    q[..., :512] /= magnitude
    ids = np.stack([rng.permutation(keys)[:k] for _ in range(rows)]).astype(np.int32)
    settings = {"softmax_scale": 0.08, "kv_lora_rank": 512}
    exact, _ = attend(q, kv, ids, **settings)
    records = pack(fmt, kv, outer_scale=outer_scale)
    got, _ = attend(q, unpack(fmt, records, outer_scale=outer_scale), ids, **settings)
    return float(np.linalg.norm(np.asarray(got) - exact) / np.linalg.norm(exact))


@pytest.mark.parametrize(
    ("name", "rope", "bound"),
    [
        ("float32", 64, 0.0),
        ("bf16", 64, 0.0045),
        ("fp8_ds_mla", 64, 0.06),
        ("fp8_ds_mla", 0, 0.06),
        ("nvfp4_ds_mla", 64, 0.2),
        ("nvfp4_ds_mla", 0, 0.2),
    ],
)
def test_attention_error_of_each_format(name, rope, bound):
    error = attention_error(name, rope)
    assert error <= bound
    assert error >= bound / 2, "the bound says nothing"


def test_outer_scale_rescues_layers_of_small_latents():
    """Latents near 0.01 put the e4m3 scales of a group among the subnormals, unless a layer's scale lifts them."""
    plain = attention_error("nvfp4_ds_mla", 64, magnitude=0.005)
    lifted = attention_error("nvfp4_ds_mla", 64, magnitude=0.005, outer_scale=jnp.float32(0.05 / 2688))
    assert lifted < 0.2
    assert plain > 1.2 * lifted
