from __future__ import annotations

import random
from collections import deque

import pytest

from jaxllm.memory.free_list import FreeList


def test_starts_with_all_pages_but_the_null_page_in_order() -> None:
    assert list(FreeList(5)) == [1, 2, 3, 4]
    assert len(FreeList(5)) == 4
    assert 0 not in FreeList(5)


def test_pops_from_the_front_and_pushes_at_both_ends() -> None:
    pages = FreeList(6)
    assert pages.pop_front(2) + pages.pop_front() == [1, 2, 3]
    pages.push_back(2)
    pages.push_front(3)
    assert list(pages) == [3, 4, 5, 2]


def test_removes_from_the_middle_and_from_both_ends() -> None:
    pages = FreeList(7)
    for page in (3, 1, 6):
        pages.remove(page)
    assert list(pages) == [2, 4, 5]
    for page in (4, 2, 5):
        pages.remove(page)
    assert list(pages) == []
    pages.push_back(4)
    assert list(pages) == [4]
    pages.check()


def test_wrong_use_is_an_error() -> None:
    pages = FreeList(3)
    with pytest.raises(RuntimeError, match="page 2 is free already"):
        pages.push_back(2)
    with pytest.raises(RuntimeError, match="null page"):
        pages.push_front(0)
    pages.remove(1)
    with pytest.raises(RuntimeError, match="page 1 is not in the free list"):
        pages.remove(1)
    pages.pop_front()
    with pytest.raises(RuntimeError, match="0 free pages, not 1"):
        pages.pop_front()


def test_ten_thousand_random_operations_agree_with_a_deque() -> None:
    rng = random.Random(0)
    pages, model = FreeList(40), deque(range(1, 40))
    for _ in range(10_000):
        out = [page for page in range(1, 40) if page not in model]
        action = rng.randrange(4)
        if action == 0 and model:
            num = rng.randrange(1, min(len(model), 5) + 1)
            assert pages.pop_front(num) == [model.popleft() for _ in range(num)]
        elif action == 1 and model:
            page = rng.choice(model)
            pages.remove(page)
            model.remove(page)
        elif action == 2 and out:
            page = rng.choice(out)
            pages.push_back(page)
            model.append(page)
        elif action == 3 and out:
            page = rng.choice(out)
            pages.push_front(page)
            model.appendleft(page)
        assert len(pages) == len(model)
    assert list(pages) == list(model)
    pages.check()


def test_check_finds_a_broken_link() -> None:
    pages = FreeList(5)
    pages._prev[3] = 1
    with pytest.raises(RuntimeError, match="broken between pages 2 and 3"):
        pages.check()
    pages = FreeList(5)
    pages._num = 3
    with pytest.raises(RuntimeError, match="more pages than the 3"):
        pages.check()
