"""Damaged and foreign checkpoints: one clear error that names the tensor, its file and both shapes."""

import json
import os

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from dsa_jax.checkpoint import CheckpointError, load_safetensors
from dsa_jax.params import ParamSpec, Source
from dsa_jax.safetensors_headers import read_headers
from sharding.mesh import make_mesh
from tests.model.checkpoint_cases import header_of, write_file, write_sharded

FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def tensors(**shapes):
    return {name: np.ones(shape, np.float32) for name, shape in shapes.items()}


def load(folder, shapes, **options):
    """Load parameters of these shapes; the error must be one line that names the folder."""
    specs = {n: ParamSpec(shape, None, PartitionSpec(), (Source(n, shape),)) for n, shape in shapes.items()}
    return load_safetensors(folder, specs, make_mesh(), jnp.float32, progress=False, **options)


def error_of(folder, shapes, **options):
    with pytest.raises(CheckpointError) as caught:
        load(folder, shapes, **options)
    message = str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert str(folder) in message and "\n" not in message
    return message


def assert_names(message, *parts):
    for part in parts:
        assert part in message, f"{part!r} is not in: {message}"


# Tensors and parameters that do not match.


def test_a_misshapen_tensor(tmp_path):
    write_sharded(tmp_path, {A: tensors(a=(2, 3)), B: tensors(b=(4,))})
    assert_names(error_of(tmp_path, {"a": (2, 4), "b": (4,)}), "'a'", A, "(2, 3)", "(2, 4)")


def test_a_missing_tensor(tmp_path):
    write_file(tmp_path / FILE, tensors(a=(2,)))
    assert_names(error_of(tmp_path, {"a": (2,), "b": (5, 6)}), "'b'", "missing", "(5, 6)")


def test_an_extra_tensor(tmp_path):
    write_sharded(tmp_path, {A: tensors(a=(2,)), B: tensors(b=(7, 8))})
    assert_names(error_of(tmp_path, {"a": (2,)}), "'b'", B, "F32 (7, 8)", "no part of the model")


def test_extra_tensors_that_are_ignored_by_pattern_or_predicate(tmp_path):
    names = {"model.layers.2.mlp.w": (3,), "model.layers.20.mlp.w": (3,), "a": (2,)}
    write_file(tmp_path / FILE, tensors(**names))
    for ignored in (["model.layers.2.*"], "model.layers.2.*", lambda name: name.startswith("model.layers.2.")):
        assert "'model.layers.20.mlp.w'" in error_of(tmp_path, {"a": (2,)}, ignored=ignored)
    assert set(load(tmp_path, {"a": (2,)}, ignored=["rotary", "model.layers.*"])) == {"a"}


def test_many_wrong_tensors_are_counted_and_the_first_shown(tmp_path):
    write_file(tmp_path / FILE, tensors(**{f"t{i:02}": (2,) for i in range(20)}))
    message = error_of(tmp_path, {f"t{i:02}": (3,) for i in range(20)})
    assert_names(message, "'t00'", "'t03'", "16 more", "20 problems")
    assert "'t04'" not in message


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.float64])
def test_a_dtype_that_parameters_cannot_take(tmp_path, dtype):
    name = {np.int32: "I32", np.uint8: "U8", np.float64: "F64"}[dtype]
    tensor = np.ones(2, dtype)
    entry = {"dtype": name, "shape": [2], "data_offsets": [0, tensor.nbytes]}
    write_file(tmp_path / FILE, {"a": tensor}, {"a": entry})
    assert_names(error_of(tmp_path, {"a": (2,)}), "'a'", FILE, name, "BF16")


# Quantized tensors.


def fp8(*shape):
    return np.ones(shape, ml_dtypes.float8_e4m3fn)


def test_fp8_without_declared_quantization(tmp_path):
    write_file(tmp_path / FILE, {"w": fp8(4, 4), "w_scale_inv": np.ones((1, 1), np.float32)})
    assert_names(error_of(tmp_path, {"w": (4, 4)}), "'w'", FILE, "F8_E4M3", "no block quantization")


