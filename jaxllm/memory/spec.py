"""What one layer keeps in memory per token, and how many bytes that is."""

from __future__ import annotations

from dataclasses import dataclass

DTYPE_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
}


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that hold `num_tokens` tokens."""
    return -(-num_tokens // page_size)


@dataclass(frozen=True, slots=True)
class FullKV:
    """Keys and values of every token, K heads of H elements each."""

    page_size: int  # S tokens
    num_kv_heads: int  # K
    head_dim: int  # H
    dtype: str = "float32"

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page of one layer, keys and values together."""
        return 2 * self.page_size * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    def max_pages(self, num_tokens: int) -> int:
        """Most pages one request of `num_tokens` tokens holds."""
        return pages_for(num_tokens, self.page_size)


KVCacheSpec = FullKV  # a closed union: window, latent and recurrent kinds join it
