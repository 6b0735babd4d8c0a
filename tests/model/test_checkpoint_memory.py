"""Host memory while a checkpoint is loaded and converted stays far below its size."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tests.model.checkpoint_cases import write_sharded

LAYERS, ROWS, COLUMNS = 40, 2048, 2048  # 8 MiB a layer, 320 MiB in all.
MIB = 2**20
BUDGET = 48 * MIB

SCRIPT = """
import json, resource, sys
from pathlib import Path
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from dsa_jax.checkpoint import convert, load_safetensors
from dsa_jax.params import ParamSpec, Source
from sharding.mesh import TP_AXES, make_mesh

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

def specs(layers):
    sources = tuple(Source(f"w{i}", (2048, 2048), (i,)) for i in range(layers))
    return {"w": ParamSpec((layers, 2048, 2048), None, PartitionSpec(None, TP_AXES), sources)}

what, folder, budget = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
mesh = make_mesh(tp=8)
options = dict(ignored=["*"], progress=False, max_bytes_in_flight=budget)
if what == "load":
    load = lambda layers: load_safetensors(folder, specs(layers), mesh, jnp.bfloat16, **options)
    load(2)
    before = peak()
    params = load(40)
    right = all((np.asarray(params["w"][i, ::512, ::512]) == i).all() for i in range(40))
    size = params["w"].nbytes
else:
    convert(folder, folder / "warm", specs(2), mesh, jnp.bfloat16, **options)
    before = peak()
    convert(folder, folder / "out", specs(40), mesh, jnp.bfloat16, **options)
    right, size = True, 0
print(json.dumps({"beyond": peak() - before - size, "right": right}))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("large")
    files: dict = {}
    for i in range(LAYERS):
        tensors = files.setdefault(f"model-{i // 20}.safetensors", {})
        tensors[f"w{i}"] = np.broadcast_to(np.asarray(i, ml_dtypes.bfloat16), (ROWS, COLUMNS))
    write_sharded(folder, files)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("what", ["load", "convert"])
def test_host_memory_is_bounded(checkpoint, what):
    """On CPU devices the parameters are host memory too: what counts is the peak beyond them."""
    command = [sys.executable, "-c", SCRIPT, what, str(checkpoint), str(BUDGET)]
    # glibc keeps what threads free for later use. Blocks this large go back at once: the peak is what was in use.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "500000"}
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["right"]
    assert 1.5 * BUDGET < LAYERS * ROWS * COLUMNS * 2 / 4
    assert result["beyond"] < 1.5 * BUDGET, f"{result['beyond'] / MIB:.0f} MiB beyond the parameters"
