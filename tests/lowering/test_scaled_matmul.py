"""The block-scaled FP8 product's Hopper kernel compiles for real shapes without spilling, and is right interpreted."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels.scaled_matmul import grouped_scaled_matmul, mosaic_hopper, mosaic_inline, scaled_matmul
from pallas_kernels.scaled_matmul.arg_specs import ARG_SPECS
from tests.kernels.scaled_matmul_cases import make
from tests.lowering.topology import assert_fits, compile_for, require_cuda_plugin, target_mesh

aot = [pytest.mark.aot, require_cuda_plugin]


class TestCompiled:
    pytestmark = aot

    @pytest.mark.parametrize("spec", ARG_SPECS, ids=lambda spec: spec.name)
    def test_fits_without_spills(self, spec, capsys):
        op = scaled_matmul if spec.groups is None else grouped_scaled_matmul
        compiled = compile_for("sm_90a", functools.partial(op, implementation="mosaic_hopper"), *spec.shapes().values())
        assert_fits(compiled)
        kernel = compiled.kernels[0]
        products = kernel.ptx.count("wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3")
        assert products == 4 * mosaic_hopper.default_config(spec.columns).halves
        # One FMA an element and block, from the two halves of a warpgroup's rows.
        assert kernel.ptx.count("fma.rn.f32") == products // 4 * 64
        with capsys.disabled():
            print(f"\n{spec.name}: {kernel.registers} registers, {kernel.smem} bytes of shared memory")

    @pytest.mark.parametrize(
        "config", [mosaic_hopper.Config(warpgroups=w, halves=h) for w, h in ((1, 1), (2, 1), (3, 1), (1, 2))]
    )
    def test_other_tiles_fit_too(self, config):
        spec = next(spec for spec in ARG_SPECS if spec.groups)
        arguments = [*spec.shapes().values(), jax.ShapeDtypeStruct((), jnp.int32)]
        run = functools.partial(mosaic_hopper.grouped_scaled_matmul, out_dtype=jnp.float32, config=config)
        assert_fits(compile_for("sm_90a", run, *arguments))

    def test_compiles_inside_shard_map(self):
        mesh, rows, whole = target_mesh("sm_90a", (8,)), PartitionSpec("x"), PartitionSpec()
        specs = (rows, PartitionSpec(None, "x"), whole, whole)
        arguments = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
            for x, spec in zip(ARG_SPECS[0].shapes().values(), specs, strict=True)
        ]
        run = functools.partial(scaled_matmul, implementation="mosaic_hopper")
        split = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=rows, check_vma=False)
        assert_fits(compile_for("sm_90a", split, *arguments))


def _races_found() -> bool:
    """Whether the interpreter saw a race; jax 0.12 raises at once, 0.11 makes a note."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    return bool(gpu_callbacks.get_races().races_found)


class TestInterpreted:
    @pytest.fixture(autouse=True)
    def _clean_interpreter(self):
        yield
        state = pytest.importorskip("jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks")
        state.reset_gpu_interpret_mode_state()

    @pytest.mark.parametrize(
        ("sizes", "columns", "contracted", "rows", "config", "dtype"),
        [
            # Groups that begin inside a tile of 8, an empty one, rows of none behind; two halves.
            ([5, 0, 62, 8], 256, 256, 90, mosaic_hopper.Config(warpgroups=1, stages=2, ctas=2), jnp.float32),
            # Two warpgroups, a partial block of columns, more blocks of K than stages.
            ([130], 136, 384, None, mosaic_hopper.Config(halves=1, stages=2, ctas=3), jnp.bfloat16),
        ],
    )
    def test_equals_float64_without_races(self, sizes, columns, contracted, rows, config, dtype):
        product = make(sizes, columns, contracted, rows=rows)
        got = mosaic_hopper.grouped_scaled_matmul(
            *map(jnp.asarray, product.arrays()),
            jnp.int32(0),
            out_dtype=dtype,
            config=config,
            interpret=plgpu.InterpretGPUParams(detect_races=True),
        )
        assert got.shape == (len(product.x), columns)
        assert product.error(got) < (1e-6 if dtype == jnp.float32 else 2e-3)
        assert not _races_found()


class TestSchedule:
    """The list of tiles holds every row of every group once, in tiles of that group that begin at a multiple of 8."""

    @pytest.mark.parametrize("seed", range(6))
    def test_every_row_once(self, seed):
        rng = np.random.default_rng(seed)
        rows, tile_rows, groups = 1000, 64, int(rng.integers(1, 40))
        sizes = np.where(rng.random(groups) < 0.3, 0, rng.integers(0, 2 * rows // groups + 2, groups))
        while sizes.sum() > rows:
            sizes[np.argmax(sizes)] //= 2
        tiles, count = map(np.asarray, mosaic_hopper.schedule(jnp.asarray(sizes, jnp.int32), rows, tile_rows))
        assert count[0] <= len(tiles)
        owner, ends = np.full(rows, -1), np.cumsum(sizes)
        for group, row0, first, last in tiles[: count[0]]:
            assert row0 % 8 == 0 and (first, last) == (ends[group] - sizes[group], ends[group])
            covered = np.arange(max(row0, first), min(row0 + tile_rows, last))
            assert covered.size and (owner[covered] == -1).all()
            owner[covered] = group
        np.testing.assert_array_equal(owner[: ends[-1]], np.repeat(np.arange(groups), sizes))
        assert (owner[ends[-1] :] == -1).all()

    def test_many_small_groups_fit_the_list(self):
        """The bound is met by groups that begin at the last row of a tile of 8."""
        sizes = np.full(100, 10)
        tiles, count = mosaic_hopper.schedule(jnp.asarray(sizes, jnp.int32), 1000, 16)
        assert int(count[0]) <= len(tiles)


class _Lanes:
    """The operations of `transpose_in_quad` on NumPy vectors of 32 lanes."""

    @staticmethod
    def bit(lane, distance):
        return lane & distance != 0

    @staticmethod
    def select(condition, yes, no):
        return np.where(condition, yes, no)

    @staticmethod
    def exchange(word, distance):
        return word[np.arange(32) ^ distance]


def test_lanes_trade_words():
    """Lane i of four ends with word i of each of them, in order: 8 neighbouring columns."""
    lane = np.arange(32)
    words = [100 * lane + t for t in range(4)]
    got = mosaic_inline.transpose_in_quad(words, lane, _Lanes)
    for i, word in enumerate(got):
        np.testing.assert_array_equal(word, 100 * (lane // 4 * 4 + i) + lane % 4)


def test_wrong_configurations_are_refused():
    for change in ({"warpgroups": 4}, {"halves": 3}, {"stages": 1}):
        name = next(iter(change))
        with pytest.raises(ValueError, match=f"self.{name}={change[name]}"):
            mosaic_hopper.Config(**change)
