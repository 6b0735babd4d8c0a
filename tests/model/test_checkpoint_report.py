"""Reports of a checkpoint: counts from the headers, and the tensors that hold NaN or infinity."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dsa_jax.checkpoint import CheckpointError, describe, find_nonfinite, save_native
from dsa_jax.params import ParamSpec, Source
from sharding.mesh import make_mesh
from tests.model.checkpoint_cases import DTYPES, NAMES, ORACLE, read_tensors, write_file, write_sharded


@pytest.mark.parametrize(("variant", "form"), [("glm5_fp8", "single"), ("glm52", "sharded")])
def test_counts_of_the_fixtures(variant, form):
    folder = ORACLE / variant / form
    tensors = read_tensors(folder)
    report = describe(folder)
    assert report.layout == "safetensors"
    assert report.files == len(list(folder.glob("*.safetensors")))
    assert report.tensors == len(tensors)
    assert report.nbytes == sum(t.nbytes for t in tensors.values())
    assert report.parameters == sum(t.size for name, t in tensors.items() if not name.endswith("_scale_inv"))
    for dtype, count in report.by_dtype.items():
        those = [t for t in tensors.values() if NAMES[t.dtype] == dtype]
        assert (count.tensors, count.elements) == (len(those), sum(t.size for t in those))
        assert count.nbytes == sum(t.nbytes for t in those)
    assert sum(count.tensors for count in report.by_dtype.values()) == len(tensors)
    sizes = [count.nbytes for count in report.by_dtype.values()]
    assert sizes == sorted(sizes, reverse=True)


def test_dtypes_that_cannot_be_loaded_are_counted(tmp_path):
    data = {"packed": np.zeros(6, np.int32), "byte": np.zeros(2, np.int32)}
    header = {
        "packed": {"dtype": "F4", "shape": [6, 8], "data_offsets": [0, 24]},
        "byte": {"dtype": "F8_E8M0", "shape": [8], "data_offsets": [24, 32]},
    }
    write_file(tmp_path / "model.safetensors", data, header)
    report = describe(tmp_path)
    assert {name: (c.tensors, c.elements, c.nbytes) for name, c in report.by_dtype.items()} == {
        "F4": (1, 48, 24),
        "F8_E8M0": (1, 8, 8),
    }


def test_only_headers_are_read(tmp_path):
    """A sparse file of 1 TiB is described at once."""
    size = 2**40
    header = {"w": {"dtype": "BF16", "shape": [2**20, 2**19], "data_offsets": [0, size]}}
    write_file(tmp_path / "model.safetensors", {}, header)
    with (tmp_path / "model.safetensors").open("r+b") as stream:
        stream.truncate((tmp_path / "model.safetensors").stat().st_size + size)
    assert describe(tmp_path).parameters == 2**39


def test_a_folder_that_is_no_checkpoint(tmp_path):
    for function in (describe, find_nonfinite):
        with pytest.raises(CheckpointError, match="safetensors"):
            function(tmp_path)


FLOATS = {**DTYPES, "F64": np.dtype(np.float64), "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2)}
FLOATS["F8_E8M0"] = np.dtype(ml_dtypes.float8_e8m0fnu)
del FLOATS["I32"]


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_values_found_are_those_that_numpy_calls_not_finite(tmp_path, dtype):
    """All bit patterns of the narrow dtypes, and the edges of the wide ones."""
    width = FLOATS[dtype].itemsize
    if width <= 2:
        values = np.arange(256**width, dtype=f"u{width}").view(FLOATS[dtype])
    else:
        info = np.finfo(FLOATS[dtype])
        values = np.array([0, -0.0, info.max, info.min, info.tiny, np.inf, -np.inf, np.nan, -np.nan], FLOATS[dtype])
    header = {"w": {"dtype": dtype, "shape": [values.size], "data_offsets": [0, values.nbytes]}}
    write_file(tmp_path / "model.safetensors", {"w": values}, header)
    with np.errstate(invalid="ignore"):  # Casting a signalling NaN warns.
        count = int(np.count_nonzero(~np.isfinite(values.astype(np.float64))))
    assert count > 0
    assert find_nonfinite(tmp_path) == {"w": count}
    assert find_nonfinite(tmp_path, chunk_bytes=3) == {"w": count}


def test_only_the_tensors_at_fault_are_named(tmp_path):
    """One bad value in the middle of a tensor that is read in many pieces, in the second of two files."""
    rng = np.random.default_rng(0)
    good, bad = (rng.normal(size=(50, 40)).astype(np.float32) for _ in range(2))
    bad[31, 7] = np.nan
    scale = np.array([[1, np.inf]], np.float32)
    ids = np.full(4, 0x7FC00000, np.int32)  # NaN if these were floats
    files = {
        "model-1.safetensors": {"good": good.astype(ml_dtypes.bfloat16), "ids": ids},
        "model-2.safetensors": {"odd": np.ones(3, ml_dtypes.bfloat16), "bad": bad, "good2": good, "x_scale_inv": scale},
    }
    write_sharded(tmp_path, files)
    for chunk_bytes in (64, 2**20):
        assert find_nonfinite(tmp_path, chunk_bytes=chunk_bytes) == {"bad": 1, "x_scale_inv": 1}


def test_the_fixtures_are_finite():
    assert find_nonfinite(ORACLE / "glm5_fp8" / "single") == {}
    assert find_nonfinite(ORACLE / "glm52" / "sharded") == {}


def test_progress_counts_all_bytes(tmp_path, capsys):
    write_file(tmp_path / "model.safetensors", {"w": np.ones(2048, np.float32)})
    find_nonfinite(tmp_path, progress=True, chunk_bytes=1000)
    out, err = capsys.readouterr()
    assert not out and "8.00k/8.00k" in err


def test_native_checkpoints(tmp_path):
    mesh = make_mesh(tp=2)
    sources = (Source("x", (3,), (0,)), Source("y", (3,), (1,)))
    specs = {
        "a": ParamSpec((2, 3), None, PartitionSpec(), sources),
        "b": ParamSpec((4,), None, PartitionSpec(("qsplit", "dcp")), (Source("z", (4,)),)),
    }
    a = jnp.ones((2, 3), jnp.bfloat16, device=NamedSharding(mesh, PartitionSpec())).at[1, 2].set(jnp.nan)
    b = jnp.ones((4,), jnp.float32, device=NamedSharding(mesh, specs["b"].spec))
    save_native(tmp_path / "out", {"a": a, "b": b}, specs)
    report = describe(tmp_path / "out")
    assert (report.layout, report.tensors, report.parameters, report.nbytes) == ("native", 3, 10, 28)
    assert {dtype: count.nbytes for dtype, count in report.by_dtype.items()} == {"F32": 16, "BF16": 12}
    for chunk_bytes in (1, 2**20):
        assert find_nonfinite(tmp_path / "out", chunk_bytes=chunk_bytes) == {"a.1": 1}
