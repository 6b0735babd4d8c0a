"""Sparse multi-head latent attention over selected rows."""

from pallas_kernels.sparse_mla.api import sparse_mla
from pallas_kernels.sparse_mla.merge import merge_partials

__all__ = ["merge_partials", "sparse_mla"]
