"""Synthetic checkpoints look like published ones to the loader, which reads them within its budget of memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsa_jax.api import from_pretrained
from dsa_jax.safetensors_headers import read_headers
from scripts.make_synthetic_checkpoint import write_synthetic
from sharding.mesh import make_mesh
from tests.support import FIXTURES, ORACLE

MIB = 2**20
BUDGET = 48 * MIB
SMALL = ORACLE / "glm5_fp8" / "single"

SCRIPT = """
import json, resource, sys
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
import jax.numpy as jnp
from dsa_jax.checkpoint import load_safetensors
from dsa_jax.config import ModelConfig
from dsa_jax.fp8_weights import fp8_candidates, fp8_parameters, published_fp8
from dsa_jax.model import abstract_model, parameter_specs
from sharding.mesh import make_mesh

mesh, options = make_mesh(tp=8), dict(progress=False, max_bytes_in_flight=int(sys.argv[3]), block_size=(128, 128))

def load(folder):
    config = ModelConfig.from_folder(folder)
    model = abstract_model(config, mesh)
    kept = fp8_parameters(fp8_candidates(model), parameter_specs(model), published_fp8)
    return load_safetensors(folder, parameter_specs(abstract_model(config, mesh, kept)), mesh, jnp.bfloat16, **options)

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

load(sys.argv[1])
before = peak()
params = load(sys.argv[2])
held = sum(s.data.nbytes for x in params.values() for s in x.addressable_shards)
print(json.dumps({"beyond": peak() - before - held, "held": held}))
"""


def test_same_tensors_as_a_real_one(tmp_path):
    """Names, shapes and dtypes of the files that torch wrote for this configuration."""
    raw = json.loads((SMALL / "config.json").read_text())
    write_synthetic(raw, tmp_path / "out", file_bytes=200_000)
    got, want = (
        {h.name: (h.dtype, h.shape) for h in read_headers(folder).values()} for folder in (tmp_path / "out", SMALL)
    )
    assert got == want
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3


NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["*self_attn*"]}


@pytest.mark.parametrize("changes", [{}, {"quantization_config": NVFP4, "moe_intermediate_size": 48}])
def test_filled_with_finite_values(tmp_path, changes):
    """What is loaded is random, finite, and of the size that models are initialised with; NVFP4 likewise."""
    raw = json.loads((SMALL / "config.json").read_text()) | changes
    write_synthetic(raw, tmp_path / "out", fill=True)
    model = from_pretrained(tmp_path / "out", make_mesh(), jnp.float32, weights="dequantized")
    assert ("U8" in {h.dtype for h in read_headers(tmp_path / "out").values()}) == bool(changes)
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        values = np.asarray(variable[...])
        assert np.isfinite(values).all() and 1e-3 < np.abs(values).mean() < 0.1, path


def test_holes_take_no_room(tmp_path):
    """Three dense layers and a layer with 256 experts of GLM-5.2."""
    raw = json.loads((FIXTURES / "configs" / "glm-5.2-fp8.json").read_text())
    total = write_synthetic(raw, tmp_path / "out", layers=4)
    files = list((tmp_path / "out").iterdir())
    assert sum(file.stat().st_size for file in files) > total > 13e9
    assert sum(os.stat(file).st_blocks * 512 for file in files) < 10e6
    with pytest.raises(ValueError, match="layers must be from 1 to 78"):
        write_synthetic(raw, tmp_path / "other", layers=79)


def test_host_memory_is_bounded(tmp_path):
    """On CPU devices the parameters are host memory too: what counts is the peak beyond them."""
    raw = json.loads((SMALL / "config.json").read_text())
    raw |= {"hidden_size": 1024, "moe_intermediate_size": 512, "n_routed_experts": 32, "num_attention_heads": 8}
    raw |= {"num_key_value_heads": 8, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0}
    for layers in (2, 7):
        write_synthetic({**raw, "num_hidden_layers": layers}, tmp_path / f"{layers}", fill=True)
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "2"), str(tmp_path / "7"), str(BUDGET)]
    # glibc keeps what threads free for later use. Blocks this large go back at once: the peak is what was in use.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "500000"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["held"] > 6 * BUDGET
    assert result["beyond"] < 1.5 * BUDGET, f"{result['beyond'] / MIB:.0f} MiB beyond the parameters"
