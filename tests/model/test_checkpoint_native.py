"""Native checkpoints: they restore onto any mesh, do not depend on the one that wrote them, and appear whole or not."""

import json
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from dsa_jax import checkpoint_folder, native_checkpoint
from dsa_jax.checkpoint import (
    CheckpointError,
    convert,
    describe,
    find_nonfinite,
    is_native,
    load_native,
    load_safetensors,
    save_native,
)
from dsa_jax.native_checkpoint import pieces_of
from dsa_jax.params import ParamSpec, Source
from sharding.mesh import AXES, TP_AXES, make_mesh
from tests.model.checkpoint_cases import BLOCK, ORACLE, bits, expected, read_tensors, specs_for

FP8 = ORACLE / "glm5_fp8" / "single"
TENSORS = read_tensors(FP8)
# Padded and split, stacked and split, padded experts, stacked vectors, float32.
SOME = (
    "lm_head.weight",
    "self_attn.q_b_proj.weight",
    "self_attn.o_proj.weight",
    "mlp.experts.up_proj.weight",
    "self_attn.indexer.k_norm.bias",
    "mlp.gate.e_score_correction_bias",
    "model.norm.weight",
)
FEW = ("lm_head.weight", "mlp.experts.up_proj.weight", "mlp.gate.e_score_correction_bias")
bfloat16 = ml_dtypes.bfloat16


def some_specs(tp, names=SOME):
    specs = specs_for(TENSORS, tp, 3)
    return {name: specs[name] for name in names}


def assert_restores(folder, specs, mesh, dtype):
    params = load_native(folder, specs, mesh, dtype, progress=False)
    assert list(params) == list(specs)
    for name, spec in specs.items():
        want = expected(spec, TENSORS, dtype)
        assert params[name].sharding.is_equivalent_to(NamedSharding(mesh, spec.spec), len(spec.shape)), name
        np.testing.assert_array_equal(bits(params[name]), bits(want), err_msg=name)


def stored_arrays(folder):
    """The arrays as they are stored, by their names in the folder."""
    sharding = SingleDeviceSharding(jax.devices()[0])
    stored = native_checkpoint.read_native_headers(folder)
    wanted = {n: jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=sharding) for n, t in stored.items()}
    return native_checkpoint.native_reader(folder)(wanted)()


def load_some(mesh, dtype, names=SOME):
    specs = some_specs(mesh.size, names)
    return specs, load_safetensors(FP8, specs, mesh, dtype, ignored=["*"], block_size=BLOCK, progress=False)


def test_saved_on_eight_devices_it_restores_on_any_mesh(tmp_path):
    mesh = make_mesh(tp=8, dcp=2)
    specs, params = load_some(mesh, jnp.float32)
    config = FP8 / "config.json"
    save_native(tmp_path / "out", params, specs, extra_files=[config], max_bytes_in_flight=100_000)
    assert is_native(tmp_path / "out")
    assert (tmp_path / "out" / "config.json").read_bytes() == config.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    for tp, dcp in ((1, 1), (2, 2), (8, 4)):
        assert_restores(tmp_path / "out", some_specs(tp), make_mesh(tp=tp, dcp=dcp), np.float32)
    assert_restores(tmp_path / "out", some_specs(3), make_mesh(tp=3), bfloat16)  # Pads 199 to 201, 4 to 6.


def test_convert_equals_save_whatever_the_mesh(tmp_path):
    """What is stored is the unpadded layers, the same from every mesh and from both ways of making it."""
    mesh = make_mesh(tp=8, dcp=2)
    specs, params = load_some(mesh, bfloat16, FEW)
    save_native(tmp_path / "saved", params, specs)
    options = {"ignored": ["*"], "block_size": BLOCK, "progress": False}
    for tp in (1, 8):
        convert(FP8, tmp_path / f"tp{tp}", some_specs(tp, FEW), make_mesh(tp=tp), jnp.bfloat16, **options)
    trees = [stored_arrays(tmp_path / name) for name in ("saved", "tp1", "tp8")]
    assert trees[0]["lm_head.weight"].shape == (199, 160)
    assert trees[0]["mlp.experts.up_proj.weight.1"].shape == (4, 40, 160)
    for tree in trees[1:]:
        assert tree.keys() == trees[0].keys()
        for name, array in tree.items():
            np.testing.assert_array_equal(bits(array), bits(trees[0][name]), err_msg=name)
    assert_restores(tmp_path / "tp1", some_specs(2, FEW), make_mesh(tp=2), bfloat16)


