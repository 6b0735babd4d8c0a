"""Loading safetensors: every bit of every parameter, on meshes of 1, 2 and 8 devices."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dsa_jax.checkpoint import load_safetensors
from dsa_jax.params import ParamSpec, Source
from sharding.mesh import AXES, TP_AXES, make_mesh
from tests.model.checkpoint_cases import BLOCK, MTP, ORACLE, bits, expected, read_tensors, specs_for, write_file

LAYERS = {"glm5": 4, "glm52": 6, "dsv32": 4, "glm5_fp8": 3}
# Padded and split, FP8 split inside a block by rows and by columns, padded experts, replicated, float32.
SOME = (
    "lm_head.weight",
    "self_attn.q_b_proj.weight",
    "self_attn.o_proj.weight",
    "mlp.experts.up_proj.weight",
    "self_attn.indexer.k_norm.bias",
    "mlp.gate.e_score_correction_bias",
)
bfloat16 = ml_dtypes.bfloat16


def load_oracle(variant, form, mesh, dtype, only=(), **options):
    """Load a fixture, or some of its parameters."""
    folder = ORACLE / variant / form
    tensors = read_tensors(folder)
    specs = specs_for(tensors, mesh.size // mesh.shape["data"], LAYERS[variant])
    specs = {name: spec for name, spec in specs.items() if not only or name in only}
    params = load_safetensors(
        folder,
        specs,
        mesh,
        dtype,
        ignored=["*"] if only else MTP.get(variant, ()),
        block_size=BLOCK if variant == "glm5_fp8" else None,
        progress=False,
        **options,
    )
    return params, specs, tensors


def assert_equal(params, specs, tensors, mesh, dtype):
    assert list(params) == list(specs)
    for name, spec in specs.items():
        want = expected(spec, tensors, dtype)
        assert params[name].dtype == want.dtype, name
        assert params[name].sharding.is_equivalent_to(NamedSharding(mesh, spec.spec), len(spec.shape)), name
        np.testing.assert_array_equal(bits(params[name]), bits(want), err_msg=name)


@pytest.mark.parametrize(
    ("variant", "tp", "dcp", "dtype", "only"),
    [
        ("glm5", 1, 1, np.float32, ()),
        ("glm52", 8, 2, bfloat16, ()),
        ("dsv32", 2, 2, np.float32, ()),
        ("glm5_fp8", 8, 4, np.float32, ()),
        ("glm5_fp8", 1, 1, bfloat16, SOME),
        pytest.param("glm5_fp8", 2, 1, np.float32, SOME, marks=pytest.mark.quick),
    ],
)
def test_parameters_hold_the_checkpoint_bit_for_bit(variant, tp, dcp, dtype, only):
    mesh = make_mesh(tp=tp, dcp=dcp)
    for form in ("single", "sharded"):
        if (ORACLE / variant / form).is_dir():
            params, specs, tensors = load_oracle(variant, form, mesh, dtype, only)
            assert_equal(params, specs, tensors, mesh, dtype)


def test_the_cases_pad_split_and_cut_blocks():
    tensors = read_tensors(ORACLE / "glm5_fp8" / "single")
    specs = specs_for(tensors, 8, LAYERS["glm5_fp8"])
    assert specs["lm_head.weight"].shape == (200, 160)  # 199 rows stored
    assert specs["mlp.experts.up_proj.weight"].shape[:2] == (2, 8)  # 4 experts stored
    rows = specs["self_attn.q_b_proj.weight"].shape[1]
    assert rows // 8 % 128 and rows > 128  # A rank's rows begin inside a block, and there are several blocks.


def test_one_tensor_at_a_time_gives_the_same():
    mesh = make_mesh(tp=8, dcp=2)
    params, specs, tensors = load_oracle("glm5_fp8", "single", mesh, np.float32, SOME, max_bytes_in_flight=1000)
    assert_equal(params, specs, tensors, mesh, np.float32)


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto])
def test_a_mesh_of_the_user_with_data_ranks(axis_type):
    mesh = jax.make_mesh((2, 2, 2), AXES, axis_types=(axis_type,) * 3)
    with jax.set_mesh(mesh):
        params, specs, tensors = load_oracle("glm5_fp8", "single", mesh, np.float32, SOME)
    assert_equal(params, specs, tensors, mesh, np.float32)


def test_a_mesh_over_some_of_the_devices():
    mesh = make_mesh(tp=2, devices=jax.devices()[5:7])
    params, specs, tensors = load_oracle("glm5_fp8", "single", mesh, bfloat16, SOME)
    assert_equal(params, specs, tensors, mesh, bfloat16)


def test_experts_split_over_one_axis_and_their_rows_over_the_other(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {f"e{e}": rng.normal(size=(6, 5)).astype(bfloat16) for e in range(5)}
    write_file(tmp_path / "model.safetensors", tensors)
    sources = tuple(Source(f"e{e}", (6, 5), (e,)) for e in (3, 1, 0, 4, 2))
    specs = {"w": ParamSpec((8, 8, 5), None, PartitionSpec("qsplit", "dcp"), sources)}
    mesh = make_mesh(tp=8, dcp=2)
    params = load_safetensors(tmp_path, specs, mesh, jnp.float32, progress=False)
    assert_equal(params, specs, tensors, mesh, np.float32)
    specs = {"w": ParamSpec((8, 6, 5), None, PartitionSpec("dcp", "qsplit"), sources)}
    mesh = make_mesh(tp=4, dcp=2)
    params = load_safetensors(tmp_path, specs, mesh, jnp.float32, progress=False)
    assert_equal(params, specs, tensors, mesh, np.float32)


def test_values_are_cast_and_special_values_kept(tmp_path):
    tensors = {
        "wide": np.array([1 + 2**-8, 1 + 2**-7 + 2**-8, -0.0, 1e-40, np.inf, -np.inf], np.float32),
        "half": np.array([65504.0, 2**-24, -0.0, np.nan], np.float16),
        "scalar": np.array(3.5, bfloat16),
    }
    write_file(tmp_path / "model.safetensors", tensors)
    specs = {n: ParamSpec(t.shape, None, PartitionSpec(), (Source(n, t.shape),)) for n, t in tensors.items()}
    params = load_safetensors(tmp_path, specs, make_mesh(), bfloat16, progress=False)
    assert_equal(params, specs, tensors, make_mesh(), bfloat16)


def test_links_of_a_download_cache_are_followed(tmp_path):
    (tmp_path / "blobs").mkdir()
    write_file(tmp_path / "blobs" / "abc", {"w": np.ones(3, np.float32)})
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "model.safetensors").symlink_to(tmp_path / "blobs" / "abc")
    specs = {"w": ParamSpec((3,), None, PartitionSpec(), (Source("w", (3,)),))}
    params = load_safetensors(tmp_path / "snapshot", specs, make_mesh(), jnp.float32, progress=False)
    np.testing.assert_array_equal(params["w"], 1)


def test_compiled_programs_do_not_grow_with_the_tensors(tmp_path):
    """37 layers of 16 experts, which fill no whole number of calls, need as many programs as 2 layers of 8."""
    counts = []
    compiles = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: compiles.append(event) if event.endswith("backend_compile_duration") else None
    )
    mesh = make_mesh(tp=8, dcp=8)
    for layers, experts in ((2, 8), (37, 16)):
        folder = tmp_path / str(layers)
        folder.mkdir()
        tensors = {f"{i}.{e}": np.full((8, 4), i * 16 + e, np.float32) for i in range(layers) for e in range(experts)}
        write_file(folder / "model.safetensors", tensors)
        sources = tuple(Source(f"{i}.{e}", (8, 4), (i, e)) for i in range(layers) for e in range(experts))
        spec = ParamSpec((layers, experts, 8, 4), None, PartitionSpec(None, TP_AXES), sources)
        compiles.clear()
        params = load_safetensors(folder, {"w": spec}, mesh, jnp.bfloat16, progress=False)
        counts.append(len(compiles))
        assert_equal(params, {"w": spec}, tensors, mesh, bfloat16)
    assert 0 < counts[1] == counts[0] <= 4, counts


def test_progress_is_shown_on_stderr_in_bytes(tmp_path, capsys):
    write_file(tmp_path / "model.safetensors", {"w": np.ones(2048, np.float32)})
    specs = {"w": ParamSpec((2048,), None, PartitionSpec(), (Source("w", (2048,)),))}
    load_safetensors(tmp_path, specs, make_mesh(), jnp.float32)
    out, err = capsys.readouterr()
    assert not out
    assert "loading: 100%" in err and "8.00k/8.00k" in err


@pytest.mark.parametrize(
    ("shape", "spec", "sources", "message"),
    [
        ((6,), PartitionSpec(TP_AXES), (Source("w", (6,)),), "not divisible"),
        ((8,), PartitionSpec(), (Source("w", (9,)),), "does not fit"),
        ((2, 8), PartitionSpec(), (Source("w", (8,), (2,)),), "does not fit"),
        ((2, 8), PartitionSpec(), (Source("w", (8,), (0,)), Source("v", (8,), (0,))), "the same part"),
        ((2, 8), PartitionSpec(), (Source("w", (8,), (0,)), Source("w", (8,), (1,))), "more than once"),
        ((8,), PartitionSpec(), (), "no source"),
    ],
)
def test_a_declaration_that_contradicts_itself_is_refused(tmp_path, shape, spec, sources, message):
    names = {source.name: source.shape for source in sources}
    write_file(tmp_path / "model.safetensors", {n: np.zeros(s, np.float32) for n, s in (names or {"w": (8,)}).items()})
    with pytest.raises(ValueError, match=message):
        load_safetensors(
            tmp_path, {"p": ParamSpec(shape, None, spec, sources)}, make_mesh(tp=8), jnp.float32, ignored=["*"]
        )


def test_a_dtype_that_is_not_floating_point_is_refused(tmp_path):
    write_file(tmp_path / "model.safetensors", {"w": np.ones(3, np.float32)})
    specs = {"w": ParamSpec((3,), None, PartitionSpec(), (Source("w", (3,)),))}
    with pytest.raises(ValueError, match="int8"):
        load_safetensors(tmp_path, specs, make_mesh(), jnp.int8, progress=False)


def test_a_mesh_of_other_axes_is_refused(tmp_path):
    with pytest.raises(ValueError, match="axes"):
        load_safetensors(tmp_path, {}, Mesh(np.array(jax.devices()), ("x",)), jnp.float32)
