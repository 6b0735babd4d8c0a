"""Scores of the lightning indexer."""

from pallas_kernels.lightning_indexer.api import lightning_indexer

__all__ = ["lightning_indexer"]
