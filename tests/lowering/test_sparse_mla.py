"""Sparse MLA compiled for an H200 that is not there: shapes of the models, registers, spills, shared memory."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.ckv_records import ckv_format
from pallas_kernels.sparse_mla import mosaic_hopper, plan, union
from pallas_kernels.sparse_mla import sparse_mla as public_sparse_mla
from pallas_kernels.sparse_mla.arg_specs import BY_NAME, SPECS
from tests.lowering.topology import assert_fits, compile_for, require_cuda_plugin, target_mesh


def call(spec, out_dtype=jnp.bfloat16, records=False):
    fmt = None
    if records:
        fmt = ckv_format("fp8_ds_mla", kv_lora_rank=512, qk_rope_head_dim=spec.width - 512)

    def fn(q, kv, ids, num_valid):
        return public_sparse_mla(
            q,
            kv,
            ids,
            softmax_scale=spec.softmax_scale,
            kv_lora_rank=spec.kv_lora_rank,
            num_valid=num_valid,
            kv_format=fmt,
            out_dtype=out_dtype,
            implementation="mosaic_hopper",
        )

    args = (
        jax.ShapeDtypeStruct((spec.rows, spec.heads, spec.width), jnp.bfloat16),
        jax.ShapeDtypeStruct((spec.keys, fmt.record_width if fmt else spec.width), fmt.dtype if fmt else jnp.bfloat16),
        jax.ShapeDtypeStruct((spec.rows, spec.k), jnp.int32),
        jax.ShapeDtypeStruct((spec.rows,), jnp.int32),
    )
    return fn, args


def kernels_of(spec):
    return 1 + plan.choose_plan(spec.rows, spec.heads, spec.k).ordered


def assert_all_fit(compiled, most):
    """Lists of the same sizes are compiled once a process, so later calls report the attention alone."""
    assert 1 <= len(compiled.kernels) <= most
    assert_fits(compiled, kernels=len(compiled.kernels))


@pytest.mark.aot
@require_cuda_plugin
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_compiles_without_spills(spec):
    fn, args = call(spec)
    compiled = compile_for("sm_90a", fn, *args)
    assert_all_fit(compiled, kernels_of(spec))
    attention = compiled.kernels[-1]
    assert attention.registers == 168, "three warpgroups launch with 168 registers a thread"
    assert "wgmma" in attention.ptx and "cp.async.cg" in attention.ptx


@pytest.mark.aot
@require_cuda_plugin
@pytest.mark.parametrize(
    "name",
    [
        "deepseek_v32",
        "deepseek_v32_tp8",
        "glm5",
        "glm5_tp2",
        "glm5_tp8",
        "glm5_decode_1",
        "glm53_flash",
        "glm53_flash_tp8_decode_9",
    ],
)
def test_records_compile_without_spills(name):
    spec = BY_NAME[name]
    fn, args = call(spec, records=True)
    compiled = compile_for("sm_90a", fn, *args)
    assert_all_fit(compiled, kernels_of(spec))
    attention = compiled.kernels[-1]
    assert attention.registers == 128, "four warpgroups launch with 128 registers a thread"
    for word in ("wgmma", "cp.async.cg", "cvt.rn.f16x2.e4m3x2", "setmaxnreg.inc.sync.aligned.u32 152"):
        assert word in attention.ptx


@pytest.mark.aot
@require_cuda_plugin
@pytest.mark.parametrize("name", ["deepseek_v32", "deepseek_v32_tp8", "glm5"])
def test_one_slot_for_the_rope_compiles_without_spills(name):
    spec = BY_NAME[name]

    def fn(q, kv, ids, num_valid):
        return plan.sparse_mla(
            q,
            kv,
            ids,
            softmax_scale=spec.softmax_scale,
            num_valid=num_valid,
            out_dtype=jnp.dtype(jnp.bfloat16),
            workspace_bytes=1 << 30,
            config=mosaic_hopper.Config(one_rope=True),
        )

    compiled = compile_for("sm_90a", fn, *call(spec)[1])
    assert_all_fit(compiled, kernels_of(spec))
    assert compiled.kernels[-1].registers == 168


@pytest.mark.aot
@require_cuda_plugin
@pytest.mark.parametrize("out_dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("width", [512, 576])
def test_compiles_for_other_widths_and_outputs(width, out_dtype):
    spec = SPECS[2].__class__("other", 300, 64, keys=5000, k=200, width=width)
    fn, args = call(spec, out_dtype)
    assert_all_fit(compile_for("sm_90a", fn, *args), kernels_of(spec))


@pytest.mark.aot
@require_cuda_plugin
@pytest.mark.parametrize("keys", [1, 131072, 1 << 20])
def test_union_compiles_without_spills(keys):
    ids = jax.ShapeDtypeStruct((72 * 2048,), jnp.int32)
    lengths = jax.ShapeDtypeStruct((72,), jnp.int32)
    assert_fits(compile_for("sm_90a", union.build(72, 2048, keys, 8), ids, lengths))


@pytest.mark.aot
@require_cuda_plugin
def test_compiles_inside_shard_map():
    spec = SPECS[4]
    fn, args = call(spec)
    mesh = target_mesh(shape=(2,), names=("x",))
    sharded = jax.shard_map(
        fn,
        mesh=mesh,
        in_specs=(
            jax.P("x"),
            jax.P(),
            jax.P("x"),
            jax.P("x"),
        ),
        out_specs=jax.P("x"),
        check_vma=False,
    )
    specs = ("x", None, "x", "x")
    args = tuple(
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=jax.NamedSharding(mesh, jax.P(s)))
        for a, s in zip(args, specs, strict=True)
    )
    assert_all_fit(compile_for("sm_90a", sharded, *args), 2)


@pytest.mark.parametrize("spec", [SPECS[1], SPECS[6]], ids=lambda s: s.name)
def test_lowers_without_the_plugin(spec):
    fn, args = call(spec)
    text = jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu") >= kernels_of(spec)
