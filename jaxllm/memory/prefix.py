"""Names for what a page holds: chained digests, equal only if the whole prefix is equal."""

from __future__ import annotations

import struct
from hashlib import sha256

from jaxllm.types.request import Request

ROOT_DIGEST = sha256(b"jaxllm kv page chain").digest()

_LENGTH = struct.Struct("<I")
_SPAN = struct.Struct("<qq")


class PageHasher:
    """Digests of full pages.

    digest(page i) = sha256(digest(page i-1), the page's token ids as little-endian int64, extra
    keys). The first two have a fixed length for a page size, each extra key has a tag and a length
    before it, so two different inputs never give the same bytes: a salt cannot pass for an adapter.
    """

    __slots__ = ("_pack", "_page_size")

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._pack = struct.Struct(f"<{page_size}q").pack

    def __reduce__(self) -> tuple[type[PageHasher], tuple[int]]:
        return PageHasher, (self._page_size,)

    def extend(self, request: Request, digests: list[bytes], contents: list[bytes], num_pages: int) -> None:
        """Append digests of pages `len(digests)` to `num_pages - 1`, all full of known tokens.

        What they are digests of is appended to `contents`, of those pages that begin within the prompt.
        """
        size, pack = self._page_size, self._pack
        prompt, output = request.prompt_ids, request.output_ids
        num_prompt = len(prompt)
        has_keys = request.adapter_id is not None or request.cache_salt is not None or request.media_keys
        parent = digests[-1] if digests else ROOT_DIGEST
        for start in range(len(digests) * size, num_pages * size, size):
            end = start + size
            if end <= num_prompt:
                content = parent + pack(*prompt[start:end])
            elif start >= num_prompt:
                content = parent + pack(*output[start - num_prompt : end - num_prompt])
            else:
                content = parent + pack(*prompt[start:], *output[: end - num_prompt])
            if has_keys:  # few have any
                content += extra_keys(request, start // size, size)
            parent = sha256(content).digest()
            digests.append(parent)
            if start < num_prompt:
                contents.append(content)


def extra_keys(request: Request, page_index: int, page_size: int) -> bytes:
    """What besides token ids decides the KV of a page, or who may find it.

    The adapter; each media item that overlaps the page, with where it starts relative to the page
    (negative: on an earlier page) and its number of tokens; the cache salt, in the first page only,
    from where the chain carries it on.
    """
    parts: list[bytes] = []
    if request.adapter_id is not None:
        parts.append(_key(b"A", _text(request.adapter_id)))
    first = page_index * page_size
    for content, start, num_tokens in request.media_keys:
        if start < first + page_size and start + num_tokens > first:
            parts.append(_key(b"M", _SPAN.pack(start - first, num_tokens) + _text(content)))
    if page_index == 0 and request.cache_salt is not None:
        parts.append(_key(b"S", _text(request.cache_salt)))
    return b"".join(parts)


def _key(tag: bytes, payload: bytes) -> bytes:
    return tag + _LENGTH.pack(len(payload)) + payload


def _text(value: str) -> bytes:
    return value.encode("utf-8", "surrogatepass")
