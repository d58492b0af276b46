from __future__ import annotations

from typing import Any

import pytest

from jaxllm.memory.manager import KVManager
from jaxllm.memory.plan import KVCachePlan, group_layers
from jaxllm.memory.prefix import PageHasher
from jaxllm.memory.spec import FullKV
from jaxllm.types.request import FinishReason, Request, RequestStatus
from jaxllm.types.sampling import SamplingParams


def make(
    num_pages: int = 10, page_size: int = 16, *, caching: bool = True, partial: bool = True, specs: int = 1
) -> KVManager:
    groups = group_layers(tuple(FullKV(page_size, 1, 8 * (i + 1)) for i in range(specs)))
    plan = KVCachePlan(groups, num_pages, page_size)
    return KVManager(plan, enable_prefix_caching=caching, enable_partial_page_reuse=partial)


def ask(*tokens: int, **extra: Any) -> Request:
    return Request("r", tokens, extra.pop("params", SamplingParams()), 0.0, **extra)


def run(kv: KVManager, request: Request) -> Request:
    """Give the request memory for all its tokens and compute them."""
    kv.adopt_prefix(request)
    kv.let_go_of_copied()
    assert kv.grow(request, request.num_tokens) is not None
    request.num_computed = request.num_tokens
    kv.commit(request)
    return request


def finish(kv: KVManager, request: Request) -> None:
    request.status, request.finish_reason = RequestStatus.FINISHED, FinishReason.STOP
    kv.release(request)


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "first_hit", "with_copy", "longer_hit"),
    [(15, 0, 0, 0), (16, 0, 15, 16), (17, 16, 16, 16), (32, 16, 31, 32), (33, 32, 32, 32)],
)
def test_sch_04_a_hit_is_whole_pages_and_perhaps_a_copy_and_never_the_whole_prompt(
    num_tokens: int, first_hit: int, with_copy: int, longer_hit: int, partial: bool
) -> None:
    kv = make(partial=partial)
    tokens = tuple(range(num_tokens))
    assert kv.match_prefix(ask(*tokens)) == 0
    finish(kv, run(kv, ask(*tokens)))
    assert kv.match_prefix(ask(*tokens)) == first_hit
    again = run(kv, ask(*tokens))
    assert again.num_cached == (with_copy if partial else first_hit)
    finish(kv, again)
    assert kv.match_prefix(ask(*tokens, *range(100, 120))) == longer_hit
    kv.check()


def test_a_second_request_shares_the_full_pages_and_takes_its_own_last_one() -> None:
    kv = make()
    first = run(kv, ask(*range(55)))  # 3 full pages and 7 tokens
    second = run(kv, ask(*range(48), 7, 7))
    assert first.pages == [[1, 2, 3, 4]]
    assert second.pages == [[1, 2, 3, 5]]
    assert second.num_cached == 48
    assert kv.num_free_pages == 9 - 5
    finish(kv, first)
    assert kv.num_free_pages == 9 - 4
    kv.check()


def test_the_tail_of_a_released_request_is_evicted_before_its_head() -> None:
    kv = make(num_pages=5)
    finish(kv, run(kv, ask(*range(64))))
    for num_taken, expected in ((1, 48), (2, 32), (3, 16), (4, 0)):
        other = ask(*range(1000, 1000 + 16 * num_taken))
        assert kv.grow(other, 16 * num_taken) is not None
        finish(kv, other)
        assert kv.match_prefix(ask(*range(65))) == expected
    kv.check()


def test_can_fit_does_not_count_a_hit_page_twice() -> None:
    kv = make(num_pages=5)
    finish(kv, run(kv, ask(*range(32))))  # 2 cached of 4 free
    request = ask(*range(33))
    assert kv.can_fit(request, 64)
    assert not kv.can_fit(request, 65)
    holder = ask(*range(500, 516))
    kv.grow(holder, 16)
    assert kv.can_fit(request, 48)  # 2 hit pages and the 1 left
    assert not kv.can_fit(request, 49)
    assert not kv.can_fit(ask(*range(700, 749)), 49)
    run(kv, ask(*range(20)))  # holds the first hit page, took the page that was left
    assert kv.match_prefix(request) == 32
    assert kv.can_fit(request, 32)
    assert not kv.can_fit(request, 33)
    kv.check()