def test_fp8_without_scales(tmp_path):
    write_file(tmp_path / FILE, {"w": fp8(130, 4)})
    message = error_of(tmp_path, {"w": (130, 4)}, block_size=(128, 128))
    assert_names(message, "'w'", FILE, "(130, 4)", "'w_scale_inv'", "(2, 1)")


@pytest.mark.parametrize(
    ("scale", "found"),
    [
        (np.ones((1, 1), np.float32), "F32 (1, 1)"),
        (np.ones((2,), np.float32), "F32 (2,)"),
        (np.ones((2, 1), ml_dtypes.bfloat16), "BF16 (2, 1)"),
    ],
)
def test_fp8_with_wrong_scales(tmp_path, scale, found):
    write_sharded(tmp_path, {A: {"w": fp8(130, 4)}, B: {"w_scale_inv": scale}})
    message = error_of(tmp_path, {"w": (130, 4)}, block_size=(128, 128))
    assert_names(message, "'w'", A, "(130, 4)", "'w_scale_inv'", B, found, "expected F32 (2, 1)")


def test_fp8_that_is_no_matrix(tmp_path):
    write_file(tmp_path / FILE, {"w": fp8(4), "w_scale_inv": np.ones((1,), np.float32)})
    assert_names(error_of(tmp_path, {"w": (4,)}, block_size=(128, 128)), "'w'", FILE, "(4,)", "2 dimensions")


def test_scales_of_a_tensor_that_is_not_quantized(tmp_path):
    write_file(tmp_path / FILE, tensors(w=(4, 4), w_scale_inv=(1, 1)))
    assert_names(
        error_of(tmp_path, {"w": (4, 4)}, block_size=(128, 128)), "'w_scale_inv'", FILE, "no part of the model"
    )


def test_experts_of_different_dtypes_that_ranks_would_hold_together(tmp_path):
    write_file(tmp_path / FILE, {"e0": np.ones((2, 2), np.float32), "e1": np.ones((2, 2), ml_dtypes.bfloat16)})
    sources = (Source("e0", (2, 2), (0,)), Source("e1", (2, 2), (1,)))
    specs = {"w": ParamSpec((2, 2, 2), None, PartitionSpec("qsplit"), sources)}
    with pytest.raises(CheckpointError, match=r"'e0', 'e1'.*one shape and dtype"):
        load_safetensors(tmp_path, specs, make_mesh(tp=2), jnp.float32, progress=False)


# Files and folders.


def test_a_folder_that_does_not_exist(tmp_path):
    assert "no such folder" in error_of(tmp_path / "absent", {})


def test_a_folder_without_weights(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    assert_names(error_of(tmp_path, {}), INDEX, ".safetensors")


@pytest.mark.parametrize("lost", [1, 8, 23])
def test_a_truncated_file(tmp_path, lost):
    write_sharded(tmp_path, {A: tensors(a=(2,)), B: tensors(b=(2,), c=(2, 2))})
    data = (tmp_path / B).read_bytes()
    (tmp_path / B).write_bytes(data[:-lost])
    message = error_of(tmp_path, {"a": (2,), "b": (2,), "c": (2, 2)})
    assert_names(message, B, "truncated", "'b'" if lost > 16 else "'c'", str(len(data)), str(len(data) - lost))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x10\0\0",
        b"\xff" * 8 + b"{}",
        (10**9).to_bytes(8, "little") + b"{}",
        (100).to_bytes(8, "little") + b"{}",
    ],
)
def test_a_header_length_that_is_garbage(tmp_path, data):
    (tmp_path / FILE).write_bytes(data)
    assert_names(error_of(tmp_path, {"a": (2,)}), FILE, "truncated or no safetensors file")


