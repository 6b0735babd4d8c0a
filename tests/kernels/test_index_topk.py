"""The reference of scoring with selection against its contract, and what the operation refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.index_topk import index_topk
from pallas_kernels.lightning_indexer.reference import bytes_per_row
from tests.kernels.base_index_topk import IndexTopkCases
from tests.kernels.index_inputs import make


class TestReference(IndexTopkCases):
    implementation = "reference"


@pytest.mark.gpu
class TestReferenceOnGpu(IndexTopkCases):
    implementation = "reference"


@pytest.mark.parametrize(("heads", "dtype"), [(1, "bfloat16"), (32, "float32")])
def test_memory_is_bounded_by_the_workspace_whatever_the_size(heads, dtype):
    workspace, dim = 1 << 21, 64
    shape = jax.ShapeDtypeStruct
    for rows, keys in ((256, 2048), (1024, 2048), (256, 6000), (1024, 6000)):
        q, k = shape((rows, heads, dim), dtype), shape((keys, dim), dtype)
        ranges = shape((rows,), np.int32), shape((rows,), np.int32)

        def select(*operands):
            return index_topk(*operands, 64, workspace_bytes=workspace, implementation="reference")

        compiled = jax.jit(select).lower(q, k, shape((rows, heads), np.float32), *ranges).compile()
        converted = 0 if dtype == "float32" else 4 * keys * dim
        assert compiled.memory_analysis().temp_size_in_bytes <= workspace + converted
        assert rows * bytes_per_row(heads, keys) > 2 * workspace  # does not fit untiled


GOOD = make("integers", rows=2, heads=3, keys=5)


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("q", GOOD.q[0], r"q must have shape \[T, Hi, D\], got \[3, 32\]"),
        ("k", GOOD.k.astype(jnp.bfloat16), "q and k must have one dtype, got float32 and bfloat16"),
        ("weights", GOOD.weights.astype(np.float64), "weights must have dtype float32, got float64"),
        ("key_start", np.zeros(2, np.int64), "key_start must have dtype int32, got int64"),
        ("key_end", np.zeros(1, np.int32), r"key_end must have shape \[2\], got \[1\]"),
        ("k_scale", np.ones(2, np.float32), r"k_scale must have shape \[5\], got \[2\]"),
        ("top_k", 0, "top_k must be a positive int, got 0"),
        ("top_k", 2048.0, "top_k must be a positive int, got 2048.0"),
        ("top_k", "2048", "top_k must be a positive int, got '2048'"),
        ("workspace_bytes", 0, "workspace_bytes must be a positive int, got 0"),
        ("workspace_bytes", 1e9, "workspace_bytes must be a positive int, got 1000000000.0"),
        ("implementation", "cuda", r"implementation='cuda' is not one of \["),
    ],
)
def test_bad_arguments_are_named(argument, value, message):
    call = dict(zip(("q", "k", "weights", "key_start", "key_end"), GOOD.arrays(), strict=True))
    with pytest.raises(ValueError, match=f"^index_topk: {message}"):
        index_topk(**(call | {"top_k": 3, argument: value}))


def test_traced_top_k_is_refused_with_a_way_out():
    with pytest.raises(ValueError, match=r"index_topk: top_k must be static, got the traced value .*static_argnames"):
        jax.jit(index_topk)(*GOOD.arrays(), 3)
