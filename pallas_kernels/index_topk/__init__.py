"""Lightning indexer and exact top-k as one operation of bounded memory."""

from pallas_kernels.index_topk.api import index_topk

__all__ = ["index_topk"]
