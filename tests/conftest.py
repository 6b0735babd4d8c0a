"""Every test runs on 8 virtual CPU devices with strict promotion, unless it asks for a GPU with `-m gpu`."""

import jax


def pytest_configure(config):
    """Set up jax before any test module touches a device."""
    on_gpu = config.getoption("-m", default="") == "gpu"
    if not on_gpu:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_numpy_dtype_promotion", "strict")