def test_a_header_longer_than_any_real_one_is_not_read(tmp_path):
    with (tmp_path / FILE).open("wb") as stream:
        stream.write((2 * 10**8).to_bytes(8, "little"))
        stream.truncate(3 * 10**8)  # Sparse: it takes no room.
    assert_names(error_of(tmp_path, {"a": (2,)}), FILE, "header length 200000000")


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100000, "not JSON"),
        (b"[1]", "not a JSON object"),
        (b'{"a": 1, "a": 2}', "appears twice"),
        ({"a": 5}, "lacks one of"),
        ({"a": {"dtype": "F32", "shape": [2]}}, "lacks one of"),
        ({"a": {"dtype": "F31", "shape": [2], "data_offsets": [0, 8]}}, "unknown dtype 'F31'"),
        ({"a": {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]}}, "unknown dtype"),
        ({"a": {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]}}, "malformed shape 2"),
        ({"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}, "malformed shape [-2]"),
        ({"a": {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}}, "malformed shape [2.0]"),
        ({"a": {"dtype": "F32", "shape": [True, 2], "data_offsets": [0, 8]}}, "malformed shape [True, 2]"),
        ({"a": {"dtype": "F32", "shape": [10**40], "data_offsets": [0, 8]}}, "malformed shape"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}, "malformed data_offsets [8, 0]"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0]}}, "malformed data_offsets [0]"),
        ({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, "8 bytes, but F32 (3,) takes 12"),
        ({"a": {"dtype": "F4", "shape": [3], "data_offsets": [0, 8]}}, "8 bytes, but F4 (3,) takes 2"),
    ],
)
def test_a_malformed_header(tmp_path, header, message):
    write_file(tmp_path / FILE, tensors(a=(2,)), header)
    assert_names(error_of(tmp_path, {"a": (2,)}), FILE, message)


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ({"a": [0, 8], "b": [4, 12]}, "tensor 'b' in model.safetensors overlaps 'a'"),
        ({"a": [0, 8], "b": [0, 8]}, "overlaps"),
        ({"a": [0, 8], "b": [12, 20]}, "tensor 'b' in model.safetensors leaves a gap of 4 bytes after 'a'"),
        ({"a": [4, 12], "b": [12, 20]}, "leaves a gap of 4 bytes after the header"),
        ({"a": [0, 8], "b": [8, 16]}, "4 bytes that belong to no tensor after 'b'"),
    ],
)
def test_offsets_that_do_not_cover_the_file_once(tmp_path, offsets, message):
    header = {name: {"dtype": "F32", "shape": [2], "data_offsets": span} for name, span in offsets.items()}
    write_file(tmp_path / FILE, tensors(data=(5,)), header)
    assert message in error_of(tmp_path, {"a": (2,), "b": (2,)})


def test_a_name_in_two_files(tmp_path):
    files = {A: tensors(a=(2,)), B: tensors(b=(2,), a=(2,))}
    for name, content in files.items():
        write_file(tmp_path / name, content)
    assert_names(error_of(tmp_path, {"a": (2,), "b": (2,)}), "'a'", A, B)
    write_sharded(tmp_path, files, {"a": A, "b": B})
    assert_names(error_of(tmp_path, {"a": (2,), "b": (2,)}), "'a'", A, B)


def test_a_file_that_the_index_does_not_name_is_left_alone(tmp_path):
    write_sharded(tmp_path, {A: tensors(a=(2,))})
    (tmp_path / "consolidated.safetensors").write_bytes(b"junk")
    assert set(load(tmp_path, {"a": (2,)})) == {"a"}


def test_a_pipe_in_place_of_a_file_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / FILE)
    assert_names(error_of(tmp_path, {"a": (2,)}), FILE, "regular file")


def test_several_damaged_files_are_told_at_once(tmp_path):
    write_sharded(tmp_path, {A: tensors(a=(2,)), B: tensors(b=(2,))})
    for name in (A, B):
        (tmp_path / name).write_bytes(b"junk")
    assert_names(error_of(tmp_path, {"a": (2,), "b": (2,)}), A, B)


def test_files_without_an_index_are_read_together(tmp_path):
    write_file(tmp_path / A, tensors(a=(2,)))
    write_file(tmp_path / B, tensors(b=(3,)))
    assert set(load(tmp_path, {"a": (2,), "b": (3,)})) == {"a", "b"}


# The index.


