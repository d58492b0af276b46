"""Free pages in the order in which they will be taken."""

from __future__ import annotations

from collections.abc import Iterator

_SENTINEL = 0  # page 0 is the null page, never free, so its links can hold the two ends
_ABSENT = -1


class FreeList:
    """Doubly linked list of page ids: every operation but iteration is O(1), also in the middle.

    Links are two flat lists indexed by page id, so that a page needs no node object of its own.
    Starts with every page but 0, in order of id.
    """

    __slots__ = ("_next", "_num", "_prev")

    def __init__(self, num_pages: int) -> None:
        self._next = [*range(1, num_pages), _SENTINEL]
        self._prev = [num_pages - 1, *range(num_pages - 1)]
        self._num = num_pages - 1

    def __len__(self) -> int:
        return self._num

    def __contains__(self, page: int) -> bool:
        return page != _SENTINEL and self._next[page] != _ABSENT

    def __iter__(self) -> Iterator[int]:
        """Front (taken first) to back."""
        page = self._next[_SENTINEL]
        while page != _SENTINEL:
            yield page
            page = self._next[page]

    def pop_front(self, num: int = 1) -> list[int]:
        """The first `num` pages, taken out of the list."""
        if num > self._num:
            raise RuntimeError(f"{self._num} free pages, not {num}: the caller must look at len() first")
        after, before = self._next, self._prev
        pages: list[int] = []
        page = after[_SENTINEL]
        for _ in range(num):
            pages.append(page)
            following = after[page]
            after[page] = before[page] = _ABSENT
            page = following
        after[_SENTINEL], before[page] = page, _SENTINEL
        self._num -= num
        return pages

    def push_back(self, page: int) -> None:
        self._insert(self._prev[_SENTINEL], page, _SENTINEL)

    def push_front(self, page: int) -> None:
        self._insert(_SENTINEL, page, self._next[_SENTINEL])

    def remove(self, page: int) -> None:
        if page not in self:
            raise RuntimeError(f"page {page} is not in the free list")
        before, after = self._prev[page], self._next[page]
        self._next[before], self._prev[after] = after, before
        self._next[page] = self._prev[page] = _ABSENT
        self._num -= 1

    def check(self) -> None:
        """Raise RuntimeError unless the links form one ring of `len` pages."""
        page = _SENTINEL
        for _ in range(self._num + 1):
            after = self._next[page]
            if after == _ABSENT or self._prev[after] != page:
                raise RuntimeError(f"free list is broken between pages {page} and {after}")
            page = after
        if page != _SENTINEL:
            raise RuntimeError(f"free list holds more pages than the {self._num} it counted")

    def _insert(self, before: int, page: int, after: int) -> None:
        if page == _SENTINEL or self._next[page] != _ABSENT:
            raise RuntimeError(f"page {page} is free already, or is the null page")
        self._next[before] = self._prev[after] = page
        self._prev[page], self._next[page] = before, after
        self._num += 1
