"""The reference of sparse MLA against its contract, and what the operation refuses."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.sparse_mla import sparse_mla
from tests.kernels import oracle
from tests.kernels.base_sparse_mla import SparseMlaCases, run_sparse_mla


class TestReference(SparseMlaCases):
    implementation = "reference"


class TestReferenceWithoutRope(SparseMlaCases):
    """GLM-5.3-Flash has no rotary part: the value is the whole row."""

    implementation = "reference"
    rank, rope = 32, 0
    axes: ClassVar = SparseMlaCases.axes | {"any_heads": (8,), "any_selected": (33,)}
    test_rope_counts_in_the_logits_and_not_in_the_output = None
    test_ids_that_float32_cannot_hold_at_offsets_above_two_gigabytes = None
    test_any_ids = None


@pytest.mark.gpu
class TestReferenceOnGpu(SparseMlaCases):
    implementation = "reference"


@pytest.mark.parametrize(("heads", "dtype"), [(8, "bfloat16"), (64, "float32")])
def test_memory_is_bounded_by_the_workspace_whatever_the_size(heads, dtype):
    workspace, rank, width, selected = 1 << 21, 64, 96, 64
    shape = jax.ShapeDtypeStruct

    def attend(*operands):
        return sparse_mla(
            *operands,
            softmax_scale=1.0,
            kv_lora_rank=rank,
            workspace_bytes=workspace,
            implementation="reference",
        )

    for rows, keys in ((256, 4096), (1024, 4096), (256, 10000), (1024, 10000)):
        operands = shape((rows, heads, width), dtype), shape((keys, width), dtype), shape((rows, selected), np.int32)
        compiled = jax.jit(attend).lower(*operands).compile()
        assert compiled.memory_analysis().temp_size_in_bytes <= workspace
        assert 4 * rows * selected * width > 2 * workspace  # the gathered rows do not fit untiled


def test_released_widths():
    rng = np.random.default_rng(0)
    q = rng.standard_normal((3, 8, 576), dtype=np.float32)
    kv = rng.standard_normal((500, 576), dtype=np.float32)
    ids = np.stack([rng.permutation(500)[:64] for _ in range(3)]).astype(np.int32)
    out, lse = run_sparse_mla(q, kv, ids, softmax_scale=192**-0.5, kv_lora_rank=512)
    want, want_lse = oracle.sparse_mla(q, kv, ids, scale=192**-0.5, rank=512)
    np.testing.assert_allclose(out, want, atol=1e-5)
    np.testing.assert_allclose(lse, want_lse, atol=1e-5)


def test_numpy_numbers_are_accepted():
    out, _ = sparse_mla(
        np.ones((2, 4, 8), np.float32),
        np.ones((5, 8), np.float32),
        np.zeros((2, 3), np.int32),
        softmax_scale=np.float64(0.5),
        kv_lora_rank=np.int64(6),
        num_valid=np.full(2, 3, np.int32),
        workspace_bytes=1,
    )
    assert isinstance(out, jax.Array)
    assert out.shape == (2, 4, 6)
    np.testing.assert_array_equal(out, np.ones((2, 4, 6)))


GOOD = dict(
    q=np.zeros((2, 4, 8), np.float32),
    kv=np.zeros((5, 8), np.float32),
    topk_indices=np.zeros((2, 3), np.int32),
    softmax_scale=0.5,
    kv_lora_rank=6,
)


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("q", [1.0], "q must be an array, got list"),
        ("q", GOOD["q"][0], r"q must have shape \[T, H, Dk\], got \[4, 8\]"),
        ("q", GOOD["q"].astype(np.float16), "q must have dtype float32, bfloat16, got float16"),
        ("q", GOOD["q"].astype(jnp.float8_e4m3fn), "q must have dtype float32, bfloat16, got float8_e4m3fn"),
        ("kv", GOOD["kv"][:, :7], r"kv must have shape \[N, 8\], got \[5, 7\]"),
        ("kv", GOOD["kv"][None], r"kv must have shape \[N, 8\], got \[1, 5, 8\]"),
        ("kv", GOOD["kv"].astype(jnp.bfloat16), "q and kv must have one dtype, got float32 and bfloat16"),
        ("kv", GOOD["kv"].astype(np.uint8), "kv must have dtype float32, bfloat16, got uint8"),
        ("topk_indices", np.zeros((2, 3), np.int64), "topk_indices must have dtype int32, got int64"),
        ("topk_indices", np.zeros((2, 3), np.float32), "topk_indices must have dtype int32, got float32"),
        ("topk_indices", np.zeros((3, 3), np.int32), r"topk_indices must have shape \[2, K\], got \[3, 3\]"),
        ("topk_indices", np.zeros((2, 1, 3), np.int32), r"topk_indices must have shape \[2, K\], got \[2, 1, 3\]"),
        ("softmax_scale", None, "softmax_scale must be a positive finite number, got None"),
        ("softmax_scale", 0.0, "softmax_scale must be a positive finite number, got 0.0"),
        ("softmax_scale", -0.1, "softmax_scale must be a positive finite number, got -0.1"),
        ("softmax_scale", float("nan"), "softmax_scale must be a positive finite number, got nan"),
        ("softmax_scale", float("inf"), "softmax_scale must be a positive finite number, got inf"),
        ("softmax_scale", "auto", "softmax_scale must be a positive finite number, got 'auto'"),
        ("softmax_scale", True, "softmax_scale must be a positive finite number, got True"),
        ("kv_lora_rank", 0, "kv_lora_rank must be a positive int, got 0"),
        ("kv_lora_rank", 6.0, "kv_lora_rank must be a positive int, got 6.0"),
        ("kv_lora_rank", 9, "kv_lora_rank=9 exceeds the width 8 of kv"),
        ("num_valid", 3, "num_valid must be an array, got int"),
        ("num_valid", np.zeros(3, np.int32), r"num_valid must have shape \[2\], got \[3\]"),
        ("num_valid", np.zeros(2, np.int64), "num_valid must have dtype int32, got int64"),
        ("out_dtype", "float16", "out_dtype must be one of float32, bfloat16, got float16"),
        ("out_dtype", np.int32, "out_dtype must be one of float32, bfloat16, got int32"),
        ("out_dtype", "half-ish", "out_dtype must be one of float32, bfloat16, got half-ish"),
        ("workspace_bytes", 0, "workspace_bytes must be a positive int, got 0"),
        ("workspace_bytes", None, "workspace_bytes must be a positive int, got None"),
        ("implementation", "flash", r"implementation='flash' is not one of \["),
    ],
)
def test_bad_arguments_are_named(argument, value, message):
    with pytest.raises(ValueError, match=f"^sparse_mla: {message}"):
        sparse_mla(**(GOOD | {argument: value}))


def test_traced_scale_is_refused_with_a_way_out():
    with pytest.raises(ValueError, match="sparse_mla: softmax_scale must be static, got the traced value"):
        jax.jit(lambda scale: sparse_mla(**(GOOD | {"softmax_scale": scale})))(0.5)
