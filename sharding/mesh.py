"""Meshes of the axes ("data", "qsplit", "dcp"), with TP = qsplit * dcp and dcp minor."""

from collections.abc import Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

DATA, QSPLIT, DCP = "data", "qsplit", "dcp"
AXES = (DATA, QSPLIT, DCP)
TP_AXES = (QSPLIT, DCP)


def make_mesh(*, tp: int = 1, dcp: int = 1, data: int = 1, devices: Sequence[Any] | None = None) -> Mesh:
    """Mesh of `data * tp` devices whose TP rank t is `q * dcp + d`.

    Args:
      tp: Tensor-parallel size; heads and experts are split over it.
      dcp: Decode-context-parallel size; it reuses the ranks of TP, so it must divide `tp`.
      data: How many groups serve requests of their own.
      devices: At least `data * tp` devices in rank order; None means `jax.devices()`.

    Returns:
      A mesh with axes ("data", "qsplit", "dcp") of type Auto.

    Raises:
      ValueError: A size is not positive, `tp` is not divisible by `dcp`, or there are too few devices.
    """
    _check_sizes(tp, dcp, data)
    devices = jax.devices() if devices is None else list(devices)
    if len(devices) < data * tp:
        raise ValueError(f"{data=} x {tp=} needs {data * tp} devices, found {len(devices)}")
    ranks = rank_grid(tp=tp, dcp=dcp, data=data)
    grid = np.array(devices, dtype=object)[ranks]
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * 3)


def planning_mesh(*, tp: int = 1, dcp: int = 1, data: int = 1) -> Mesh:
    """A mesh without devices, for what asks for sizes only: shapes, shardings, decisions. Raises as `make_mesh`."""
    # It has all of a Mesh that such functions use, but is none in jax's types.
    return cast(Mesh, AbstractMesh(rank_grid(tp=tp, dcp=dcp, data=data).shape, AXES))


def rank_grid(*, tp: int, dcp: int = 1, data: int = 1) -> np.ndarray:
    """Global rank at each coordinate of the mesh [data, qsplit, dcp] int64; raises as `make_mesh`."""
    _check_sizes(tp, dcp, data)
    return np.arange(data * tp).reshape(data, tp // dcp, dcp)


def _check_sizes(tp: int, dcp: int, data: int) -> None:
    for name, size in (("tp", tp), ("dcp", dcp), ("data", data)):
        if size <= 0:
            raise ValueError(f"{name} must be positive, got {name}={size}")
    if tp % dcp:
        raise ValueError(f"{tp=} must be divisible by {dcp=}")


def dcp_groups(*, tp: int, dcp: int, data: int = 1) -> list[list[int]]:
    """Ranks that share the tokens of one cache: neighbours inside a TP row. Raises as `make_mesh`."""
    return rank_grid(tp=tp, dcp=dcp, data=data).reshape(-1, dcp).tolist()


def query_split_groups(*, tp: int, dcp: int, data: int = 1) -> list[list[int]]:
    """Ranks that hold the same tokens and may split the rows of the indexer; never across data. Raises as `make_mesh`.

    They are made from one TP row at a time: transposing the list of all DCP groups would mix requests of different
    data replicas.
    """
    grid = rank_grid(tp=tp, dcp=dcp, data=data)
    return np.swapaxes(grid, 1, 2).reshape(-1, tp // dcp).tolist()


def check_mesh(mesh: Mesh) -> None:
    """Raise ValueError unless `mesh` has the axes ("data", "qsplit", "dcp"), of any type, and a device of each process.

    A process without a device in the mesh could not take part in its collectives, so all processes raise. A
    `planning_mesh` has none and passes.
    """
    if not isinstance(mesh, (Mesh, AbstractMesh)):
        raise ValueError(f"mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}")
    if tuple(mesh.axis_names) != AXES:
        raise ValueError(f"mesh must have the axes {AXES}, got {tuple(mesh.axis_names)}")
    if isinstance(mesh, AbstractMesh):
        return
    processes = {device.process_index for device in mesh.devices.flat}
    if len(processes) < jax.process_count():
        raise ValueError(
            f"mesh of {mesh.size} devices is on processes {sorted(processes)} alone, there are {jax.process_count()}:"
            " every process needs a device in it"
        )


def tp_size(mesh: Mesh) -> int:
    """Number of ranks that share heads and experts."""
    return mesh.shape[QSPLIT] * mesh.shape[DCP]


def vary_like(x: jax.Array, *others: jax.Array, axes: Sequence[str] = ()) -> jax.Array:
    """`x`, typed inside `shard_map` as differing between ranks wherever `others` do and along `axes`.

    A loop must carry one type, and a buffer of zeros is typed as equal on all ranks until a collective's result goes
    in. Moves no data, and does nothing under `check_vma=False`.
    """
    wanted = frozenset(axes).union(*(_varying(other) for other in others))
    missing = tuple(sorted(wanted - _varying(x)))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def _varying(x: jax.Array) -> frozenset[str]:
    return frozenset(jax.typeof(x).manual_axis_type.varying)
