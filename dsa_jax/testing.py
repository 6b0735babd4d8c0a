"""What a test of sharded sparse attention needs: virtual devices, meshes, tiny models, and exact comparisons.

For tests of code that uses this library, and of the library itself. It needs no test framework: the checks raise
`AssertionError`, and a fixture is a line around `mesh_shapes` or `users_mesh` (docs/testing.md has a whole example).
"""

import tempfile
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding

from dsa_jax.api import from_pretrained
from dsa_jax.fp8_weights import FP8
from dsa_jax.model import Model, abstract_model, fill_parameters, parameter_specs
from dsa_jax.prefill import PrefillResult
from dsa_jax.tiny import write_tiny
from sharding.mesh import AXES


def use_virtual_devices(count: int = 8) -> None:
    """Let jax run on `count` virtual CPU devices; call it before anything touches a device.

    Args:
      count: Number of devices.

    Raises:
      RuntimeError: jax has started already, with other devices.
    """
    wrong = f"jax started before use_virtual_devices({count}) was called: call it first, as in a conftest.py"
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as error:
        raise RuntimeError(wrong) from error
    if len(jax.devices()) != count or jax.default_backend() != "cpu":
        raise RuntimeError(f"{wrong}; it has {len(jax.devices())} devices of {jax.default_backend()!r}")


def mesh_shapes(tp: int = 8) -> list[tuple[int, int]]:
    """Every (qsplit, dcp) with `qsplit * dcp == tp`: all ways to share a cache out over `tp` ranks."""
    return [(tp // dcp, dcp) for dcp in range(1, tp + 1) if tp % dcp == 0]


def users_mesh(data: int, qsplit: int, dcp: int, axis_type: AxisType = AxisType.Auto) -> Mesh:
    """A mesh of the first devices as a user makes it, without `make_mesh`.

    Args:
      data: Size of the axis "data".
      qsplit: Size of the axis "qsplit".
      dcp: Size of the axis "dcp".
      axis_type: Type of the three axes; `make_mesh` makes Auto ones.
    """
    devices = np.array(jax.devices()[: data * qsplit * dcp]).reshape(data, qsplit, dcp)
    return Mesh(devices, AXES, axis_types=(axis_type,) * 3)


def tiny_model(
    family: str, mesh: Mesh, *, seed: int = 0, dtype: jax.typing.DTypeLike = np.float32, folder: Path | None = None
) -> Model:
    """A tiny random model with the structure of a published family, see `dsa_jax.tiny.write_tiny`.

    Args:
      family: "glm5", "glm52", "dsv32" or "glm53_flash".
      mesh: Mesh to load it onto; it has 8 heads, so TP is at most 8.
      seed: Seed of the weights.
      dtype: float32 or bfloat16. Selections of two programs are exactly equal in float32 only.
      folder: Where to leave the checkpoint; it must not exist or be empty. None leaves nothing behind.

    Raises:
      ValueError: The family is unknown, or the model does not fit the mesh.
    """
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "checkpoint" if folder is None else folder
        write_tiny(path, family, seed)
        return jax.block_until_ready(from_pretrained(path, mesh, dtype))


def place_model(model: Model, mesh: Mesh) -> Model:
    """The same weights on another mesh, through the host; faster than loading a checkpoint again.

    Args:
      model: A model on any mesh.
      mesh: Where the copy goes.

    Raises:
      ValueError: The heads do not divide by the mesh's TP size.
    """
    flat = {".".join(map(str, path)): value for path, value in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    kept = frozenset(name for name, value in flat.items() if value.dtype == FP8)
    target = abstract_model(model.config, mesh, kept)

    def place(name, spec):
        array = np.asarray(flat[name][...])
        # Padding depends on the TP size: what the other mesh added goes, what this one needs comes.
        array = array[tuple(slice(size) for size in spec.shape)]
        array = np.pad(array, [(0, padded - size) for padded, size in zip(spec.shape, array.shape, strict=True)])
        return jax.device_put(array, NamedSharding(mesh, spec.spec))

    return fill_parameters(target, {name: place(name, spec) for name, spec in parameter_specs(target).items()})


def selected_sets(topk_indices: np.ndarray | jax.Array) -> list[frozenset[int]]:
    """The ids of each row [rows, K] as a set, without the -1 of empty places."""
    return [frozenset(row[row >= 0].tolist()) for row in np.asarray(topk_indices)]


def assert_same_selections(got: np.ndarray | jax.Array, want: np.ndarray | jax.Array, what: str = "selections") -> None:
    """Raise AssertionError unless every row holds the same ids, each as often, in any order.

    Args:
      got: Ids [..., rows, K] integers, -1 for none.
      want: Ids [..., rows, K2], likewise; K2 may differ from K.
      what: What is compared, for the message.

    Raises:
      AssertionError: They differ. The message names the first row that does, and how.
    """
    got, want = (np.sort(np.where(x < 0, -1, x).astype(np.int64), axis=-1) for x in map(np.asarray, (got, want)))
    assert got.shape[:-1] == want.shape[:-1], f"{what}: rows {got.shape[:-1]} are compared with {want.shape[:-1]}"
    width = max(got.shape[-1], want.shape[-1])
    # Empty places sort to the front, so that both end alike.
    padded = [np.pad(x, [*[(0, 0)] * (x.ndim - 1), (width - x.shape[-1], 0)], constant_values=-1) for x in (got, want)]
    differ = np.any(padded[0] != padded[1], axis=-1)
    if not differ.any():
        return
    first = tuple(int(i) for i in np.argwhere(differ)[0])
    ours, theirs = (row[row >= 0].tolist() for row in (got[first], want[first]))
    found = {
        "missing": sorted(set(theirs) - set(ours)),
        "unexpected": sorted(set(ours) - set(theirs)),
        "not as often": sorted(i for i in set(ours) & set(theirs) if ours.count(i) != theirs.count(i)),
    }
    details = ", ".join(f"{name} {ids}" for name, ids in found.items() if ids)
    raise AssertionError(f"{what} differ in {int(differ.sum())} of {differ.size} rows, first {list(first)}: {details}")


def assert_same_prefill(got: PrefillResult, want: PrefillResult, *, atol: float = 5e-5) -> None:
    """Raise AssertionError unless two prefills of the same prompts agree.

    Args:
      got: What is tested.
      want: What it should be, such as the result of one device.
      atol: Most that a logit may differ. Selections, where both have them, must be equal exactly.

    Raises:
      AssertionError: They differ; the message names the request.
    """
    assert len(got.logits) == len(want.logits), f"{len(got.logits)} requests, not {len(want.logits)}"
    for request, (ours, theirs) in enumerate(zip(got.logits, want.logits, strict=True)):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=atol, err_msg=f"logits of request {request}")
    if got.selected is None or want.selected is None:
        return
    for request, (ours, theirs) in enumerate(zip(got.selected, want.selected, strict=True)):
        assert_same_selections(ours, theirs, f"selections of request {request} [layer, row]")
