"""What each kind of attention asks of its pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from jaxllm.memory.page_pool import PagePool
from jaxllm.memory.spec import KVCacheSpec


class GroupRules(Protocol):
    """The rules of one KV group; a kind of attention that forgets (a window) has its own."""

    def num_pages(self, num_tokens: int) -> int:
        """Length of the page table of a request of `num_tokens` tokens."""
        ...

    def longest_hit(self, digests: Sequence[bytes], pool: PagePool) -> list[int]:
        """Pages found for the longest usable prefix of `digests`, head first."""
        ...


@dataclass(frozen=True, slots=True)
class FullAttention:
    """Every token reads all before it: a request keeps all its pages, and a hit has no holes."""

    spec: KVCacheSpec

    def num_pages(self, num_tokens: int) -> int:
        return self.spec.max_pages(num_tokens)

    def longest_hit(self, digests: Sequence[bytes], pool: PagePool) -> list[int]:
        pages: list[int] = []
        for digest in digests:
            page = pool.find(digest)
            if page is None:
                break
            pages.append(page)
        return pages


def rules_for(spec: KVCacheSpec) -> GroupRules:
    return FullAttention(spec)