@pytest.mark.quick
def test_explicit_meshes(tmp_path):
    mesh = jax.make_mesh((1, 2, 2), AXES, axis_types=(AxisType.Explicit,) * 3)
    with jax.set_mesh(mesh):
        specs, params = load_some(mesh, jnp.float32, FEW)
        save_native(tmp_path / "out", params, specs)
        assert_restores(tmp_path / "out", specs, mesh, np.float32)


def test_experts_that_are_not_stacked_keep_their_split_axis_whole(tmp_path):
    sources = tuple(Source(f"e{e}", (2, 3), (e,)) for e in range(5))
    values = np.arange(48, dtype=np.float32).reshape(8, 2, 3)
    values[5:] = 0
    specs = {"w": ParamSpec((8, 2, 3), None, PartitionSpec(TP_AXES), sources)}
    mesh = make_mesh(tp=8)
    save_native(tmp_path / "out", {"w": jax.device_put(values, NamedSharding(mesh, specs["w"].spec))}, specs)
    assert {n: a.shape for n, a in stored_arrays(tmp_path / "out").items()} == {"w": (5, 2, 3)}
    specs = {"w": ParamSpec((6, 2, 3), None, PartitionSpec(TP_AXES), sources)}
    params = load_native(tmp_path / "out", specs, make_mesh(tp=2), jnp.float32, progress=False)
    np.testing.assert_array_equal(params["w"], values[:6])


# Errors.

SPECS = {
    "a": ParamSpec((2, 3), None, PartitionSpec(), (Source("x", (3,), (0,)), Source("y", (3,), (1,)))),
    "b": ParamSpec((4,), None, PartitionSpec(), (Source("z", (4,)),)),
}


def save_small(folder, **options):
    mesh = make_mesh()
    params = {n: jnp.ones(s.shape, jnp.float32, device=NamedSharding(mesh, s.spec)) for n, s in SPECS.items()}
    save_native(folder, params, SPECS, **options)


def load_small(folder, specs):
    return load_native(folder, specs, make_mesh(), jnp.float32, progress=False)


def other(name, *sources):
    sizes = [(*(i + 1 for i in source.index), *source.shape) for source in sources]
    return {**SPECS, name: ParamSpec(tuple(map(max, zip(*sizes, strict=True))), None, PartitionSpec(), sources)}


@pytest.mark.parametrize(
    ("specs", "parts"),
    [
        (other("c", Source("c", (5,))), ["'c' is missing", "(5,)"]),
        (other("a", *(Source(f"{i}", (3,), (i,)) for i in range(3))), ["'a.2' is missing", "(3,)"]),
        (other("a", Source("x", (3,), (0,))), ["'a.1'", "(3,)", "no part of the model"]),
        (other("b", Source("z", (5,))), ["'b'", "(4,)", "expects (5,)"]),
    ],
)
def test_a_native_checkpoint_of_another_model(tmp_path, specs, parts):
    save_small(tmp_path / "out")
    with pytest.raises(CheckpointError) as caught:
        load_small(tmp_path / "out", specs)
    for part in (str(tmp_path / "out"), *parts):
        assert part in str(caught.value)


def test_a_folder_that_is_not_native(tmp_path):
    assert not is_native(tmp_path)
    assert not is_native(tmp_path / "absent")
    assert not is_native(FP8)
    (tmp_path / "params").mkdir()
    assert not is_native(tmp_path)
    with pytest.raises(CheckpointError, match=r"no complete native checkpoint.*native_checkpoint\.json"):
        load_small(tmp_path, SPECS)


@pytest.mark.parametrize("where", ["params/*/_METADATA", "params/*/manifest.ocdbt", "params/**/d/*"])
@pytest.mark.parametrize("lost", ["half", "all"])
def test_files_that_were_truncated_or_lost(tmp_path, where, lost):
    save_small(tmp_path / "out")
    files = [file for file in (tmp_path / "out").glob(where) if file.is_file()]
    assert files
    for file in files:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]) if lost == "half" else file.unlink()
    for function in (lambda folder: load_small(folder, SPECS), describe, find_nonfinite):
        with pytest.raises(CheckpointError) as caught:
            function(tmp_path / "out")
        message = str(caught.value)
        assert str(tmp_path / "out") in message and files[0].name in message and "\n" not in message
        assert ("is missing" if lost == "all" else "native_checkpoint.json says") in message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: {**m, "version": 9}, "'version': 9"),
        (lambda m: {**m, "format": "other"}, "'format': 'other'"),
        (lambda m: [], "cannot be read"),
        (lambda m: {"format": "dsa_jax"}, "cannot be read"),
        (lambda m: {**m, "arrays": {"b": {"shape": [4]}}}, "cannot be read"),
        (lambda m: {**m, "arrays": {"b": {"shape": [4], "dtype": "float33"}}}, "float33"),
        (lambda m: {**m, "files": 3}, "cannot be read"),
    ],
)
def test_a_manifest_that_is_none(tmp_path, change, message):
    save_small(tmp_path / "out")
    manifest = tmp_path / "out" / "native_checkpoint.json"
    manifest.write_text(json.dumps(change(json.loads(manifest.read_text()))))
    with pytest.raises(CheckpointError, match=message):
        load_small(tmp_path / "out", SPECS)


