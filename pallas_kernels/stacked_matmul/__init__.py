"""Rows times one matrix of a stack."""

from pallas_kernels.stacked_matmul.api import choose, stacked_matmul

__all__ = ["choose", "stacked_matmul"]
