"""The indexer's Hopper kernel compiles for the real shapes without spilling, and is right in the interpreter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels.lightning_indexer import lightning_indexer, mosaic_hopper, reference
from pallas_kernels.lightning_indexer.arg_specs import ARG_SPECS
from tests.lowering.topology import assert_fits, compile_for, require_cuda_plugin, target_mesh

aot = [pytest.mark.aot, require_cuda_plugin]
KERNEL = functools.partial(lightning_indexer, implementation="mosaic_hopper")


class TestCompiled:
    pytestmark = aot

    @pytest.mark.parametrize("spec", ARG_SPECS, ids=lambda spec: spec.name)
    def test_fits_without_spills(self, spec):
        arguments = spec.shapes()
        scale = {"k_scale": arguments.pop("k_scale")} if spec.scaled else {}
        score = functools.partial(KERNEL, clean_logits=False)
        if scale:
            compiled = compile_for(
                "sm_90a", lambda *args: score(*args[:-1], k_scale=args[-1]), *arguments.values(), *scale.values()
            )
        else:
            compiled = compile_for("sm_90a", score, *arguments.values())
        assert_fits(compiled)
        assert "wgmma.mma_async" in compiled.kernels[0].ptx

    @pytest.mark.parametrize("clean", [True, False])
    def test_fits_with_block_max(self, clean):
        arguments = ARG_SPECS[1].shapes().values()

        def score(*args):
            return mosaic_hopper.lightning_indexer(*args[:-1], k_scale=args[-1], clean_logits=clean, block_max=True)

        assert_fits(compile_for("sm_90a", score, *arguments))

    def test_compiles_inside_shard_map(self):
        mesh = target_mesh("sm_90a", (8,))
        rows, whole = PartitionSpec("x"), PartitionSpec()
        specs = (rows, whole, rows, rows, rows)
        shapes = list(ARG_SPECS[2].shapes().values())
        arguments = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
            for x, spec in zip(shapes, specs, strict=True)
        ]
        score = jax.shard_map(KERNEL, mesh=mesh, in_specs=specs, out_specs=rows, check_vma=False)
        assert_fits(compile_for("sm_90a", score, *arguments))


def _inputs(rows, keys, heads, dim, dtype, seed):
    rng = np.random.default_rng(seed)
    start = rng.integers(0, keys // 2, rows)
    end = start + rng.integers(0, keys // 2, rows)
    end[::7] = start[::7]  # rows that see nothing
    return (
        jnp.asarray(rng.normal(size=(rows, heads, dim)), dtype),
        jnp.asarray(rng.normal(size=(keys, dim)), dtype).at[keys // 3].set(jnp.asarray(jnp.nan, dtype)),
        jnp.asarray(rng.normal(size=(rows, heads)), jnp.float32),
        jnp.asarray(start, jnp.int32),
        jnp.asarray(end, jnp.int32),
        jnp.asarray(rng.uniform(0.5, 1.5, keys), jnp.float32),
    )


class TestInterpreted:
    @pytest.fixture(autouse=True)
    def _clean_interpreter(self):
        yield
        plgpu_state = pytest.importorskip("jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks")
        plgpu_state.reset_gpu_interpret_mode_state()

    @pytest.mark.parametrize(
        ("rows", "keys", "heads", "dim", "dtype", "warpgroups", "turns"),
        [(70, 150, 2, 64, jnp.float8_e4m3fn, 2, False), (10, 70, 3, 128, jnp.bfloat16, 2, True)],
    )
    def test_matches_the_reference_without_races(self, rows, keys, heads, dim, dtype, warpgroups, turns):
        *operands, scale = _inputs(rows, keys, heads, dim, dtype, seed=0)
        config = mosaic_hopper.Config(
            warpgroups=warpgroups, keys=32, k_stages=1 if turns else 2, q_stages=2, ctas=2, turns=turns
        )
        got, highest = mosaic_hopper.lightning_indexer(
            *operands,
            k_scale=scale,
            block_max=True,
            config=config,
            interpret=plgpu.InterpretGPUParams(detect_races=True),
        )
        want = np.asarray(reference.lightning_indexer(*operands, k_scale=scale))
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6 * np.abs(want[np.isfinite(want)]).max())
        numbers = np.where(np.isnan(got), -np.inf, got)
        padded = np.pad(numbers, ((0, 0), (0, -keys % 16)), constant_values=-np.inf)
        np.testing.assert_array_equal(highest, padded.reshape(rows, -1, 16).max(axis=2))
        assert not _races_found()


def _races_found() -> bool:
    """Whether the interpreter saw a race; jax 0.12 raises at once, 0.11 makes a note."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    return bool(gpu_callbacks.get_races().races_found)


class TestSchedule:
    """The work lists hold every needed tile once, every other tile once, and no CTA more than its share."""

    @pytest.mark.parametrize("rows", [1, 64, 300])
    def test_every_tile_once(self, rows):
        keys, config = 5000, mosaic_hopper.Config(warpgroups=2, keys=32, ctas=7)
        rng = np.random.default_rng(rows)
        start = rng.integers(0, keys, rows)
        end = np.where(rng.random(rows) < 0.3, 0, np.minimum(keys, start + rng.integers(0, 2000, rows)))
        blocks, shares = map(
            np.asarray, mosaic_hopper.schedule(jnp.asarray(start, jnp.int32), jnp.asarray(end, jnp.int32), keys, config)
        )
        tiles = -(-keys // config.tile_keys)
        needed = np.zeros((len(blocks), tiles), bool)
        for row in range(rows):
            if end[row] > start[row]:
                first, last = start[row] // config.tile_keys, -(-end[row] // config.tile_keys)
                seen = needed[row // 64]
                filled = np.flatnonzero(seen)
                lowest = min(first, filled[0]) if filled.size else first
                highest = max(last, filled[-1] + 1) if filled.size else last
                seen[lowest:highest] = True
        for column, wanted in ((0, needed), (4, ~needed)):
            count = np.zeros_like(wanted, int)
            sizes = []
            for share in shares[:, column : column + 4]:
                size = 0
                for block in range(share[2], share[3]):
                    first, last, before = blocks[block]
                    if column:
                        first, last, before, edge, gap = (
                            0,
                            tiles - (last - first),
                            block * tiles - before,
                            first,
                            last - first,
                        )
                    for t in range(first + max(0, share[0] - before), min(last, first + share[1] - before)):
                        count[block, t + gap if column and t >= edge else t] += 1
                        size += 1
                sizes.append(size)
            np.testing.assert_array_equal(count, wanted)
            assert max(sizes) - min(sizes) <= 1