def test_an_error_while_arrays_are_read_is_one_line(tmp_path, monkeypatch):
    def fail(*args):
        raise ValueError("the disk\nis on fire")

    save_small(tmp_path / "out")
    monkeypatch.setattr(native_checkpoint.ocp, "load", fail)
    with pytest.raises(CheckpointError, match="the disk is on fire") as caught:
        load_small(tmp_path / "out", SPECS)
    assert str(tmp_path / "out") in str(caught.value)


def test_an_output_folder_that_is_taken(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("x")
    with pytest.raises(CheckpointError, match="not empty"):
        save_small(tmp_path / "out")
    with pytest.raises(CheckpointError, match="not empty"):
        save_small(tmp_path / "out" / "precious")
    with pytest.raises(CheckpointError, match="not empty"):
        convert(FP8, tmp_path / "out", some_specs(1), make_mesh(), jnp.float32, ignored=["*"], block_size=BLOCK)
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "precious"]


def test_an_empty_output_folder_is_used(tmp_path):
    (tmp_path / "new" / "out").mkdir(parents=True)
    save_small(tmp_path / "new" / "out")
    np.testing.assert_array_equal(load_small(tmp_path / "new" / "out", SPECS)["a"], 1)


def test_a_file_to_copy_that_is_missing(tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        save_small(tmp_path / "out", extra_files=[FP8 / "config.json", tmp_path / "tokenizer.json"])
    assert list(tmp_path.iterdir()) == []


def test_parameters_that_are_not_the_declared_ones(tmp_path):
    with pytest.raises(ValueError, match=r"\['a', 'b'\]"):
        save_native(tmp_path / "out", {}, SPECS)


# Interruptions.


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError("disk full")])
def test_a_save_that_fails_leaves_nothing(tmp_path, monkeypatch, error):
    def fail(*args):
        raise error

    monkeypatch.setattr(native_checkpoint.ocp.partial, "finalize", fail)
    with pytest.raises(type(error) if isinstance(error, Exception) else error):
        save_small(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_convert_that_is_killed_is_resumed(tmp_path, monkeypatch):
    """It leaves no folder that looks whole, and the same call completes it."""
    script = f"""
import os, signal, time
import jax
jax.config.update("jax_platforms", "cpu")
from tests.model import test_checkpoint_native as t
from dsa_jax import checkpoint
saved = checkpoint.cut
def cut(*args):
    if len(os.listdir({str(tmp_path)!r})) and t.reached(args):
        print("killed here", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return saved(*args)
checkpoint.cut = cut
t.convert(t.FP8, {str(tmp_path / "out")!r}, t.some_specs(1), t.make_mesh(), "float32", ignored=["*"],
          block_size=t.BLOCK, progress=False, extra_files=[t.FP8 / "config.json"], max_bytes_in_flight=1000)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ORACLE.parents[2])
    assert done.returncode == -signal.SIGKILL and "killed here" in done.stdout, done.stderr
    assert not (tmp_path / "out").exists()
    leftovers = list(tmp_path.iterdir())
    assert leftovers and not any(is_native(path) for path in leftovers)
    assert all(path.name.startswith(".out.") and path.name.endswith(".unfinished") for path in leftovers)
    # Run again it goes on behind what is saved, to the same end as a run without interruption.
    saved = len(json.loads((leftovers[0] / "progress.json").read_text())["arrays"])
    assert 0 < saved < len(pieces_of(some_specs(1)))
    options = {"ignored": ["*"], "block_size": BLOCK, "progress": False, "extra_files": [FP8 / "config.json"]}
    calls = count_saves(monkeypatch)
    convert(FP8, tmp_path / "out", some_specs(1), make_mesh(), "float32", max_bytes_in_flight=1000, **options)
    assert sum(calls) == len(pieces_of(some_specs(1))) - saved
    convert(FP8, tmp_path / "straight", some_specs(1), make_mesh(), "float32", **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "straight"]
    resumed, straight = (
        load_native(tmp_path / name, some_specs(1), make_mesh(), "float32", progress=False)
        for name in ("out", "straight")
    )
    for name in straight:
        np.testing.assert_array_equal(resumed[name], straight[name], err_msg=name)


def count_saves(monkeypatch) -> list[int]:
    """Numbers of arrays in each part that is saved from now on."""
    calls: list[int] = []
    save = native_checkpoint.ocp.partial.save

    def counted(path, arrays):
        calls.append(len(arrays))
        save(path, arrays)

    monkeypatch.setattr(native_checkpoint.ocp.partial, "save", counted)
    return calls


def test_a_part_that_is_saved_but_not_noted_is_saved_again(tmp_path, monkeypatch):
    options = {"ignored": ["*"], "block_size": BLOCK, "progress": False, "max_bytes_in_flight": 1000}
    note, notes = native_checkpoint._write_progress, []

    def fail_at_the_third(*args):
        notes.append(args)
        if len(notes) == 3:
            raise KeyboardInterrupt
        note(*args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(native_checkpoint, "_write_progress", fail_at_the_third)
        convert(FP8, tmp_path / "out", some_specs(1), make_mesh(), "float32", **options)
    convert(FP8, tmp_path / "out", some_specs(1), make_mesh(), "float32", **options)
    assert_restores(tmp_path / "out", some_specs(1), make_mesh(), jnp.float32)


def test_a_second_convert_to_the_same_folder_is_refused(tmp_path, monkeypatch):
    """While one is at work; what it writes is not touched, and it ends as if the other had not been."""
    options = {"ignored": ["*"], "block_size": BLOCK, "progress": False}
    finalize = native_checkpoint.ocp.partial.finalize

    def meanwhile(path):
        with pytest.raises(CheckpointError, match=rf"{tmp_path / 'out'} is being written by another process"):
            convert(FP8, tmp_path / "out", some_specs(1, FEW), make_mesh(), "bfloat16", **options)
        finalize(path)

    with monkeypatch.context() as patch:
        patch.setattr(native_checkpoint.ocp.partial, "finalize", meanwhile)
        convert(FP8, tmp_path / "out", some_specs(1, FEW), make_mesh(), "float32", **options)
    assert_restores(tmp_path / "out", some_specs(1, FEW), make_mesh(), np.float32)
    assert not [path for path in tmp_path.rglob(".*") if path.name.startswith(".")]
    with pytest.raises(CheckpointError, match="exists already and is not empty"):
        convert(FP8, tmp_path / "out", some_specs(1, FEW), make_mesh(), "bfloat16", **options)


def test_a_folder_that_another_process_just_finished_is_not_taken(tmp_path, monkeypatch):
    """Between looking at the output folder and locking the unfinished one, the other may have moved it into place."""
    lock = checkpoint_folder.fcntl.flock

    def moved(descriptor, operation):
        (tmp_path / ".out.resumable.unfinished").rename(tmp_path / "out")
        lock(descriptor, operation)

    monkeypatch.setattr(checkpoint_folder.fcntl, "flock", moved)
    with (
        pytest.raises(CheckpointError, match="was being written by another process, which has just ended"),
        checkpoint_folder.new_folder(tmp_path / "out", [], lambda _: False),
    ):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_convert_of_something_else_starts_anew(tmp_path, monkeypatch):
    """What an interrupted conversion has saved is of no use once the dtype is another."""
    options = {"ignored": ["*"], "block_size": BLOCK, "progress": False, "max_bytes_in_flight": 1000}

    def fail(path):
        raise OSError("disk full")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="disk full"):
        patch.setattr(native_checkpoint.ocp.partial, "finalize", fail)
        convert(FP8, tmp_path / "out", some_specs(1), make_mesh(), "float32", **options)
    assert [path.name for path in tmp_path.iterdir()] == [".out.resumable.unfinished"]
    calls = count_saves(monkeypatch)
    convert(FP8, tmp_path / "out", some_specs(1), make_mesh(), "bfloat16", **options)
    assert sum(calls) == len(pieces_of(some_specs(1)))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def reached(args):
    """Whether the second piece is about to be saved."""
    CUTS.append(args)
    return len(CUTS) == 2


CUTS: list = []


def test_describe_a_native_checkpoint(tmp_path):
    save_small(tmp_path / "out")
    report = describe(tmp_path / "out")
    assert (report.layout, report.tensors, report.parameters, report.nbytes) == ("native", 3, 10, 40)
