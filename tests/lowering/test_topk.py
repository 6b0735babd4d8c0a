"""The Hopper top-k compiles for the real shapes without spills, on the oldest and the newest supported jax."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels.topk import mosaic_blocks, topk
from pallas_kernels.topk.arg_specs import SPECS, TopkSpec
from tests.lowering.topology import assert_fits, compile_for, require_cuda_plugin, target_mesh

pytestmark = [pytest.mark.aot, require_cuda_plugin]


def _arguments(spec):
    scores = jax.ShapeDtypeStruct((spec.rows, spec.columns), jnp.float32)
    bound = jax.ShapeDtypeStruct((spec.rows,), jnp.int32)
    return scores, bound, bound


def _call(spec, return_scores):
    def call(scores, start, end):
        return topk(scores, spec.k, start, end, return_scores=return_scores, implementation="mosaic_hopper")

    return call


@pytest.mark.parametrize("return_scores", [False, True])
@pytest.mark.parametrize("name", [name for name in SPECS if name != "decode_1m"])
def test_fits_without_spills(name, return_scores):
    spec = SPECS[name]
    check(compile_for("sm_90a", _call(spec, return_scores), *_arguments(spec)), kernels=1)


def test_slices_and_their_merge_fit_without_spills():
    spec = SPECS["decode_1m"]
    check(compile_for("sm_90a", _call(spec, True), *_arguments(spec)), kernels=2)


def check(compiled, kernels):
    assert_fits(compiled, kernels=kernels)
    for kernel in compiled.kernels:
        assert kernel.registers <= 128
        assert ".ftz" not in kernel.ptx  # denormals are ordinary scores
        assert "cp.async.bulk.shared::cluster.global" in kernel.ptx


@pytest.mark.parametrize("rows", [1024, 4096])
def test_from_block_maxima(rows):
    scores, bound, _ = _arguments(TopkSpec(rows, 1 << 20, 2048))
    maxima = jax.ShapeDtypeStruct((rows, 1 << 16), jnp.float32)
    compiled = compile_for(
        "sm_90a", lambda x, m, start, end: mosaic_blocks.topk(x, m, 2048, start, end), scores, maxima, bound, bound
    )
    check(compiled, kernels=1)


@pytest.mark.parametrize("k", [1, 64, 1000])
def test_other_k(k):
    spec = SPECS["tile_128k"]
    compiled = compile_for("sm_90a", functools.partial(topk, k=k, implementation="mosaic_hopper"), _arguments(spec)[0])
    assert_fits(compiled)


def test_compiles_inside_shard_map():
    mesh, rows = target_mesh("sm_90a", (8,)), PartitionSpec("x")
    spec = SPECS["glm_v32_128k"]
    arguments = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, rows)) for x in _arguments(spec)]
    call = jax.shard_map(_call(spec, True), mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)
    assert_fits(compile_for("sm_90a", call, *arguments))
