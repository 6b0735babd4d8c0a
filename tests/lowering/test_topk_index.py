"""The whole index_topk compiles for the real shapes within its workspace and without spills."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.index_topk import index_topk, mosaic_hopper
from tests.lowering.topology import assert_fits, compile_for, require_cuda_plugin

GIB = 1 << 30


@pytest.mark.aot
@require_cuda_plugin
@pytest.mark.parametrize(
    ("rows", "keys", "heads", "dtype"),
    [
        (4096, 131072, 32, jnp.float8_e4m3fn),
        (4096, 131072, 64, jnp.bfloat16),
        (4096, 1048576, 32, jnp.float8_e4m3fn),
        (333, 50001, 64, jnp.float8_e4m3fn),  # keys that no block path takes
    ],
)
def test_fits_the_workspace_without_spills(rows, keys, heads, dtype):
    def shape(*sizes, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(sizes, dtype)

    bound = shape(rows, dtype=jnp.int32)
    arguments = (
        shape(rows, heads, 128, dtype=dtype),
        shape(keys, 128, dtype=dtype),
        shape(rows, heads),
        bound,
        bound,
        shape(keys),
    )

    def call(q, k, weights, start, end, scale):
        return index_topk(q, k, weights, start, end, 2048, k_scale=scale, implementation="mosaic_hopper")

    compiled = compile_for("sm_90a", call, *arguments)
    assert_fits(compiled, kernels=len(compiled.kernels))
    assert len(compiled.kernels) >= 1
    # Beside the scores: copies of the queries, padded keys, ids.
    q_bytes = 2 * rows * heads * 128 * jnp.dtype(dtype).itemsize
    assert compiled.executable.memory_analysis().temp_size_in_bytes < 1.1 * GIB + q_bytes + 256 * keys


@pytest.mark.parametrize("keys", [1000, 131072, 1 << 20])
@pytest.mark.parametrize("rows", [1, 63, 64, 1000, 4096, 8191])
def test_tiles(rows, keys):
    workspace = GIB // 4
    tile = mosaic_hopper.tile_rows(rows, 4 * keys, workspace)
    assert 1 <= tile <= rows
    assert tile * 4 * keys <= workspace
    if tile < rows:
        assert tile % 64 == 0 or tile < 64
        assert -(-rows // tile) <= -(-rows // max(1, workspace // (4 * keys) // 64 * 64))


def test_block_maxima_only_where_they_help():
    assert not mosaic_hopper.uses_block_max(131072, 2048)
    assert mosaic_hopper.uses_block_max(1 << 20, 2048)
    assert not mosaic_hopper.uses_block_max((1 << 20) + 1, 2048)
