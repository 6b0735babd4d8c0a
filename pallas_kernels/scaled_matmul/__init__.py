"""Matrix products of block-scaled FP8 operands, dense and grouped, and the quantisation of their rows."""

from pallas_kernels.scaled_matmul.api import grouped_scaled_matmul, scaled_matmul
from pallas_kernels.scaled_matmul.quantize import quantize_rows

__all__ = ["grouped_scaled_matmul", "quantize_rows", "scaled_matmul"]
