"""The helpers for other people's tests: what they accept, what they refuse, and what they say."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from dsa_jax.cache import CacheGeometry
from dsa_jax.prefill import Batch, PrefillResult
from dsa_jax.testing import (
    assert_same_prefill,
    assert_same_selections,
    mesh_shapes,
    place_model,
    selected_sets,
    tiny_model,
    use_virtual_devices,
    users_mesh,
)

IDS = np.array([[[4, 2, -1], [0, 7, 9]], [[1, -1, -1], [5, 6, 8]]])


def test_virtual_devices():
    """What is there already is accepted; another number comes too late and says so."""
    use_virtual_devices(8)
    with pytest.raises(RuntimeError, match=r"before use_virtual_devices\(4\) was called"):
        use_virtual_devices(4)
    assert len(jax.devices()) == 8


def test_meshes():
    """Every split of TP; axes of the type that was asked for."""
    assert mesh_shapes(8) == [(8, 1), (4, 2), (2, 4), (1, 8)] and mesh_shapes(6)[1] == (3, 2)
    mesh = users_mesh(2, 1, 4, AxisType.Explicit)
    assert dict(mesh.shape) == {"data": 2, "qsplit": 1, "dcp": 4} and set(mesh.axis_types) == {AxisType.Explicit}
    assert [device.id for device in mesh.devices.flat] == list(range(8))


def test_equal_selections_in_any_order_and_width():
    """Order and empty places do not matter."""
    other = np.array([[[-1, 4, -1, 2], [9, -1, 0, 7]], [[-1, -1, -1, 1], [8, 6, 5, -1]]], np.int32)
    assert_same_selections(IDS, jax.numpy.asarray(other))
    assert selected_sets(IDS[0]) == [{4, 2}, {0, 7, 9}]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ((1, 1, 0, 3), r"differ in 1 of 4 rows, first \[1, 1\]: missing \[5\], unexpected \[3\]"),
        ((0, 0, 2, 0), r"differ in 1 of 4 rows, first \[0, 0\]: unexpected \[0\]"),
        ((0, 1, 0, -1), r"differ in 1 of 4 rows, first \[0, 1\]: missing \[0\]"),
        ((0, 0, 2, 4), r"differ in 1 of 4 rows, first \[0, 0\]: not as often \[4\]"),
    ],
)
def test_first_row_that_differs_is_named(change, message):
    """One id changed, added, dropped or doubled."""
    *place, value = change
    got = IDS.copy()
    got[tuple(place)] = value
    with pytest.raises(AssertionError, match=message):
        assert_same_selections(got, IDS)
    with pytest.raises(AssertionError, match=r"rows \(2, 2\) are compared with \(2, 1\)"):
        assert_same_selections(IDS, IDS[:, :1])


def test_prefill_comparison():
    """Logits within a bound, selections exactly; the message names the request."""
    want = PrefillResult(None, [np.zeros((2, 5)), np.ones((1, 5))], [IDS, IDS[:, :1]])  # type: ignore[arg-type]
    assert_same_prefill(dataclasses.replace(want, logits=[x + 4e-5 for x in want.logits], selected=None), want)
    with pytest.raises(AssertionError, match="logits of request 1"):
        assert_same_prefill(dataclasses.replace(want, logits=[want.logits[0], want.logits[1] + 1e-3]), want)
    with pytest.raises(AssertionError, match=r"selections of request 0 \[layer, row\] differ in 4 of 4"):
        assert_same_prefill(dataclasses.replace(want, selected=[IDS + 1, IDS[:, :1]]), want)
    with pytest.raises(AssertionError, match="1 requests, not 2"):
        assert_same_prefill(dataclasses.replace(want, logits=want.logits[:1]), want)


def test_a_placed_model_computes_the_same():
    """From one device to four, whose padded vocabulary is another, and back."""
    model = tiny_model("glm5", users_mesh(1, 1, 1))
    prompt = [np.random.default_rng(0).integers(0, 256, 20).tolist()]

    def run(model):
        geometry = CacheGeometry.for_model(model.config, model.mesh, model.dtype, page_size=16)
        batch = Batch.from_prompts(prompt, model, geometry=geometry)
        return model.prefill(batch, batch.init_cache(model), logits="all", return_selected=True)

    there = place_model(model, users_mesh(1, 1, 8))
    want = run(model)
    assert_same_prefill(run(there), want)
    back = place_model(there, users_mesh(1, 1, 1))
    assert back.embed_tokens.shape == model.embed_tokens.shape != there.embed_tokens.shape
    np.testing.assert_array_equal(back.embed_tokens[...], model.embed_tokens[...])
