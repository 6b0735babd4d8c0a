"""The schedule of the Hopper kernel in the Mosaic interpreter, with race detection."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.sparse_mla import mosaic_plain, reference

LATENT, WIDTH, SCALE = 128, 192, 192**-0.5


@pytest.fixture(autouse=True)
def _clean_interpreter():
    """A kernel that fails leaves its barriers behind, and the next kernel would fail too."""
    yield
    gpu_callbacks.reset_gpu_interpret_mode_state()


@pytest.mark.parametrize(("heads", "blocks", "tiles"), [(16, 4, 1), (64, 1, 1)])
def test_equals_the_reference_without_races(heads, blocks, tiles):
    rng = np.random.default_rng(blocks)
    keys, tokens = 200, tiles * 64 // heads
    q = jnp.asarray(rng.standard_normal((tokens, heads, WIDTH)), jnp.bfloat16)
    kv = jnp.asarray(rng.standard_normal((keys, WIDTH)), jnp.bfloat16)
    ids = np.stack([rng.permutation(np.pad(np.arange(keys), (0, 320)))[: blocks * 64] for _ in range(tiles)])
    ids[:, 5::17] = keys  # entries that are no row
    ids[0, :64] = keys  # a first block without a valid key
    members = rng.integers(0, 1 << (64 // heads), ids.shape)
    members[0] &= ~1  # the first token selects nothing
    run = mosaic_plain.build(tiles, blocks, heads, LATENT, SCALE, plgpu.InterpretGPUParams(detect_races=True))
    padded = jnp.concatenate([kv, jnp.zeros((1, WIDTH), jnp.bfloat16)])
    live = np.where(ids < keys, members, 0)
    out, lse = run(padded, jnp.asarray(ids, jnp.int32), jnp.asarray(live, jnp.int32), q.reshape(-1, WIDTH))

    group = 64 // heads
    own = np.stack([np.where(live[t // group] >> (t % group) & 1, ids[t // group], -1) for t in range(tokens)])
    want, want_lse = reference.sparse_mla(
        q,
        kv,
        jnp.asarray(own, jnp.int32),
        softmax_scale=SCALE,
        kv_lora_rank=LATENT,
        num_valid=None,
        kv_format=None,
        out_dtype=jnp.dtype(jnp.float32),
        workspace_bytes=1 << 30,
    )
    np.testing.assert_allclose(lse.reshape(tokens, heads), want_lse, atol=1e-4)
    np.testing.assert_allclose(out.reshape(tokens, heads, LATENT).astype(jnp.float32), want, atol=3e-2, rtol=3e-2)
    assert np.isneginf(want_lse[0]).all() and (np.asarray(out, np.float32)[:heads] == 0).all()