@pytest.mark.parametrize("where", ["../{}", "/etc/passwd", "sub/{}", "..", "", "..\\{}", "{}\0"])
def test_an_index_that_points_outside_the_folder(tmp_path, where):
    folder = tmp_path / "checkpoint"
    (folder / "sub").mkdir(parents=True)
    for target in (tmp_path / B, folder / "sub" / B):
        write_file(target, tensors(b=(2,)))
    name = where.format(B)
    write_sharded(folder, {A: tensors(a=(2,))}, {"a": A, "b": name})
    message = error_of(folder, {"a": (2,), "b": (2,)})
    assert_names(message, INDEX, repr(name), "inside the folder")


def test_an_index_that_points_to_a_missing_file(tmp_path):
    write_sharded(tmp_path, {A: tensors(a=(2,))}, {"a": A, "b": B})
    assert_names(error_of(tmp_path, {"a": (2,), "b": (2,)}), repr(B), "'b'", "no such file")


def test_an_index_that_names_a_tensor_its_file_lacks(tmp_path):
    write_sharded(tmp_path, {A: tensors(a=(2,)), B: tensors(b=(2,))}, {"a": A, "b": B, "c": B})
    assert_names(error_of(tmp_path, {"a": (2,), "b": (2,)}), "'c'", B)


def test_an_index_that_puts_a_tensor_in_another_file(tmp_path):
    write_sharded(tmp_path, {A: tensors(a=(2,)), B: tensors(b=(2,))}, {"a": B, "b": B, "c": A})
    assert_names(error_of(tmp_path, {"a": (2,), "b": (2,)}), "'a'", A, B)


def test_an_index_that_does_not_list_a_tensor(tmp_path):
    write_sharded(tmp_path, {A: tensors(a=(2,), b=(2,))}, {"a": A})
    assert_names(error_of(tmp_path, {"a": (2,)}), "'b'", A, "not listed")


def test_an_index_beside_a_single_file_that_it_does_not_name(tmp_path):
    write_sharded(tmp_path, {A: tensors(a=(2,))})
    write_file(tmp_path / FILE, tensors(a=(2,)))
    assert_names(error_of(tmp_path, {"a": (2,)}), INDEX, FILE, "remove one")


def test_an_index_may_name_the_single_file(tmp_path):
    write_sharded(tmp_path, {FILE: tensors(a=(2,))})
    assert set(load(tmp_path, {"a": (2,)})) == {"a"}


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', '{"weight_map": {}}', '{"weight_map": 1}'],
)
def test_an_index_that_is_no_index(tmp_path, text):
    write_file(tmp_path / A, tensors(a=(2,)))
    (tmp_path / INDEX).write_text(text)
    assert INDEX in error_of(tmp_path, {"a": (2,)})


def test_a_file_that_changes_after_the_check_is_told(tmp_path, monkeypatch):
    """Between check and read a download may replace a file: still the one error, with the file's name."""
    write_file(tmp_path / FILE, tensors(a=(64,)))
    headers = read_headers(tmp_path)
    monkeypatch.setattr("dsa_jax.checkpoint.read_headers", lambda folder: headers)
    (tmp_path / FILE).write_bytes((tmp_path / FILE).read_bytes()[:-32])
    assert_names(error_of(tmp_path, {"a": (64,)}), FILE, "reading")
    (tmp_path / FILE).unlink()
    assert_names(error_of(tmp_path, {"a": (64,)}), FILE, "reading")


def test_headers_tell_where_the_bytes_are(tmp_path):
    content = {"b": np.arange(3, dtype=np.float32), "empty": np.ones((0, 2), np.float32), "a": np.float32(7)}
    content = {name: np.asarray(value) for name, value in content.items()}
    write_file(tmp_path / FILE, content, {"__metadata__": {"format": "pt"}, **header_of(content)})
    headers = read_headers(tmp_path)
    assert list(headers) == ["b", "empty", "a"]
    data = (tmp_path / FILE).read_bytes()
    for name, header in headers.items():
        assert header.shape == content[name].shape
        assert data[header.start : header.start + header.nbytes] == content[name].tobytes()
    assert json.loads(data[8 : headers["b"].start])
