"""Every test runs on 8 virtual CPU devices with strict promotion, unless it asks for a GPU with `-m gpu`."""

import gc
import pathlib
import sys

import jax
import pytest

# Each program that XLA compiles for CPUs maps memory a few times, and Linux gives a process 65530 mappings: beyond them
# the compiler dies of a segmentation fault. One worker of the suite compiles enough for that.
MAPPINGS = pathlib.Path("/proc/self/maps")
MAX_MAPPINGS = 20_000


def pytest_configure(config):
    """Set up jax before any test module touches a device."""
    on_gpu = config.getoption("-m", default="") == "gpu"
    if not on_gpu:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture(autouse=True, scope="module")
def drop_programs():
    """Let go of compiled programs behind a module that leaves many."""
    yield
    if MAPPINGS.exists() and MAPPINGS.read_bytes().count(b"\n") > MAX_MAPPINGS:
        if "dsa_jax.step" in sys.modules:
            sys.modules["dsa_jax.step"]._compile.cache_clear()
        jax.clear_caches()
        gc.collect()
