"""Cases of block-scaled FP8 products at the shapes of GLM-5.2 and DeepSeek-V3.2, beside DeepGEMM and the bf16 way.

Each shape runs three times: the kernel, with DeepGEMM as its peer; the weight dequantised and multiplied in bfloat16,
as the model does by default; and the quantisation of the rows, which the kernel needs before it.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench_case import Case, Peer  # pyright: ignore[reportMissingImports]

from dsa_jax.fp8_weights import scale_whole_blocks
from dsa_jax.layers.grouped_matmul import grouped_matmul
from pallas_kernels.scaled_matmul import grouped_scaled_matmul, quantize_rows, reference, scaled_matmul
from pallas_kernels.scaled_matmul.arg_specs import ARG_SPECS, BLOCK, ArgSpec

# The tensor cores of Hopper accumulate e4m3 with fewer bits than float32 has; results are rounded to bfloat16.
TOLERANCE = 3e-3
# Rows and weights that the bf16 way does not quantise.
BF16_TOLERANCE = 1e-2
SAMPLE = 16  # rows that are compared with the reference


def group_sizes(spec: ArgSpec, seed: int = 0) -> np.ndarray:
    """Rows of each expert under random routing [G] int32."""
    assert spec.groups is not None
    rng = np.random.default_rng(seed)
    return rng.multinomial(spec.rows, np.full(spec.groups, 1 / spec.groups)).astype(np.int32)


def _inputs(spec: ArgSpec) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Rows in bfloat16, and the arguments of the product: rows and scales, weights and scales, sizes of groups."""
    groups, blocks = spec.groups or 1, (spec.groups or 1, -(-spec.columns // BLOCK), spec.contracted // BLOCK)
    seeds = jax.random.split(jax.random.key(0), 3)
    rows = jax.random.normal(seeds[0], (spec.rows, spec.contracted), jnp.bfloat16)
    weights = (100 * jax.random.normal(seeds[1], (groups, spec.columns, spec.contracted), jnp.bfloat16)).astype(
        jnp.float8_e4m3fn
    )
    scales = 2e-4 * (0.5 + jax.random.uniform(seeds[2], blocks))
    quantised = jax.jit(quantize_rows)(rows)
    if spec.groups is None:
        return rows, (*quantised, weights[0], scales[0])
    return rows, (*quantised, weights, scales, jnp.asarray(group_sizes(spec)))


def _expected(spec: ArgSpec, arguments) -> tuple[np.ndarray, np.ndarray]:
    """Some rows, and the reference's results for them [SAMPLE, N] float32, one row a call."""
    x, x_scale, weights, scales, *sizes = arguments
    chosen = np.unique(np.linspace(0, spec.rows - 1, min(SAMPLE, spec.rows)).astype(np.int64))
    owner = np.repeat(np.arange(spec.groups or 1), np.asarray(sizes[0])) if sizes else np.zeros(spec.rows, np.int64)
    results = []
    for row in chosen:
        weight, scale = (weights[owner[row]], scales[owner[row]]) if sizes else (weights, scales)
        one = slice(row, row + 1)
        results.append(reference.scaled_matmul(x[one], x_scale[:, one], weight, scale, out_dtype=jnp.float32))
    return chosen, np.concatenate(results)


def _error(out, spec: ArgSpec, arguments) -> float:
    rows, want = _expected(spec, arguments)
    got = np.asarray(out[jnp.asarray(rows.astype(np.int32))], np.float64)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want.astype(np.float64)))


