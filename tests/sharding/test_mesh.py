"""Meshes and groups of ranks."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from sharding.mesh import (
    AXES,
    DATA,
    DCP,
    QSPLIT,
    TP_AXES,
    check_mesh,
    dcp_groups,
    make_mesh,
    query_split_groups,
    tp_size,
    vary_like,
)

VECTORS = pathlib.Path(__file__).parents[1] / "fixtures" / "vectors"
GROUPS = json.loads((VECTORS / "groups.json").read_text())["cases"]


@pytest.mark.parametrize("case", GROUPS, ids=lambda c: f"tp{c['tp']}-dcp{c['dcp']}-data{c['data']}")
def test_groups_of_the_vectors(case):
    sizes = {name: case[name] for name in ("tp", "dcp", "data")}
    if "error" in case:
        for make in (make_mesh, dcp_groups, query_split_groups):
            with pytest.raises(ValueError, match=f"must be {case['error']}"):
                make(**sizes)
        return
    assert query_split_groups(**sizes) == case["query_split"]
    ranks = dcp_groups(**sizes)
    assert np.ravel(ranks).tolist() == list(range(case["tp"] * case["data"]))
    assert all(group == list(range(group[0], group[0] + case["dcp"])) for group in ranks)


def test_groups_never_cross_data():
    for group in query_split_groups(tp=8, dcp=4, data=2) + dcp_groups(tp=8, dcp=4, data=2):
        assert len({rank // 8 for rank in group}) == 1, group


@pytest.mark.parametrize("bad", [{"tp": 0}, {"tp": -8}, {"tp": 8, "data": 0}])
def test_sizes_must_be_positive(bad):
    with pytest.raises(ValueError, match="must be positive, got"):
        make_mesh(**bad)


def test_too_few_devices():
    with pytest.raises(ValueError, match="needs 16 devices, found 8"):
        make_mesh(tp=8, data=2)


def test_rank_is_q_times_dcp_plus_d():
    mesh = make_mesh(tp=4, dcp=2, data=2)
    assert mesh.axis_names == AXES
    assert tp_size(mesh) == 4
    ids = np.vectorize(lambda device: device.id)(mesh.devices)
    np.testing.assert_array_equal(ids, np.arange(8).reshape(2, 2, 2))


def test_devices_may_be_given_in_any_order():
    devices = jax.devices()[::-1]
    mesh = make_mesh(tp=8, dcp=2, devices=devices)
    assert mesh.devices.ravel().tolist() == devices


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_collectives_follow_the_groups_on_a_users_mesh(axis_type):
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), AXES, axis_types=(axis_type,) * 3)
    check_mesh(mesh)
    spec = P((DATA, *TP_AXES))
    ranks = jax.device_put(jnp.arange(8, dtype=jnp.int32), jax.NamedSharding(mesh, spec))

    def members(rank):
        gathered = [jax.lax.all_gather(rank, axis, tiled=True) for axis in (QSPLIT, DCP)]
        return tuple(g[None] for g in gathered)

    split, shards = jax.jit(jax.shard_map(members, mesh=mesh, in_specs=spec, out_specs=(spec, spec)))(ranks)
    for gathered, groups in ((split, query_split_groups), (shards, dcp_groups)):
        rows = np.asarray(gathered).tolist()
        for group in groups(tp=4, dcp=2, data=2):
            assert all(rows[rank] == group for rank in group)


def test_check_mesh_names_what_it_got():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("tp", "dcp"))
    with pytest.raises(ValueError, match=r"axes .*'qsplit'.* got \('tp', 'dcp'\)"):
        check_mesh(mesh)
    with pytest.raises(ValueError, match="got str"):
        check_mesh("data")


@pytest.mark.parametrize("check_vma", [True, False])
def test_vary_like_lets_a_loop_carry_what_a_collective_gives(check_vma):
    mesh = make_mesh(tp=8, dcp=4)

    def loop(x):
        buffer = vary_like(jnp.zeros((4, 3), x.dtype), x, axes=(DCP,))

        def body(i, buffer):
            return jax.lax.dynamic_update_slice(buffer, jax.lax.all_gather(x, DCP), (0, i))

        return jax.lax.fori_loop(0, 3, body, buffer)

    run = jax.shard_map(loop, mesh=mesh, in_specs=P(TP_AXES), out_specs=P(TP_AXES), check_vma=check_vma)
    out = np.asarray(jax.jit(run)(jnp.arange(8.0))).reshape(8, 4, 3)
    for rank in range(8):
        np.testing.assert_array_equal(out[rank], np.arange(4)[:, None] + rank // 4 * 4.0 + np.zeros(3))
