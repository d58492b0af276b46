"""Kernels for LLM serving that stand alone: jax and numpy are all they need.

Every public op takes `implementation=`; without it the best one that runs on this platform is chosen.
"""

from pallas_kernels._core.errors import InvalidArgument, KernelError, UnknownImplementation, Unsupported
from pallas_kernels.ragged_paged_attention.api import kv_cache_shape, ragged_paged_attention

__all__ = [
    "InvalidArgument",
    "KernelError",
    "UnknownImplementation",
    "Unsupported",
    "kv_cache_shape",
    "ragged_paged_attention",
]
