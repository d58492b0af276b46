"""Which cached pages go first, whatever the size of the pool."""

from __future__ import annotations

import gc
import sys

import pytest

from jaxllm.memory.page_pool import PagePool
from jaxllm.types.request import Request
from jaxllm.types.sampling import SamplingParams
from jaxllm.types.service import ServiceParams
from tests.scheduler.driver import make_kv


def cached(pool: PagePool, name: str, num: int, level: int) -> list[int]:
    pages = pool.take(num)
    assert pages is not None
    pool.index(pages, [f"{name}{i}".encode() for i in range(num)], 0, num)
    pool.release(pages, level)
    return pages


def test_the_lowest_level_goes_first_and_blank_pages_before_all() -> None:
    pool = PagePool(10)
    high, low, usual, low2 = (
        cached(pool, name, 2, level) for name, level in (("h", 90), ("l", 5), ("u", 35), ("m", 5))
    )
    pool.check()
    blank = pool.take(1)
    assert blank is not None and not {*blank} & {*high, *low, *usual, *low2}
    order = [*low[::-1], *low2[::-1], *usual[::-1], *high[::-1]]
    assert [(pool.take(1) or [0])[0] for _ in order] == order
    pool.check()


def test_a_page_that_is_found_again_takes_the_level_of_its_next_holder() -> None:
    pool = PagePool(4)
    page = cached(pool, "x", 1, 5)[0]
    pool.share([page])
    pool.release([page], 90)
    other = cached(pool, "y", 2, 35)
    assert pool.take(2) == other[::-1]
    assert pool.find(b"x0") == page
    pool.evict([page])
    pool.check()
    assert pool.take(1) == [page]


@pytest.mark.parametrize(("tokens", "kept"), [(None, 4), (8, 2), (7, 1), (0, 0)])
def test_a_request_keeps_the_first_of_its_pages_for_longer(tokens: int | None, kept: int) -> None:
    kv = make_kv(num_pages=9, page_size=4)
    service = ServiceParams(retention_priority=80, retention_tokens=tokens)
    kept_one = Request("a", tuple(range(17)), SamplingParams(), 0.0, service=service)
    other = Request("b", tuple(range(50, 66)), SamplingParams(), 0.0)
    for request in (kept_one, other):
        assert kv.grow(request, 16) is not None
        request.num_computed = 16
        kv.commit(request)
        kv.release(request)
    kv.check()
    third = Request("c", tuple(range(90, 122)), SamplingParams(), 0.0)
    assert kv.grow(third, 4 * (8 - kept)) is not None
    assert kv.match_prefix(kept_one) == 4 * kept
    kv.check()


def calls(pool: PagePool) -> int:
    """Python and C calls of a life of pages at three levels."""
    num_calls = 0

    def count(*_: object) -> None:
        nonlocal num_calls
        num_calls += 1

    gc.disable()  # its callbacks would be counted
    sys.setprofile(count)
    try:
        for level in (5, 35, 90):
            cached(pool, f"n{level}", 4, level)
        pool.find(b"n50")
        pool.take(14)
    finally:
        sys.setprofile(None)
        gc.enable()
    return num_calls


def test_finding_and_evicting_costs_the_same_in_a_pool_of_any_size() -> None:
    def filled(num_pages: int) -> PagePool:
        pool = PagePool(num_pages)
        for level in (5, 35, 90):
            cached(pool, f"old{level}", (num_pages - 1) // 3, level)
        return pool

    assert calls(filled(1_000)) == calls(filled(100_000))
