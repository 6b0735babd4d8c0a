"""Attention split by rows gives what attention split by heads gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from dsa_jax.testing import users_mesh
from pallas_kernels.sparse_mla import sparse_mla
from sharding.dcp_attention import dcp_sparse_mla, owned_slots, project_values
from sharding.mesh import DCP, QSPLIT, TP_AXES
from sharding.token_split import token_split
from tests.sharding.harness import (
    BATCH,
    attend,
    attention,
    collectives,
    i32,
    on_every_rank,
    run_on_every_rank,
)

LATENT, SCALE = 6, 0.3
OPTIONS = {"softmax_scale": SCALE, "kv_lora_rank": LATENT}


def gathered(qsplit, dcp, *, tile=None, project=False, axis_type=AxisType.Auto):
    """Token split over the whole of TP, every rank with all records."""
    case = attention()
    records = np.concatenate([*case.records, np.full((3, 8), np.nan, np.float32)])
    starts = np.concatenate([[0], np.cumsum(BATCH.seq_lens)])
    slots = np.where(case.ids < 0, -1, case.ids + starts[np.maximum(BATCH.requests, 0)][:, None])
    args = (case.q, records, i32(slots), case.value_up if project else None)

    def local(q, kv, slots, value_up):
        def rows(q, slots):
            out, lse = sparse_mla(q, kv, slots, **OPTIONS)
            if value_up is not None:
                out = project_values(out, jax.lax.all_gather(value_up, TP_AXES, axis=0, tiled=True))
            return out, lse

        return token_split(q, rows, slots, tile=tile)

    return local, users_mesh(1, qsplit, dcp, axis_type), (P(None, TP_AXES), P(), P(), P(TP_AXES)), args


def stock(qsplit, dcp, *, tile=None, project=False, axis_type=AxisType.Auto):
    """Token split over "qsplit", each rank with the records that it holds."""
    case = attention()
    kv = BATCH.deal(case.records, dcp, 4, rows=184).reshape(-1, 8)
    args = (case.q, kv, i32(case.ids), i32(BATCH.requests), BATCH.layout(dcp, 4), case.value_up if project else None)

    def local(q, kv, ids, requests, layout, value_up):
        slots = owned_slots(ids, requests, layout, jax.lax.axis_index(DCP), interleave=4)
        if value_up is not None:
            value_up = jax.lax.all_gather(value_up, QSPLIT, axis=0, tiled=True)

        def rows(q, slots):
            return dcp_sparse_mla(q, kv, *slots, value_up=value_up, **OPTIONS)

        return token_split(q, rows, slots, axes=(QSPLIT,), tile=tile)

    specs = (P(None, TP_AXES), P(DCP), P(), P(), P(), P(TP_AXES))
    return local, users_mesh(1, qsplit, dcp, axis_type), specs, args


CASES = [
    (gathered, 1, 8, None, True, AxisType.Explicit),
    (gathered, 2, 4, 2, False, AxisType.Auto),
    (gathered, 8, 1, 3, False, AxisType.Explicit),
    (stock, 2, 4, None, False, AxisType.Explicit),
    (stock, 4, 2, 4, True, AxisType.Auto),
    (stock, 1, 8, 2, False, AxisType.Auto),
]


@pytest.mark.parametrize(("make", "qsplit", "dcp", "tile", "project", "axis_type"), CASES)
def test_equals_one_device(make, qsplit, dcp, tile, project, axis_type):
    program = make(qsplit, dcp, tile=tile, project=project, axis_type=axis_type)
    out, lse = run_on_every_rank(*program, check_vma=tile != 2)
    expected, expected_lse = attend(project)
    out = np.moveaxis(out, 0, 1).reshape(expected.shape)
    lse = np.moveaxis(lse, 0, 1).reshape(expected_lse.shape)
    np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6, atol=1e-6)


def test_queries_and_outputs_go_each_way_once():
    rows = -(-BATCH.rows // 8)
    moved = collectives(*on_every_rank(*gathered(2, 4)))
    assert moved == sorted(("all-to-all", f"f32[8,{rows},1{width}]") for width in ("", ",6", ",8"))
    assert {name for name, _ in collectives(*on_every_rank(*gathered(1, 1)))} == set()


@pytest.mark.parametrize(
    ("tile", "expected"), [(2, [0, 0, 1, 1, 2, 2, 3, 3, 0, 0]), (None, [0, 0, 0, 1, 1, 1, 2, 2, 2, 3])]
)
def test_rows_are_dealt_round_robin_by_tiles(tile, expected):
    def local(q, rows):
        return token_split(q, lambda q, _: jnp.broadcast_to(jax.lax.axis_index(TP_AXES), q.shape), rows, tile=tile)

    args = (np.zeros((10, 4), np.float32), i32(np.arange(10)))
    out = run_on_every_rank(local, users_mesh(1, 2, 2), (P(None, TP_AXES), P()), args)
    assert out.shape == (4, 10, 1)
    assert out[..., 0].tolist() == [expected] * 4


def test_rows_that_are_added_hold_nothing():
    mesh = users_mesh(1, 1, 4)

    def local(q, rows):
        held = []
        token_split(q, lambda q, rows: held.append(rows) or q, rows)
        return held[0]

    out = run_on_every_rank(local, mesh, (P(None, TP_AXES), P()), (np.zeros((6, 4), np.float32), i32(np.arange(6))))
    assert out.ravel().tolist() == [0, 1, 2, 3, 4, 5, -1, -1]


def test_tile_is_checked():
    program = gathered(1, 8, tile=0)
    with pytest.raises(ValueError, match="tile must be positive, got tile=0"):
        run_on_every_rank(*program)
