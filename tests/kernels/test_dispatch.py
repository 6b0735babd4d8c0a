"""Choice of an implementation and the words of the argument checks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import checks, dispatch


def no(reason):
    return lambda: reason


def test_the_first_that_supports_call_and_device_is_taken():
    yes = dispatch.always
    table = {"fast": (yes, no("no GPU")), "medium": (no("k is odd"), yes), "slow": (yes, yes), "slower": (yes, yes)}
    assert dispatch.resolve("op", None, table) == "slow"
    assert dispatch.resolve("op", None, {"fast": (yes, yes)} | table) == "slow"
    assert dispatch.resolve("op", None, table | {"fast": (yes, yes)}) == "fast"


def test_an_explicit_choice_is_taken_for_a_device_that_is_not_there():
    table = {"fast": (dispatch.always, no("no GPU")), "slow": (dispatch.always, dispatch.always)}
    assert dispatch.resolve("op", "fast", table) == "fast"


def test_an_explicit_choice_never_falls_back():
    table = {"fast": (no("k=3 is odd"), dispatch.always), "slow": (dispatch.always, dispatch.always)}
    with pytest.raises(ValueError, match="op: implementation='fast' cannot run this call: k=3 is odd"):
        dispatch.resolve("op", "fast", table)


def test_an_unknown_choice_lists_the_known():
    with pytest.raises(ValueError, match=r"op: implementation='x' is not one of \['a', 'b'\]"):
        dispatch.resolve("op", "x", {"b": (dispatch.always,) * 2, "a": (dispatch.always,) * 2})


def test_nothing_supports_the_call():
    table = {"fast": (no("k=3 is odd"), no("no GPU")), "slow": (no("too long"), dispatch.always)}
    with pytest.raises(ValueError, match="op: no implementation supports this call: fast: no GPU; slow: too long"):
        dispatch.resolve("op", None, table)


def test_compute_capability(monkeypatch):
    class Device:
        platform, compute_capability = "gpu", "9.0"

    monkeypatch.setattr(jax, "devices", lambda: [Device()])
    assert dispatch.gpu_compute_capability() == (9, 0)
    assert dispatch.needs_compute_capability(9)() is None
    assert "(9, 0) is not among major versions (8, 10)" in dispatch.needs_compute_capability(8, 10)()
    Device.compute_capability = "12.1"
    assert dispatch.gpu_compute_capability() == (12, 1)
    Device.platform = "cpu"
    assert dispatch.gpu_compute_capability() is None
    assert dispatch.needs_compute_capability(9)() == "the default device is no NVIDIA GPU"


def test_check_array_accepts_numpy_jax_tracers_and_shapes():
    for x in (np.zeros((2, 3), np.int32), jnp.zeros((2, 3), jnp.int32), jax.ShapeDtypeStruct((2, 3), jnp.int32)):
        checks.check_array("op", "x", x, (2, "K"), (jnp.int32,))
        checks.check_array("op", "x", x, ("T", 3))
    jax.eval_shape(lambda x: checks.check_array("op", "x", x, (2, "K"), (jnp.int32,)), jnp.zeros((2, 3), jnp.int32))


def test_checks_return_python_numbers():
    for value in (3, np.int64(3), np.uint8(3)):
        assert type(checks.check_positive("op", "k", value)) is int
    for value in (1, 0.5, np.float32(0.5), np.int64(2)):
        assert type(checks.check_positive_number("op", "scale", value)) is float
    assert checks.check_dtype("op", "d", "bfloat16", (jnp.float32, jnp.bfloat16)) == jnp.bfloat16


@pytest.mark.parametrize("value", [jnp.float32(0.5), "1", None, False, 1j, [1.0], np.inf, 0, -2])
def test_check_positive_number_refuses(value):
    with pytest.raises(ValueError, match="op: scale must be a positive finite number, got "):
        checks.check_positive_number("op", "scale", value)