def test_growing_reports_new_entries_and_changes_nothing_when_short() -> None:
    kv = make(num_pages=4, specs=2)
    request = ask(*range(40))
    assert kv.grow(request, 17) == (((0, 1), (1, 2)), ((0, 1), (1, 2)))
    assert kv.grow(request, 32) == ((), ())
    assert kv.grow(request, 33) == (((2, 3),), ((2, 3),))
    assert kv.grow(request, 49) is None
    assert request.pages == [[1, 2, 3], [1, 2, 3]]
    assert kv.usage == 1.0
    kv.check()


def test_only_computed_pages_are_found() -> None:
    kv = make()
    request = ask(*range(40))
    kv.adopt_prefix(request)
    kv.grow(request, 40)
    for num_computed, expected in ((15, 0), (16, 16), (31, 16), (39, 32)):
        request.num_computed = num_computed
        kv.commit(request)
        assert kv.match_prefix(ask(*range(40))) == expected


def test_a_released_request_finds_its_own_pages_again_with_its_output() -> None:
    kv = make()
    request = ask(*range(20))
    request.output_ids.extend(range(50, 70))
    run(kv, request)
    kv.release(request)
    assert request.pages == []
    kv.check()
    request.num_computed = 0
    kv.adopt_prefix(request)
    assert request.num_cached == 32
    kv.check()


def test_new_pages_after_a_release_are_indexed_again() -> None:
    kv = make()
    request = run(kv, ask(*range(40)))
    kv.release(request)
    assert kv.reset_prefix_cache()
    kv.grow(request, 40)
    kv.commit(request)
    assert kv.match_prefix(ask(*range(40))) == 32


@pytest.mark.parametrize(
    "params", [SamplingParams(skip_reading_prefix_cache=True), SamplingParams(prompt_logprobs=1)], ids=["skip", "plp"]
)
def test_requests_that_must_compute_their_whole_prompt_read_no_cache_but_fill_it(params: SamplingParams) -> None:
    kv = make()
    finish(kv, run(kv, ask(*range(40), params=params)))
    assert kv.match_prefix(ask(*range(40), params=params)) == 0
    assert kv.match_prefix(ask(*range(40))) == 32


def test_without_prefix_caching_nothing_is_found() -> None:
    kv = make(caching=False)
    finish(kv, run(kv, ask(*range(40))))
    assert kv.match_prefix(ask(*range(40))) == 0
    kv.check()


def test_pfx_03_a_hit_needs_the_same_salt_and_adapter() -> None:
    kv = make(num_pages=30)
    kinds: list[dict[str, Any]] = [{}, {"cache_salt": "x"}, {"cache_salt": "y"}, {"adapter_id": "x"}]
    for kind in kinds:
        assert kv.match_prefix(ask(*range(40), **kind)) == 0
        finish(kv, run(kv, ask(*range(40), **kind)))
    assert [kv.match_prefix(ask(*range(40), **kind)) for kind in kinds] == [32] * 4


def test_the_cache_is_reset_only_when_nobody_holds_pages() -> None:
    kv = make()
    request = run(kv, ask(*range(40)))
    assert not kv.reset_prefix_cache()
    assert kv.match_prefix(ask(*range(40))) == 32
    finish(kv, request)
    assert kv.reset_prefix_cache()
    assert kv.match_prefix(ask(*range(40))) == 0
    kv.check()


