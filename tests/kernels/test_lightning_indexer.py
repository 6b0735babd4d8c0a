"""The reference of the indexer's scores against its contract, and what the operation refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.lightning_indexer import lightning_indexer, reference
from tests.kernels.base_lightning_indexer import LightningIndexerCases
from tests.kernels.index_inputs import make


class TestReference(LightningIndexerCases):
    implementation = "reference"


@pytest.mark.gpu
class TestReferenceOnGpu(LightningIndexerCases):
    implementation = "reference"


def test_reference_tiles_rows(monkeypatch):
    inputs = make("integers", rows=11, heads=4, keys=40)

    def score(rows_of_a_tile):
        monkeypatch.setattr(reference, "WORKSPACE_BYTES", rows_of_a_tile * reference.bytes_per_row(4, 40))
        return jax.jit(lambda *x: reference.lightning_indexer(*x, k_scale=inputs.k_scale))(*inputs.arrays())

    for tile in (1, 3, 4, 10):
        np.testing.assert_array_equal(score(tile), score(11))


def test_reference_holds_a_bounded_part_of_the_products(monkeypatch):
    monkeypatch.setattr(reference, "WORKSPACE_BYTES", 1 << 20)
    shape = jax.ShapeDtypeStruct
    heads, keys = 32, 1000
    for rows in (64, 512):
        operands = shape((rows, heads, 64), np.float32), shape((keys, 64), np.float32), shape((rows, heads), np.float32)
        ranges = shape((rows,), np.int32), shape((rows,), np.int32)
        compiled = jax.jit(lambda *x: reference.lightning_indexer(*x)).lower(*operands, *ranges).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < 1 << 20
        assert 4 * rows * heads * keys > 4 << 20  # all products at once would not fit


GOOD = make("integers", rows=2, heads=3, keys=5)


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("q", GOOD.q.tolist(), "q must be an array, got list"),
        ("q", GOOD.q[0], r"q must have shape \[T, Hi, D\], got \[3, 32\]"),
        ("q", GOOD.q.astype(np.float16), "q must have dtype float32, bfloat16, float8_e4m3fn, got float16"),
        ("q", GOOD.q.astype(np.int8), "q must have dtype float32, bfloat16, float8_e4m3fn, got int8"),
        ("q", GOOD.q[:, :0], r"q must have heads and columns, got shape \[2, 0, 32\]"),
        ("q", GOOD.q[:, :, :0], r"q must have heads and columns, got shape \[2, 3, 0\]"),
        ("k", GOOD.k[:, :16], r"k must have shape \[S, 32\], got \[5, 16\]"),
        ("k", GOOD.k[None], r"k must have shape \[S, 32\], got \[1, 5, 32\]"),
        ("k", GOOD.k.astype(jnp.bfloat16), "q and k must have one dtype, got float32 and bfloat16"),
        ("weights", GOOD.weights[:, :2], r"weights must have shape \[2, 3\], got \[2, 2\]"),
        ("weights", GOOD.weights.astype(jnp.bfloat16), "weights must have dtype float32, got bfloat16"),
        ("weights", None, "weights must be an array, got NoneType"),
        ("key_start", np.zeros(3, np.int32), r"key_start must have shape \[2\], got \[3\]"),
        ("key_start", np.zeros(2, np.int64), "key_start must have dtype int32, got int64"),
        ("key_end", np.zeros(2, np.uint32), "key_end must have dtype int32, got uint32"),
        ("key_end", 5, "key_end must be an array, got int"),
        ("k_scale", np.ones(4, np.float32), r"k_scale must have shape \[5\], got \[4\]"),
        ("k_scale", np.ones(5, np.float64), "k_scale must have dtype float32, got float64"),
        ("k_scale", np.ones((5, 1), np.float32), r"k_scale must have shape \[5\], got \[5, 1\]"),
        ("implementation", "mosaic", r"implementation='mosaic' is not one of \["),
    ],
)
def test_bad_arguments_are_named(argument, value, message):
    call = dict(zip(("q", "k", "weights", "key_start", "key_end"), GOOD.arrays(), strict=True)) | {argument: value}
    with pytest.raises(ValueError, match=f"^lightning_indexer: {message}"):
        lightning_indexer(**call)
