"""Pages that agree with a prompt only at their beginning are copied, and only where that is right."""

from __future__ import annotations

from typing import Any

import pytest

from jaxllm.memory.manager import KVManager
from jaxllm.types.request import Request
from jaxllm.types.sampling import SamplingParams
from jaxllm.types.service import ServiceParams
from tests.memory.test_manager import ask, finish, make, run

PREFIX = tuple(range(100, 132))  # two pages


def cached(request: Request, kv: KVManager) -> int:
    """Tokens that a request starts with, beside its copies."""
    copies = kv.adopt_prefix(request)
    assert any(copies) == (request.num_cached % kv.page_size > 0)
    kv.check()
    kv.let_go_of_copied()
    kv.check()
    return request.num_cached


@pytest.mark.parametrize("num_same", [0, 3, 4, 9, 15])
@pytest.mark.parametrize("specs", [1, 2])
def test_the_beginning_of_a_page_is_copied_from_a_quarter_of_it_on(num_same: int, specs: int) -> None:
    kv = make(specs=specs)
    finish(kv, run(kv, ask(*PREFIX, *range(20))))  # the third page: 0 .. 15
    request = ask(*PREFIX, *range(num_same), *range(50, 70))
    copies = kv.adopt_prefix(request)
    expected = num_same if num_same >= 4 else 0
    assert request.num_cached == request.num_computed == 32 + expected
    assert copies == (((3, request.pages[0][2]),) if expected else (),) * specs
    assert request.pages[0][:2] == [1, 2] and 3 not in request.pages[0]


def test_the_page_to_copy_is_nobodys_until_the_step_is_planned() -> None:
    kv = make(num_pages=8)
    finish(kv, run(kv, ask(*PREFIX, *range(16))))  # pages 1 to 3
    request = ask(*PREFIX, *range(8), 99)
    copies = kv.adopt_prefix(request)
    assert kv.num_free_pages == 3
    other = ask(*range(200, 264))
    assert kv.grow(other, 64) is None and kv.grow(other, 48) is not None
    assert copies[0][0][0] not in other.pages[0]
    kv.check()
    kv.let_go_of_copied()
    assert kv.grow(other, 64) is not None
    assert other.pages[0][3] == copies[0][0][0]
    kv.check()


def test_no_copy_where_the_request_would_not_fit_beside_the_page() -> None:
    kv = make(num_pages=4)
    finish(kv, run(kv, ask(*PREFIX, *range(16))))
    request = ask(*PREFIX, *range(8), 99)
    assert kv.can_fit(request, request.num_tokens)
    assert cached(request, kv) == 32
    assert kv.grow(request, request.num_tokens) is not None


def test_a_copied_page_keeps_its_retention_level() -> None:
    kv = make(num_pages=10)
    first = ask(*PREFIX, *range(16))
    first.service = ServiceParams(retention_priority=90)
    finish(kv, run(kv, first))
    request = ask(*PREFIX, *range(8), 99)
    assert cached(request, kv) == 40
    finish(kv, request)
    kv.grow(ask(*range(200, 200 + 16 * 8)), 16 * 6)
    assert kv.match_prefix(ask(*PREFIX, *range(16), 1)) == 48


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ({}, {}, 8),
        ({"cache_salt": "x"}, {"cache_salt": "x"}, 0),  # left out, though it would be right
        ({"cache_salt": "x"}, {"cache_salt": "y"}, 0),
        ({"cache_salt": "x"}, {}, 0),
        ({}, {"cache_salt": "x"}, 0),
        ({"adapter_id": "x"}, {"adapter_id": "y"}, 0),
        ({}, {"adapter_id": "x"}, 0),
        ({"media_keys": (("image", 0, 8),)}, {"media_keys": (("other", 0, 8),)}, 0),
        ({"media_keys": (("image", 0, 8),)}, {}, 0),
        ({}, {"media_keys": (("image", 0, 8),)}, 0),
        ({}, {"params": SamplingParams(skip_reading_prefix_cache=True)}, 0),
        ({}, {"params": SamplingParams(prompt_logprobs=0)}, 0),
    ],
)
def test_pfx_03_no_beginning_of_a_first_page_crosses_salts_adapters_or_media(
    first: dict[str, Any], second: dict[str, Any], expected: int
) -> None:
    kv = make()
    finish(kv, run(kv, ask(*range(20), **first)))
    assert cached(ask(*range(8), *range(50, 70), **second), kv) == expected


@pytest.mark.parametrize("key", ["cache_salt", "adapter_id"])
def test_pfx_03_behind_a_first_page_salt_and_adapter_are_told_apart_by_the_page_before(key: str) -> None:
    kv = make()
    finish(kv, run(kv, ask(*PREFIX, *range(16), **{key: "x"})))
    assert cached(ask(*PREFIX, *range(8), 99, **{key: "x"}), kv) == 40
    assert cached(ask(*PREFIX, *range(8), 99, **{key: "y"}), kv) == 0
    assert cached(ask(*PREFIX, *range(8), 99), kv) == 0


def test_pages_that_begin_otherwise_do_not_displace_one_another() -> None:
    kv = make(num_pages=40)
    finish(kv, run(kv, ask(*PREFIX, *range(16))))
    finish(kv, run(kv, ask(*PREFIX, *range(2), *range(70, 84))))
    finish(kv, run(kv, ask(*PREFIX, *range(300, 316))))
    assert cached(ask(*PREFIX, *range(16)), kv) == 47
    assert cached(ask(*PREFIX, *range(10), 99, 99), kv) == 42


def test_an_evicted_page_is_not_copied_and_entries_stay_within_twice_the_pool() -> None:
    kv = make(num_pages=6)
    finish(kv, run(kv, ask(*PREFIX, *range(16))))
    finish(kv, run(kv, ask(*range(500, 580))))  # takes all five pages
    assert cached(ask(*PREFIX, *range(8), 99), kv) == 0
    for i in range(200):
        finish(kv, run(kv, ask(*range(1000 * i, 1000 * i + 48))))
        assert kv._beginnings is not None and len(kv._beginnings) <= 2 * 6


def test_without_whole_pages_or_the_setting_nothing_is_copied() -> None:
    for kv in (make(partial=False), make(caching=False), make(page_size=1, num_pages=60)):
        finish(kv, run(kv, ask(*range(40))))
        assert cached(ask(*range(40)), kv) % kv.page_size == 0
