from __future__ import annotations

import pytest

from jaxllm.errors import CapacityError
from jaxllm.memory.page_pool import PagePool


def index(pool: PagePool, page: int, digest: bytes) -> None:
    pool.index([page], [digest], 0, 1)


def take(pool: PagePool, num: int) -> list[int]:
    pages = pool.take(num)
    assert pages is not None
    return pages


def test_page_0_is_never_given_out() -> None:
    pool = PagePool(4)
    assert take(pool, 3) == [1, 2, 3]
    assert pool.take(1) is None
    assert pool.num_free == 0
    pool.check()


def test_taking_too_many_changes_nothing() -> None:
    pool = PagePool(4)
    assert pool.take(4) is None
    assert pool.eviction_order() == (1, 2, 3)


def test_a_pool_of_the_null_page_alone_is_refused() -> None:
    with pytest.raises(CapacityError, match="num_pages=1"):
        PagePool(1)


def test_eviction_takes_uncached_pages_then_the_least_recently_released_tail_first() -> None:
    pool = PagePool(9)
    first, second, third = take(pool, 3), take(pool, 2), take(pool, 2)
    for page in first + second[:1]:
        index(pool, page, b"%d" % page)
    pool.release(second)  # page 4 is cached, page 5 is not
    pool.release(first)
    pool.release(third)
    #                              uncached, newest first; the untouched one; then cached: 4, then 3 2 1
    assert pool.eviction_order() == (6, 7, 5, 8, 4, 3, 2, 1)
    pool.check()


def test_a_taken_page_is_no_longer_found() -> None:
    pool = PagePool(3)
    pages = take(pool, 2)
    index(pool, pages[0], b"head")
    index(pool, pages[1], b"tail")
    pool.release(pages)
    assert take(pool, 1) == [pages[1]]
    assert (pool.find(b"head"), pool.find(b"tail")) == (pages[0], None)
    pool.check()


def test_a_shared_page_leaves_the_free_list_and_returns_after_its_last_holder() -> None:
    pool = PagePool(4)
    pages = take(pool, 2)
    index(pool, pages[0], b"x")
    pool.release(pages)
    pool.share([pages[0]])
    pool.share([pages[0]])
    assert pool.num_free == 2
    assert pool.num_refs(pages[0]) == 2
    pool.release([pages[0]])
    assert pool.num_free == 2
    pool.release([pages[0]])
    assert pool.num_free == 3
    assert pool.find(b"x") == pages[0]
    pool.check()


def test_pages_of_equal_digest_are_both_kept_and_the_first_is_found_while_it_lasts() -> None:
    pool = PagePool(4)
    first, second = take(pool, 1), take(pool, 1)
    index(pool, first[0], b"same")
    index(pool, second[0], b"same")
    assert pool.find(b"same") == first[0]
    pool.evict(first)
    assert pool.find(b"same") == second[0]
    pool.check()
    pool.evict(second)
    assert pool.find(b"same") is None
    pool.check()


def test_wrong_use_is_an_error() -> None:
    pool = PagePool(4)
    pages = take(pool, 1)
    with pytest.raises(RuntimeError, match="page 2 is free or null"):
        pool.share([2])
    with pytest.raises(RuntimeError, match="page 2 cannot be indexed"):
        index(pool, 2, b"x")
    index(pool, 1, b"x")
    with pytest.raises(RuntimeError, match="page 1 cannot be indexed"):
        index(pool, 1, b"y")
    pool.release(pages)
    with pytest.raises(RuntimeError, match="page 1 was released more often"):
        pool.release(pages)
    with pytest.raises(RuntimeError, match="page 0 was released"):
        pool.release([0])


def test_check_names_the_page_that_is_in_two_states_or_none() -> None:
    pool = PagePool(4)
    pool._refs[2] = 1
    with pytest.raises(RuntimeError, match="page 2 has 1 holders and is in the free list"):
        pool.check()
    pool = PagePool(4)
    take(pool, 1)
    pool._refs[1] = 0
    with pytest.raises(RuntimeError, match="page 1 has 0 holders and is not in the free list"):
        pool.check()
    pool = PagePool(4)
    pool._digests[3] = b"x"
    with pytest.raises(RuntimeError, match="page 3 has a digest"):
        pool.check()
    pool = PagePool(4)
    pool._index[b"x"] = 1
    with pytest.raises(RuntimeError, match="index leads to 1 pages, and 0 have"):
        pool.check()
    pool = PagePool(4)
    pool._refs[0] = 1
    with pytest.raises(RuntimeError, match="null page"):
        pool.check()
