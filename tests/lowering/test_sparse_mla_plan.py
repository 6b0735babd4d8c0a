"""How calls of sparse MLA are cut, and what the Hopper kernel refuses."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import dispatch
from pallas_kernels.ckv_records import ckv_format
from pallas_kernels.sparse_mla import mosaic_hopper, plan, sparse_mla, union
from pallas_kernels.sparse_mla.tile_shape import TileShape


@pytest.mark.parametrize(
    ("heads", "padded"), [(1, 8), (8, 8), (9, 16), (24, 32), (32, 32), (33, 64), (64, 64), (65, 128), (192, 192)]
)
def test_padded_heads(heads, padded):
    assert plan.padded_heads(heads) == padded


@pytest.mark.parametrize(("heads", "group"), [(8, 8), (16, 4), (32, 2), (64, 1), (128, 1)])
def test_prefill_fills_the_tile_with_neighbouring_rows(heads, group):
    assert plan.choose_plan(4096, heads, 2048) == plan.Plan(group, 1, True)


@pytest.mark.parametrize("rows", [1, 2, 8, 64])
@pytest.mark.parametrize("heads", [8, 64, 128])
def test_decode_splits_keys_over_the_grid_but_starts_no_block_twice(rows, heads):
    chosen = plan.choose_plan(rows, heads, 2048)
    tiles = -(-rows // chosen.group) * max(1, heads // 64) * chosen.splits
    assert tiles <= mosaic_hopper.Config.blocks
    assert tiles > mosaic_hopper.Config.blocks // 4 or chosen.splits == 32


def test_eight_rows_of_the_selections_of_flash_fit_a_list():
    assert plan.choose_plan(4096, 8, 2051) == plan.Plan(8, 1, True)


def test_lists_that_exceed_shared_memory_shrink_the_group():
    chosen = plan.choose_plan(4096, 8, 4096)
    assert chosen.group * 4096 <= union.MAX_ENTRIES
    assert plan.choose_plan(4096, 64, 1 << 20) == plan.Plan(1, 1, False)


def test_a_group_needs_ordered_lists():
    with pytest.raises(ValueError, match="ordered"):
        plan.Plan(group=2, splits=1, ordered=False)


def test_union_refuses_a_group_of_nine():
    with pytest.raises(ValueError, match="group=9"):
        union.build(64, 16, 100, 9)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(score_registers=216), "536 registers"),
        (dict(record_registers=24), "528 registers"),
        (dict(query_columns=500), "multiple of 64"),
        (dict(query_columns=512), "below 512"),
        (dict(one_rope=True, scores_first=False), "one_rope needs scores_first"),
    ],
)
def test_config_refuses_what_cannot_be(change, reason):
    with pytest.raises(ValueError, match=reason):
        mosaic_hopper.Config(**change)


def test_config_must_fit_the_rows():
    rows = TileShape(64, 64, 1, 1, 64, 10, 1, False, 576)
    with pytest.raises(ValueError, match="packed=False does not fit"):
        mosaic_hopper.build(rows, 1.0, "bfloat16", mosaic_hopper.RECORDS_CONFIG)


def test_tile_shape_of_grouped_and_of_many_heads():
    grouped = TileShape(4096 * 16, 16, 4, 1024, 8192, 1000, 1, True, 576)
    assert (grouped.rows, grouped.tiles_per_list, grouped.tiles) == (64, 1, 1024)
    many = TileShape(100 * 128, 128, 1, 100, 2048, 1000, 4, False, 576)
    assert (many.rows, many.tiles_per_list, many.tiles) == (64, 2, 800)


def q_kv_ids(dtype=jnp.bfloat16, width=576, keys=16, k=4):
    return jnp.zeros((2, 8, width), dtype), jnp.zeros((keys, width), dtype), jnp.zeros((2, k), jnp.int32)


@pytest.mark.parametrize(
    ("args", "scale", "rank", "reason"),
    [
        (dict(dtype=jnp.float32), 1.0, 512, "float32"),
        (dict(width=640), 1.0, 512, "640"),
        (dict(), 1.0, 256, "256"),
        (dict(k=0), 1.0, 512, "not 0"),
        (dict(keys=0), 1.0, 512, "and 0"),
    ],
)
def test_explicit_choice_that_cannot_run_says_why(args, scale, rank, reason):
    q, kv, ids = q_kv_ids(**args)
    with pytest.raises(ValueError, match=f"mosaic_hopper.*{reason}"):
        sparse_mla(q, kv, ids, softmax_scale=scale, kv_lora_rank=rank, implementation="mosaic_hopper")


def records(name, rope=64, rows=16):
    fmt = ckv_format(name, kv_lora_rank=512, qk_rope_head_dim=rope, model_dtype=jnp.bfloat16)
    return fmt, jax.ShapeDtypeStruct((rows, fmt.record_width), fmt.dtype)


def traced(fmt, kv, implementation):
    """Text of the program that a Hopper GPU would get."""
    q, _, ids = q_kv_ids(width=fmt.width)

    def fn(kv):
        return sparse_mla(q, kv, ids, softmax_scale=1.0, kv_lora_rank=512, kv_format=fmt, implementation=implementation)

    with dispatch.compiling_for((9, 0)):
        return str(jax.make_jaxpr(fn)(kv))


@pytest.mark.parametrize("rope", [64, 0])
def test_packed_records_reach_the_kernel_by_its_name_only(rope):
    fmt, kv = records("fp8_ds_mla", rope)
    assert "Ref<gmem>" in traced(fmt, kv, "mosaic_hopper")
    assert "Ref<gmem>" not in traced(fmt, kv, None)


def test_plain_records_reach_the_kernel():
    fmt, kv = records("bf16")
    assert "Ref<gmem>" in traced(fmt, kv, None)


@pytest.mark.parametrize(("name", "reason"), [("nvfp4_ds_mla", "not of nvfp4_ds_mla"), ("float32", "not of float32")])
def test_records_that_the_kernel_cannot_read(name, reason):
    fmt, kv = records(name)
    with pytest.raises(ValueError, match=f"mosaic_hopper.*{reason}"):
        traced(fmt, kv, "mosaic_hopper")


def test_merge_of_splits_keeps_nan_and_empty_rows():
    out = jnp.asarray([[[[1.0]], [[jnp.nan]], [[0.0]]], [[[3.0]], [[1.0]], [[0.0]]]])  # [2, T=3, H=1, D=1]
    lse = jnp.asarray([[[0.0], [jnp.nan], [-jnp.inf]], [[0.0], [0.0], [-jnp.inf]]])
    merged, total = plan._merge(out, lse, jnp.dtype(jnp.float32))
    assert merged[0, 0, 0] == 2 and jnp.isnan(merged[1, 0, 0]) and merged[2, 0, 0] == 0
    assert jnp.allclose(total[0], jnp.log(2.0)) and total[2, 0] == -jnp.inf


def test_kernels_are_built_once():
    shape = TileShape(64, 64, 1, 1, 64, 10, 1, False, 576)
    config = mosaic_hopper.Config()
    assert mosaic_hopper.build(shape, 1.0, "bfloat16", config) is mosaic_hopper.build(shape, 1.0, "bfloat16", config)
    assert union.build(4, 64, 100, 4) is union.build(4, 64, 100, 4)


def test_long_calls_are_tiled_by_the_workspace():
    rows, k = 1000, 64
    spec = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731

    def fn(q, kv, ids):
        return sparse_mla(
            q,
            kv,
            ids,
            softmax_scale=1.0,
            kv_lora_rank=512,
            workspace_bytes=5 * k * 300,
            implementation="mosaic_hopper",
        )

    jaxpr = jax.make_jaxpr(fn)(
        spec((rows, 64, 576), jnp.bfloat16), spec((100, 576), jnp.bfloat16), spec((rows, k), jnp.int32)
    )
    assert "scan" in str(jaxpr), "rows run in tiles of 256"
    assert jaxpr.out_avals[0].shape == (rows, 64, 512)
