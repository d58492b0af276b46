"""KV write and attention over pages for a ragged mix of decode and prefill."""

from pallas_kernels.ragged_paged_attention.api import choose, kv_cache_shape, ragged_paged_attention

__all__ = ["choose", "kv_cache_shape", "ragged_paged_attention"]
