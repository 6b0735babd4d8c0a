"""Addresses in caches beyond 2^31 bytes: the machine code for an H200 computes them in 64 bits."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels import ckv_records
from pallas_kernels.ckv_records import RecordFormat, ckv_format, index_key_format
from tests.lowering.topology import require_cuda_plugin, target_mesh

pytestmark = [pytest.mark.aot, require_cuda_plugin]
PAGE_SIZE, LAYERS = 64, 3
FORMATS = {
    "fp8_ds_mla": ckv_format("fp8_ds_mla", kv_lora_rank=512, qk_rope_head_dim=64),
    "bf16": ckv_format("bf16", kv_lora_rank=512, qk_rope_head_dim=64),
    "index_fp8": index_key_format("fp8", index_head_dim=128),
}


def machine_code(fmt: RecordFormat, pages: int, folder) -> list[str]:
    """PTX of the kernels that write records of all layers to `pages` pages, and read those of one layer."""

    def write_and_read(cache, records, slots, table, lengths):
        cache = ckv_records.append(fmt, cache, records, slots)
        return cache, ckv_records.gather(fmt, cache, table, lengths, num_rows=256, layer=jnp.int32(LAYERS - 1))

    replicated = NamedSharding(target_mesh(), PartitionSpec())

    def shape(*sizes, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=replicated)

    cache = shape(LAYERS, pages, *fmt.page_shape(PAGE_SIZE), dtype=fmt.dtype)
    records = shape(LAYERS, 16, fmt.record_width, dtype=fmt.dtype)
    traced = jax.jit(write_and_read, donate_argnums=0).trace(cache, records, shape(16), shape(2, 8), shape(2))
    traced.lower(lowering_platforms=("cuda",)).compile(
        compiler_options={"xla_dump_to": str(folder), "xla_dump_emitter_re": ".*", "xla_gpu_dump_llvmir": True}
    )
    return [file.read_text() for file in folder.glob("*.ptx")]


def products(code: list[str], page_bytes: int) -> dict[bool, list[str]]:
    """Multiplications by a page's bytes or by its words of 2, 4 or 8 bytes: in 64 bits, and in 32."""
    strides = "|".join(str(page_bytes // width) for width in (1, 2, 4, 8))
    lines = [line.strip() for text in code for line in text.splitlines()]
    lines = [line for line in lines if re.match(rf"(mul|mad)\.(lo|wide)\..*, ({strides})(,|;)", line)]
    found: dict[bool, list[str]] = {True: [], False: []}
    for line in lines:
        found[".wide." in line or "64" in line.split()[0]].append(line)
    return found


@pytest.mark.parametrize("name", FORMATS)
def test_pages_beyond_2_to_the_31_bytes_are_addressed_in_64_bits(name, tmp_path):
    """No product of a page's number and size is taken in 32 bits; in a small cache they are, so the search finds them.

    2^36 bytes a layer: below 2^32 of them, in a view of them as wider words, 32 bits without a sign are enough, and
    the compiler may take them.
    """
    fmt = FORMATS[name]
    page_bytes = PAGE_SIZE * fmt.bytes_per_token
    for pages, wide in ((2**36 // page_bytes, True), (1000, False)):
        folder = tmp_path / str(pages)
        folder.mkdir()
        code = machine_code(fmt, pages, folder)
        assert code
        found = products(code, page_bytes)
        assert found[wide], "no address is computed: nothing is tested"
        assert not wide or not found[False], found[False]
        assert wide or found[False]