def _deepgemm(spec: ArgSpec) -> Peer:
    import deep_gemm  # pyright: ignore[reportMissingImports]
    import torch  # pyright: ignore[reportMissingImports]

    torch.manual_seed(0)
    sizes = None if spec.groups is None else group_sizes(spec).astype(np.int64)
    # Its groups begin at multiples of 128 rows; rows between them are computed too.
    aligned = None if sizes is None else -(-sizes // BLOCK) * BLOCK
    rows = spec.rows if aligned is None else int(aligned.sum())
    make = functools.partial(torch.randn, device="cuda")
    x = make(rows, spec.contracted).to(torch.float8_e4m3fn)
    x_scale = deep_gemm.get_mn_major_tma_aligned_tensor(torch.rand(rows, spec.contracted // BLOCK, device="cuda") + 0.5)
    lead = () if spec.groups is None else (spec.groups,)
    weights = torch.empty(*lead, spec.columns, spec.contracted, dtype=torch.float8_e4m3fn, device="cuda")
    for weight in weights if lead else (weights,):
        weight.copy_(make(spec.columns, spec.contracted).to(torch.float8_e4m3fn))
    scales = torch.rand(*lead, -(-spec.columns // BLOCK), spec.contracted // BLOCK, device="cuda") + 0.5
    out = torch.empty(rows, spec.columns, dtype=torch.bfloat16, device="cuda")
    if aligned is None:
        name, arguments = "fp8_gemm_nt", ((x, x_scale), (weights, scales), out)
    else:
        owners = torch.repeat_interleave(torch.arange(len(aligned)), torch.as_tensor(aligned)).to(torch.int32).cuda()
        name, arguments = "m_grouped_fp8_gemm_nt_contiguous", ((x, x_scale), (weights, scales), out, owners)
    run = getattr(deep_gemm, name)
    return Peer(f"DeepGEMM {name}, {rows} rows", lambda: run(*arguments), torch.cuda.synchronize)


def _dequantised(spec: ArgSpec) -> Callable[..., jax.Array]:
    """What the model does by default: rows in bfloat16, the weight dequantised first."""
    block = (BLOCK, BLOCK)

    def dense(rows, weight, scale):
        pad = -weight.shape[0] % BLOCK  # whole blocks, which a partial one of kv_a needs here
        values = scale_whole_blocks(jnp.pad(weight, ((0, pad), (0, 0))), scale, block).astype(jnp.bfloat16)
        return jnp.einsum("mk,nk->mn", rows, values[: weight.shape[0]], preferred_element_type=jnp.bfloat16)

    def grouped(rows, weights, scales, sizes):
        return grouped_matmul(rows, weights, sizes, scale=scales, block=block)

    return dense if spec.groups is None else grouped


def _cases_of(spec: ArgSpec, with_peer: bool) -> Iterator[Case]:
    rows, arguments = _inputs(spec)
    op = scaled_matmul if spec.groups is None else grouped_scaled_matmul
    product = jax.jit(functools.partial(op, implementation="mosaic_hopper"))
    plain, quantise = jax.jit(_dequantised(spec)), jax.jit(quantize_rows)
    error = functools.partial(_error, spec=spec, arguments=arguments)
    flops = 2.0 * spec.rows * spec.columns * spec.contracted
    moved = float(sum(x.nbytes for x in arguments) + 2 * spec.rows * spec.columns)
    shape = f"{spec.name} M={spec.rows} N={spec.columns} K={spec.contracted} G={spec.groups or 1}"
    peer = functools.partial(_deepgemm, spec) if with_peer else None
    common: dict[str, Any] = {"flops": flops, "bytes": moved}
    yield Case(f"fp8 {shape}", lambda: product(*arguments), error, TOLERANCE, peer=peer, **common)
    yield Case(
        f"dequantised bf16 {shape}", lambda: plain(rows, *arguments[2:]), _versus_bf16(error), BF16_TOLERANCE, **common
    )
    yield Case(
        f"quantise rows {shape}",
        lambda: quantise(rows),
        lambda out: float(jnp.abs(out[1] - arguments[1]).max()),
        0.0,
        bytes=float(rows.nbytes + sum(x.nbytes for x in arguments[:2])),
    )


def _versus_bf16(error: Callable[[Any], float]) -> Callable[[Any], float]:
    """What the error exceeds the 2.6% by that quantised rows lose: the bf16 way does not quantise them."""
    return lambda out: max(0.0, error(out) - 0.028)


def cases(options) -> Iterator[Case]:
    """The cases, made one at a time so that only one holds memory; `--rows` and `--keys` do not apply."""
    for spec in ARG_SPECS:
        yield from _cases_of(spec, options.peers is not None)
