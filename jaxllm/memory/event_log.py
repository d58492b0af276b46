"""What changed in the prefix cache since somebody last asked."""

from __future__ import annotations

from collections.abc import Sequence

from jaxllm.types.kv_events import CacheCleared, ExtraKeys, KVEvent, PageRemoved, PagesStored
from jaxllm.types.request import Request


class KVEventLog:
    """Events in the order in which they happened. Mutable; owned by `KVManager`.

    Every KV group is told of, under its number: groups evict by themselves, and a prefix is of use only
    while each of them has it, which group 0 alone would not tell.
    """

    __slots__ = ("_events", "_page_size")

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._events: list[KVEvent] = []

    def stored(self, group: int, request: Request, digests: Sequence[bytes], pages: Sequence[int]) -> None:
        """`pages`: which of the request's pages are found from now on; ascending."""
        start = 0
        for place in range(1, len(pages) + 1):
            if place == len(pages) or pages[place] != pages[place - 1] + 1:
                self._events.append(self._run(group, request, digests, pages[start], pages[place - 1] + 1))
                start = place

    def removed(self, group: int, digest: bytes) -> None:
        self._events.append(PageRemoved(group, digest))

    def cleared(self) -> None:
        """Nothing is left, so what was not handed over yet is of no interest."""
        self._events = [CacheCleared()]

    def take(self) -> list[KVEvent]:
        taken, self._events = self._events, []
        return taken

    def _run(self, group: int, request: Request, digests: Sequence[bytes], first: int, end: int) -> PagesStored:
        size = self._page_size
        return PagesStored(
            group,
            tuple(digests[first:end]),
            digests[first - 1] if first else None,
            _tokens(request, first * size, end * size),
            size,
            request.adapter_id,
            _extra_keys(request, first, end, size),
        )


def _tokens(request: Request, start: int, end: int) -> tuple[int, ...]:
    prompt, num_prompt = request.prompt_ids, len(request.prompt_ids)
    if end <= num_prompt:
        return tuple(prompt[start:end])
    return (*prompt[start:], *request.output_ids[max(start - num_prompt, 0) : end - num_prompt])


def _extra_keys(request: Request, first: int, end: int, page_size: int) -> tuple[ExtraKeys, ...] | None:
    """The parts of `prefix.extra_keys`, readable."""
    has_salt = first == 0 and request.cache_salt is not None
    if request.adapter_id is None and not request.media_keys and not has_salt:
        return None
    return tuple(
        _keys_of_page(request, start, page_size) for start in range(first * page_size, end * page_size, page_size)
    )


def _keys_of_page(request: Request, start: int, page_size: int) -> ExtraKeys:
    adapter = [] if request.adapter_id is None else [request.adapter_id]
    salt = [request.cache_salt] if start == 0 and request.cache_salt is not None else []
    media = [
        (content, at - start)
        for content, at, num_tokens in request.media_keys
        if at < start + page_size and at + num_tokens > start
    ]
    return (*adapter, *media, *salt)
