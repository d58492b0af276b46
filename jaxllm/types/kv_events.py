"""What happened to the pages that can be found by what they hold."""

from __future__ import annotations

from dataclasses import dataclass

ExtraKeys = tuple[str | tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class PagesStored:
    """Consecutive pages of one prefix can be found from now on; none of them could be before."""

    group: int  # KV group
    digests: tuple[bytes, ...]
    parent: bytes | None  # digest of the page before the first of them; None: they begin the prefix
    token_ids: tuple[int, ...]  # of all these pages
    page_size: int  # tokens
    adapter_id: str | None = None
    # Of each page, what besides tokens decides its digest: adapter, media as (content, start in the page), salt.
    extra_keys: tuple[ExtraKeys, ...] | None = None  # None: nothing, in any of them


@dataclass(frozen=True, slots=True)
class PageRemoved:
    """The last page of a digest was given to something else, or forgotten."""

    group: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """Nothing can be found any more, in any group."""


KVEvent = PagesStored | PageRemoved | CacheCleared
