"""Cached pages that begin as a prompt goes on, though they end differently."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

from jaxllm.memory.prefix import ROOT_DIGEST
from jaxllm.types.request import Request

_TOKEN_BYTES = 8
_SMALLEST_SHARE = 4  # a page is copied for a quarter of its tokens or more


class PageBeginnings:
    """For each beginning of a page of a prompt, the latest page that has it. Mutable; owned by `KVManager`.

    A beginning is all that comes before the page and its first tokens, as many as are worth a copy. One page
    each is enough for what it is there for: a system prompt or a history that ends within a page is in all
    pages that follow the whole ones. A page that is evicted keeps its entry until that is replaced, or until
    there are twice as many entries as pages; so each operation is O(pages it is about), amortised.

    What a page holds may depend on more than its tokens. Adapter and salt are in the digest of the page
    before; a first page that has any, and all pages of requests with media, are left out.
    """

    def __init__(self, page_size: int, num_pages: int, is_cached: Callable[[bytes], bool]) -> None:
        self._page_size = page_size
        self._fewest = max(1, page_size // _SMALLEST_SHARE)  # tokens worth a copy
        self._num_most = 2 * num_pages
        self._is_cached = is_cached
        self._key_bytes = len(ROOT_DIGEST) + self._fewest * _TOKEN_BYTES  # a content begins with the digest before it
        self._latest: dict[bytes, tuple[bytes, bytes]] = {}  # beginning -> digest and content of the page

    def __len__(self) -> int:
        return len(self._latest)

    def add(self, request: Request, digests: Sequence[bytes], contents: Sequence[bytes], first: int, end: int) -> None:
        """Pages `first` to `end` - 1 of a request can be found now; those without content are left out."""
        if request.media_keys:
            return
        size = self._key_bytes
        for number in range(1 if first == 0 and _has_keys(request) else first, min(end, len(contents))):
            content = contents[number]
            self._latest[content[:size]] = digests[number], content
        if len(self._latest) > self._num_most:
            self._latest = {key: page for key, page in self._latest.items() if self._is_cached(page[0])}

    def find(self, request: Request, digests: Sequence[bytes], num_whole: int) -> tuple[bytes, int] | None:
        """A page with the request's next tokens after its first `num_whole` pages: its digest, and how many.

        The last token of the request is not among them.
        """
        start = num_whole * self._page_size
        num_wanted = min(self._page_size, request.num_tokens - 1 - start)
        if num_wanted < self._fewest or request.media_keys or (num_whole == 0 and _has_keys(request)):
            return None
        before = digests[num_whole - 1] if num_whole else ROOT_DIGEST
        wanted = before + _packed(request, start, num_wanted)
        page = self._latest.get(wanted[: self._key_bytes])
        if page is None or not self._is_cached(page[0]):
            return None
        return page[0], _num_same(wanted[len(before) :], page[1][len(before) :])


def _has_keys(request: Request) -> bool:
    return request.adapter_id is not None or request.cache_salt is not None


def _packed(request: Request, start: int, num: int) -> bytes:
    known = request.prompt_ids if start + num <= request.num_prompt_tokens else request.token_ids()
    return struct.pack(f"<{num}q", *known[start : start + num])


def _num_same(wanted: bytes, content: bytes) -> int:
    """Tokens that both begin with."""
    low, high = 0, len(wanted) // _TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        size = middle * _TOKEN_BYTES
        low, high = (middle, high) if wanted[:size] == content[:size] else (low, middle - 1)
    return low
