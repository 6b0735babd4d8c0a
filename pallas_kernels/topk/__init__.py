"""Exact, deterministic top-k of long rows."""

from pallas_kernels.topk.api import topk

__all__ = ["topk"]
