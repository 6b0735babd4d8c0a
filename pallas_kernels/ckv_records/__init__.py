"""Records of the paged caches: their byte layouts, and how to pack, append, gather and unpack them."""

from pallas_kernels.ckv_records.api import append, gather, pack, read, split_index_keys, unpack
from pallas_kernels.ckv_records.formats import (
    CKV_FORMATS,
    INDEX_KEY_FORMATS,
    RecordFormat,
    ckv_format,
    index_key_format,
)
from pallas_kernels.ckv_records.rounding import quantize_power_of_two

__all__ = [
    "CKV_FORMATS",
    "INDEX_KEY_FORMATS",
    "RecordFormat",
    "append",
    "ckv_format",
    "gather",
    "index_key_format",
    "pack",
    "quantize_power_of_two",
    "read",
    "split_index_keys",
    "unpack",
]
