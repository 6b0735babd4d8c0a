"""Meshes of the axes ("data", "qsplit", "dcp"), with TP = qsplit * dcp and dcp minor."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

DATA, QSPLIT, DCP = "data", "qsplit", "dcp"
AXES = (DATA, QSPLIT, DCP)
TP_AXES = (QSPLIT, DCP)


def make_mesh(*, tp: int = 1, dcp: int = 1, data: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
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
    for name, size in (("tp", tp), ("dcp", dcp), ("data", data)):
        if size <= 0:
            raise ValueError(f"{name} must be positive, got {name}={size}")
    if tp % dcp:
        raise ValueError(f"{tp=} must be divisible by {dcp=}")
    devices = jax.devices() if devices is None else list(devices)
    if len(devices) < data * tp:
        raise ValueError(f"{data=} x {tp=} needs {data * tp} devices, found {len(devices)}")
    grid = np.array(devices[: data * tp], dtype=object).reshape(data, tp // dcp, dcp)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * 3)


def check_mesh(mesh: Mesh) -> None:
    """Raise ValueError unless `mesh` has the axes ("data", "qsplit", "dcp"); their types are free."""
    if not isinstance(mesh, Mesh):
        raise ValueError(f"mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}")
    if tuple(mesh.axis_names) != AXES:
        raise ValueError(f"mesh must have the axes {AXES}, got {tuple(mesh.axis_names)}")


def tp_size(mesh: Mesh) -> int:
    """Number of ranks that share heads and experts."""
    return mesh.shape[QSPLIT] * mesh.shape[DCP]
