"""Which pages are free, cached or held, and what can be found again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice

from jaxllm.errors import CapacityError
from jaxllm.memory.free_list import FreeList
from jaxllm.types.service import DEFAULT_RETENTION

NULL_PAGE = 0


class PagePool:
    """The pages of one KV group. Mutable; owned by `KVManager` alone.

    A page is in exactly one state:

        null     page 0: padding is written there, nobody is ever given it
        free     no holder, in the free list, nothing to find in it
        cached   no holder, in the free list, found by its digest until it is taken
        held     one holder or more, not in the free list, found by its digest or not

    Cached pages are taken by retention level, the lowest first; within a level the one that was released
    longest ago. Blank pages are taken before any. Each operation is O(pages it is about + levels in use),
    however large the pool is.

    Two pages may have the same digest (two requests computed the same tokens at once). They are
    not merged, since page tables only grow; the one indexed first is found first.
    """

    __slots__ = ("_digests", "_free", "_index", "_kept", "_levels", "_num_blank", "_on_forget", "_refs", "_twins")

    def __init__(self, num_pages: int, on_forget: Callable[[bytes], None] | None = None) -> None:
        """`on_forget` hears of each digest that no page is found by any more."""
        if num_pages < 2:
            raise CapacityError(f"num_pages={num_pages} leaves no page to give out; accepted: at least 2")
        self._free = FreeList(num_pages)  # blank pages in front, then the cached ones of the default level
        self._on_forget = on_forget
        self._num_blank = num_pages - 1
        self._kept: dict[int, OrderedDict[int, None]] = {}  # cached pages of other levels; none is empty
        self._levels: dict[int, int] = {}  # of the pages in there
        self._refs = [0] * num_pages
        self._digests: list[bytes | None] = [None] * num_pages
        self._index: dict[bytes, int] = {}  # the page that is found
        # Further pages of the same digest, where there are any; ordered sets, since there may be many.
        self._twins: dict[bytes, dict[int, None]] = {}

    @property
    def num_pages(self) -> int:
        """Pages in all, the null page included."""
        return len(self._refs)

    @property
    def num_free(self) -> int:
        """Pages that `take` could give out: free and cached ones."""
        return len(self._free) + len(self._levels)

    def num_refs(self, page: int) -> int:
        return self._refs[page]

    def level(self, page: int) -> int:
        """The retention level of a cached page; the default one for any other."""
        return self._levels.get(page, DEFAULT_RETENTION)

    def eviction_order(self) -> tuple[int, ...]:
        """Pages without a holder, first to be taken first. O(pages), for tests and reports."""
        ordinary = tuple(self._free)
        lower = chain.from_iterable(self._kept[level] for level in sorted(self._kept) if level < DEFAULT_RETENTION)
        higher = chain.from_iterable(self._kept[level] for level in sorted(self._kept) if level > DEFAULT_RETENTION)
        return (*ordinary[: self._num_blank], *lower, *ordinary[self._num_blank :], *higher)

    def take(self, num_pages: int) -> list[int] | None:
        """Give out pages with one reference each; None, and no change, if there are too few."""
        if num_pages > len(self._free) + len(self._levels):
            return None
        if self._levels and num_pages > self._num_blank:
            pages = self._pop_by_level(num_pages)
        else:
            pages = self._free.pop_front(num_pages)
            self._num_blank = max(0, self._num_blank - num_pages)
        for page in pages:
            if self._digests[page] is not None:
                self._forget(page)
            self._refs[page] = 1
        return pages

    def share(self, page_ids: Iterable[int]) -> None:
        """Add a reference to pages that hold something: a prefix hit."""
        for page in page_ids:
            if self._refs[page] == 0:
                if self._digests[page] is None:
                    raise RuntimeError(f"page {page} is free or null: it holds nothing to share")
                self._remove_cached(page)
            self._refs[page] += 1

    def release(self, page_ids: Sequence[int], level: int = DEFAULT_RETENTION, num_at_level: int | None = None) -> None:
        """Drop one reference each. `page_ids` is head first.

        The last holder says at which retention level its first `num_at_level` pages (None: all) stay cached.

        The tail goes back first and so is evicted first: a prefix without its tail is of use, a
        tail without its head is not. Pages that nobody can find are taken before any cached one.
        """
        num_at_level = len(page_ids) if num_at_level is None else num_at_level
        for number in range(len(page_ids) - 1, -1, -1):
            page = page_ids[number]
            if self._refs[page] <= 0:
                raise RuntimeError(f"page {page} was released more often than it was given out")
            self._refs[page] -= 1
            if self._refs[page] > 0:
                continue
            if self._digests[page] is None:
                self._free.push_front(page)
                self._num_blank += 1
            elif level == DEFAULT_RETENTION or number >= num_at_level:
                self._free.push_back(page)
            else:
                self._kept.setdefault(level, OrderedDict())[page] = None
                self._levels[page] = level

    def index(self, page_ids: Sequence[int], digests: Sequence[bytes], first: int, end: int) -> None:
        """Let entries `first` to `end` - 1 of a page table be found by the digests of what they hold.

        The pages must have a holder. Those that are found by their digest already stay as they are.
        """
        known, index = self._digests, self._index
        for number in range(first, end):
            page, digest = page_ids[number], digests[number]
            if known[page] is None and self._refs[page] > 0:
                known[page] = digest
                if index.setdefault(digest, page) != page:
                    self._twins.setdefault(digest, {})[page] = None
            elif known[page] != digest:
                raise RuntimeError(f"page {page} cannot be indexed: it has no holder, or holds something else")

    def find(self, digest: bytes) -> int | None:
        return self._index.get(digest)

    def evict(self, page_ids: Iterable[int]) -> None:
        """Forget what pages hold. Holders keep them; nobody finds them any more."""
        for page in page_ids:
            if self._refs[page] == 0 and self._digests[page] is not None:
                self._remove_cached(page)
                self._free.push_front(page)
                self._num_blank += 1
            self._forget(page)

    def check(self) -> None:
        """Raise RuntimeError, naming the page, unless every page is in exactly one state. O(pages)."""
        self._free.check()
        if self._refs[NULL_PAGE] or self._digests[NULL_PAGE] is not None:
            raise RuntimeError("the null page 0 was given out or indexed")
        for page in range(1, self.num_pages):
            refs, is_free = self._refs[page], page in self._free or page in self._levels
            if refs < 0 or (refs > 0) == is_free:
                where = "in" if is_free else "not in"
                raise RuntimeError(f"page {page} has {refs} holders and is {where} the free list")
            digest = self._digests[page]
            if digest is not None and page not in (self._index.get(digest), *self._twins.get(digest, ())):
                raise RuntimeError(f"page {page} has a digest, but the index does not lead to it")
        self._check_order()
        num_found = len(self._index) + sum(map(len, self._twins.values()))
        num_digests = sum(digest is not None for digest in self._digests)
        if num_found != num_digests or not all(self._twins.values()):
            raise RuntimeError(f"the index leads to {num_found} pages, and {num_digests} have a digest")

    def _check_order(self) -> None:
        order = self.eviction_order()
        if len(order) != len(set(order)) or len(order) != self.num_free:
            raise RuntimeError(f"{len(order)} pages are to be taken, and {self.num_free} count as free")
        if any((self._digests[page] is None) != (place < self._num_blank) for place, page in enumerate(order)):
            raise RuntimeError("a cached page is to be taken before a blank one")
        if {page: level for level, pages in self._kept.items() for page in pages} != self._levels:
            raise RuntimeError("pages and their retention levels do not belong together")

    def _pop_by_level(self, num_pages: int) -> list[int]:
        pages = self._free.pop_front(self._num_blank)
        self._num_blank = 0
        for level in sorted({*self._kept, DEFAULT_RETENTION}):
            num_left = num_pages - len(pages)
            if level == DEFAULT_RETENTION:
                pages += self._free.pop_front(min(num_left, len(self._free)))
                continue
            chosen = list(islice(self._kept[level], num_left))
            for page in chosen:
                self._remove_cached(page)
            pages += chosen
        return pages

    def _remove_cached(self, page: int) -> None:
        """Take a page without a holder out of its level."""
        level = self._levels.pop(page, None)
        if level is None:
            self._free.remove(page)
            return
        del self._kept[level][page]
        if not self._kept[level]:
            del self._kept[level]

    def _forget(self, page: int) -> None:
        digest = self._digests[page]
        if digest is None:
            return
        self._digests[page] = None
        twins = self._twins.get(digest)
        if twins is None:
            del self._index[digest]
            if self._on_forget is not None:
                self._on_forget(digest)
            return
        if self._index[digest] == page:
            self._index[digest] = first = next(iter(twins))
            del twins[first]
        else:
            del twins[page]
        if not twins:
            del self._twins[digest]
