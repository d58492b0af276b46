"""Kernels for LLM serving that stand alone: jax and numpy are all they need.

Every public op takes `implementation=`; without it the best one that runs on this platform is chosen.
"""

from pallas_kernels._core.errors import InvalidArgument, KernelError, UnknownImplementation, Unsupported
from pallas_kernels._core.native import fingerprint
from pallas_kernels.ragged_paged_attention.api import kv_cache_shape, ragged_paged_attention
from pallas_kernels.stacked_matmul.api import stacked_matmul

__all__ = [
    "InvalidArgument",
    "KernelError",
    "UnknownImplementation",
    "Unsupported",
    "fingerprint",
    "kv_cache_shape",
    "ragged_paged_attention",
    "stacked_matmul",
]