def test_a_page_is_hashed_once_however_often_it_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []
    extend = PageHasher.extend

    def counting(
        self: PageHasher, request: Request, digests: list[bytes], contents: list[bytes], num_pages: int
    ) -> None:
        before = len(digests)
        extend(self, request, digests, contents, num_pages)
        hashed.extend(range(before, len(digests)))

    monkeypatch.setattr(PageHasher, "extend", counting)
    kv = make()
    request = ask(*range(100))
    for _ in range(5):
        kv.match_prefix(request)
    run(kv, request)
    kv.release(request)
    kv.adopt_prefix(request)
    assert hashed == list(range(6))


def test_check_finds_a_page_that_its_holder_lost() -> None:
    kv = make()
    request = run(kv, ask(*range(40)))
    request.pages[0].pop()
    with pytest.raises(RuntimeError, match="page 3 of group 0 counts 1 holders and is in the page tables of 0"):
        kv.check()


def test_adopting_twice_is_an_error() -> None:
    kv = make()
    request = run(kv, ask(*range(40)))
    with pytest.raises(RuntimeError, match="holds pages already"):
        kv.adopt_prefix(request)


def test_a_finished_request_leaves_no_record() -> None:
    kv = make()
    for i in range(20):
        finish(kv, run(kv, ask(*range(i, i + 40))))
    assert kv._records == {}


# Forks


@pytest.mark.parametrize("specs", [1, 2])
@pytest.mark.parametrize(
    ("num_prompt", "num_shared", "is_copied"), [(1, 0, False), (16, 0, True), (17, 1, False), (18, 1, True)]
)
def test_a_fork_shares_full_pages_and_copies_the_one_it_will_write(
    num_prompt: int, num_shared: int, is_copied: bool, specs: int
) -> None:
    kv = make(specs=specs, caching=False)
    first = ask(*range(num_prompt))
    kv.adopt_prefix(first)
    kv.grow(first, num_prompt)
    num_free = kv.num_free_pages
    second = ask(*range(num_prompt))
    copies = kv.fork(second, first)
    own = num_shared + 2  # the pages of the first one came before
    expected = ((num_shared + 1, own),) if is_copied else ()
    assert copies == (expected,) * specs
    assert second.pages == [[*range(1, num_shared + 1), own]] * specs
    assert second.num_cached == second.num_computed == num_prompt - 1
    assert kv.num_free_pages == num_free - 1
    kv.check()
    finish(kv, first)
    kv.check()
    assert kv.num_free_pages == 9 - len(second.pages[0]) - is_copied  # held until the step is planned
    kv.let_go_of_copied()
    kv.check()
    assert kv.num_free_pages == 9 - len(second.pages[0])
    finish(kv, second)
    assert kv.num_free_pages == 9 and kv._records == {}


def test_a_fork_without_a_page_left_changes_nothing() -> None:
    kv = make(num_pages=3)
    first = run(kv, ask(*range(20)))
    second = ask(*range(20))
    assert kv.fork(second, first) is None
    assert (second.pages, second.num_computed, second.num_cached) == ([], 0, 0)
    kv.check()
    with pytest.raises(RuntimeError, match="holds pages already"):
        kv.fork(first, first)


def test_a_page_shared_before_it_was_indexed_is_indexed_by_whoever_commits_first() -> None:
    kv = make()
    first, second = ask(*range(40)), ask(*range(40))
    kv.adopt_prefix(first)
    kv.grow(first, 40)
    kv.fork(second, first)
    finish(kv, first)  # preempted or aborted before its step was collected: it commits nothing
    assert kv.match_prefix(ask(*range(40))) == 0
    second.num_computed = 40
    kv.commit(second)
    assert kv.match_prefix(ask(*range(40))) == 32
    third = ask(*range(40))
    kv.fork(third, second)
    third.num_computed = 40
    kv.commit(third)
    assert kv.match_prefix(ask(*range(40))) == 32
    kv.check()
    for request in (second, third):
        finish(kv, request)
    kv.check()
    assert kv.match_prefix(ask(*range(40))) == 32
