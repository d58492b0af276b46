"""Siblings share a prompt: what it costs, which pages, and who waits for whom."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.errors import CapacityError, RequestError
from jaxllm.scheduler.policies.fcfs import FirstComeFirstServed
from jaxllm.scheduler.policy import SchedulerView
from jaxllm.types.request import FinishReason, Request, RequestStatus
from jaxllm.types.sampling import SamplingParams
from jaxllm.types.step import SchedulerOutput
from tests.scheduler.driver import Driver


def prompt(num_tokens: int, first: int = 0) -> tuple[int, ...]:
    return tuple((first * 7 + 3 * i) % 29 for i in range(num_tokens))


def lasting(max_tokens: int = 12) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def split(plan: SchedulerOutput | None) -> dict[str, int]:
    assert plan is not None
    return dict(zip(plan.rows.request_ids, plan.rows.num_tokens.tolist(), strict=True))


def finish(driver: Driver) -> None:
    driver.drain()
    driver.retire()
    assert driver.all == []


# What a prompt costs


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("budget", [64, 9, 6])
@pytest.mark.parametrize(("num_prompt", "num"), [(1, 4), (13, 5), (16, 5), (15, 2)])
def test_n_siblings_cost_the_prompt_once_and_a_token_each(
    num_prompt: int, num: int, budget: int, caching: bool
) -> None:
    """P + n - 1 prompt tokens, not n * P, while the first one lives and memory allows."""
    driver = Driver(num_pages=100, max_num_seqs=8, max_num_batched_tokens=budget, caching=caching)
    family = driver.add_family(num, prompt(num_prompt), lasting(30))
    driver.drain()
    assert driver.num_prompt_computed == num_prompt + num - 1
    assert driver.scheduler.num_preemptions == 0
    assert len({tuple(request.output_ids) for request in family}) == num  # each has a seed of its own
    driver.retire()


def test_siblings_that_start_late_still_share_while_the_first_one_runs() -> None:
    driver = Driver(num_pages=100, max_num_seqs=2, caching=False, max_model_len=200)
    first = driver.add(prompt(14), lasting(100))
    siblings = [driver.add(prompt(14), lasting(4), seed=i + 1, fork_of=first) for i in range(6)]
    while not all(sibling.is_finished for sibling in siblings):
        driver.step()
        assert driver.scheduler.num_running <= 2
    assert not first.is_finished
    assert driver.num_prompt_computed == 14 + 6
    finish(driver)


def test_siblings_are_no_prefix_hits() -> None:
    driver = Driver(num_pages=100)
    driver.add_family(4, prompt(14), lasting())
    driver.drain()
    assert (driver.scheduler.prefix_queries, driver.scheduler.prefix_hits) == (14, 0)


# Pages


@pytest.mark.parametrize(
    ("num_prompt", "num_shared", "is_copied"),
    [(1, 0, False), (2, 0, True), (4, 0, True), (5, 1, False), (8, 1, True), (9, 2, False), (11, 2, True)],
)
@pytest.mark.parametrize("num_groups", [1, 2])
def test_full_pages_are_shared_and_the_partial_one_is_copied(
    num_prompt: int, num_shared: int, is_copied: bool, num_groups: int
) -> None:
    driver = Driver(num_pages=30, page_size=4, num_groups=num_groups, caching=False)
    first, second, third = driver.add_family(3, prompt(num_prompt), lasting())
    plan = driver.plan()
    assert split(plan) == {"r0": num_prompt} and plan is not None and plan.page_copies == ()
    before = driver.kv.num_free_pages
    plan = driver.plan()  # the first piece is still in flight
    assert plan is not None and split(plan) == {"r0": 1, "r1": 1, "r2": 1}
    last = num_prompt - 1
    assert dict(zip(plan.rows.request_ids, plan.rows.starts.tolist(), strict=True)) == {
        **{"r0": num_prompt, "r1": last, "r2": last}
    }
    assert [new.num_cached for new in plan.new] == [last, last]
    assert driver.kv.num_free_pages == before - 2 - (num_prompt % 4 == 0)  # one a sibling; the first one's next
    for group in range(num_groups):
        for sibling in (second, third):
            assert sibling.pages[group][:-1] == first.pages[group][:num_shared]
            assert sibling.pages[group][-1] not in first.pages[group]
        source = first.pages[group][num_shared]
        expected = tuple((source, sibling.pages[group][-1]) for sibling in (second, third))
        assert plan.page_copies == () if not is_copied else plan.page_copies[group] == expected
    driver.kv.check()
    finish(driver)


def test_pages_of_an_ended_first_one_stay_as_long_as_a_sibling_reads_them() -> None:
    driver = Driver(num_pages=30, page_size=4, caching=False)
    first = driver.add(prompt(13), lasting(2))
    second = driver.add(prompt(13), lasting(20), seed=1, fork_of=first)
    for _ in range(3):
        driver.step()
    assert first.is_finished and not second.is_finished
    assert driver.kv.num_free_pages == 29 - len(second.pages[0])
    finish(driver)


def test_what_siblings_computed_is_found_once_and_by_everybody() -> None:
    driver = Driver(num_pages=40, page_size=4)
    first, second = driver.add_family(2, prompt(14), lasting(6))
    driver.plan()
    driver.plan()
    driver.abort(first.request_id)  # before what it computed was confirmed
    driver.drain()
    known = second.token_ids()
    late = driver.add(known, lasting(1))
    driver.drain()
    assert late.num_cached == (len(known) - 1) // 4 * 4
    assert late.num_cached > 14


# Who waits


def test_a_sibling_waits_until_an_earlier_plan_computed_the_whole_prompt_and_holds_nobody_up() -> None:
    driver = Driver(num_pages=30, max_num_batched_tokens=8)
    driver.add_family(3, prompt(14), lasting())
    driver.add(prompt(3, 5), lasting())
    assert split(driver.step()) == {"r0": 8}
    assert split(driver.step()) == {"r0": 6, "r3": 2}  # the siblings are passed over
    assert split(driver.step()) == {"r0": 1, "r3": 1, "r1": 1, "r2": 1}
    finish(driver)


def test_a_sibling_short_of_a_page_waits_its_turn() -> None:
    driver = Driver(num_pages=5, page_size=4, caching=False)  # 4 pages
    first = driver.add(prompt(14), lasting(2))
    second = driver.add(prompt(14), lasting(2), seed=1, fork_of=first)
    driver.step()
    plan = driver.step()
    assert split(plan) == {"r0": 1}
    assert (second.pages, second.status) == ([], RequestStatus.WAITING)
    finish(driver)


@pytest.mark.parametrize("caching", [False, True])
def test_a_sibling_of_an_ended_first_one_is_like_any_request(caching: bool) -> None:
    driver = Driver(max_num_seqs=1, caching=caching)
    first = driver.add(prompt(9), lasting(2))
    second = driver.add(prompt(9), lasting(2), seed=1, fork_of=first)
    driver.step()
    driver.step()
    assert first.is_finished
    assert split(driver.step()) == {"r1": 1 if caching else 9}
    assert second.num_cached == (8 if caching else 0)
    finish(driver)


def test_a_fork_of_nobody_is_like_any_request() -> None:
    driver = Driver()
    gone = Request("gone", prompt(5), lasting(), 0.0)
    driver.add(prompt(5), lasting(3), fork_of=gone)
    assert split(driver.step()) == {"r0": 5}
    finish(driver)


def test_a_sibling_whose_prompt_is_scored_computes_all_of_it() -> None:
    driver = Driver(num_pages=40)
    params = SamplingParams(max_tokens=3, prompt_logprobs=0)
    first = driver.add(prompt(9), params)
    driver.add(prompt(9), params, seed=1, fork_of=first)
    assert split(driver.step()) == {"r0": 9, "r1": 7}
    finish(driver)


def test_a_preempted_sibling_with_output_is_like_any_request() -> None:
    driver = Driver(num_pages=7, page_size=4, caching=False, max_num_batched_tokens=32)  # 6 pages
    first, second = driver.add_family(2, prompt(13), lasting(8))
    preempted_at = None
    while driver.scheduler.has_unfinished:
        plan = driver.step()
        if plan is not None and second.request_id in plan.preempted:
            preempted_at = second.num_output_tokens
            assert preempted_at > 0 and not first.is_finished
        elif preempted_at is not None and plan is not None and plan.new:
            assert [(new.request_id, new.num_cached) for new in plan.new] == [(second.request_id, 0)]
            assert split(plan)[second.request_id] == 13 + preempted_at
            break
    assert preempted_at is not None
    finish(driver)


class FirstYields(FirstComeFirstServed):
    def victim(self, view: SchedulerView, needing: Request) -> Request:
        return view.running[0]


@pytest.mark.parametrize("caching", [False, True])
def test_siblings_of_a_preempted_first_one_wait_for_it_to_come_back(caching: bool) -> None:
    driver = Driver(num_pages=6, page_size=4, max_num_seqs=2, caching=caching, policy=FirstYields())  # 5 pages
    first = driver.add(prompt(7), lasting(6))
    driver.add(prompt(7, 4), lasting(8))  # takes the second slot, so that the siblings start late
    siblings = [driver.add(prompt(7), lasting(6), seed=i + 1, fork_of=first) for i in range(3)]
    while first.num_preemptions == 0:
        driver.step()
    assert first.status is RequestStatus.PREEMPTED
    assert all(sibling.status is RequestStatus.WAITING for sibling in siblings)
    finish(driver)


class LastComeFirst(FirstComeFirstServed):
    def order(self, view: SchedulerView) -> Iterable[Request]:
        return reversed(list(view.waiting))


def test_a_policy_that_prefers_siblings_to_the_first_one_stalls_nobody() -> None:
    driver = Driver(num_pages=30, policy=LastComeFirst())
    driver.add_family(4, prompt(9), lasting())
    assert split(driver.step()) == {"r0": 9}
    finish(driver)
    assert driver.num_prompt_computed == 9 + 3


def test_without_chunks_a_sibling_costs_one_token_of_the_budget() -> None:
    driver = Driver(num_pages=30, chunked=False, max_num_batched_tokens=20, max_model_len=20, caching=False)
    driver.add_family(4, prompt(15), lasting(3))
    assert split(driver.step()) == {"r0": 15}
    assert split(driver.step()) == {"r0": 1, "r1": 1, "r2": 1, "r3": 1}
    finish(driver)


# What is refused


def test_a_fork_of_another_prompt_is_refused() -> None:
    driver = Driver()
    first = driver.add(prompt(5), lasting())
    with pytest.raises(RequestError, match="fork_of='r0' has another prompt_ids; accepted: a request with the same"):
        driver.add(prompt(6), lasting(), fork_of=first)
    with pytest.raises(RequestError, match="another adapter_id"):
        driver.add(prompt(5), lasting(), fork_of=first, adapter_id="a")
    with pytest.raises(RequestError, match="another cache_salt"):
        driver.add(prompt(5), lasting(), fork_of=first, cache_salt="a")
    finish(driver)


def test_the_limit_counts_each_sibling_waiting_or_running() -> None:
    driver = Driver(num_pages=40, max_num_queued_reqs=4)
    driver.add_family(3, prompt(5), lasting())
    driver.step()
    driver.step()
    assert (driver.scheduler.num_running, driver.scheduler.num_waiting) == (3, 0)
    driver.add(prompt(5, 3), lasting())
    with pytest.raises(CapacityError, match="4 requests wait or run; accepted: at most max_num_queued_reqs=4"):
        driver.add(prompt(5, 4), lasting())
    driver.abort("r1")
    driver.add(prompt(5, 4), lasting())
    finish(driver)


# Aborts


@pytest.mark.parametrize("when", range(6))
@pytest.mark.parametrize("who", range(3))
@pytest.mark.parametrize("num_in_flight", [0, 1])
def test_sch_01_an_abort_of_any_sibling_at_any_step_leaves_the_others_alone(
    who: int, when: int, num_in_flight: int
) -> None:
    driver = Driver(num_pages=30, max_num_batched_tokens=5, caching=False)
    family = driver.add_family(3, prompt(11), lasting(5))
    for _ in range(when):
        driver.plan()
        if len(driver.submitted) > num_in_flight:
            driver.collect()
    driver.abort(family[who].request_id)
    driver.check()
    driver.drain()
    assert [request.finish_reason for i, request in enumerate(family) if i != who] == [FinishReason.LENGTH] * 2
    finish(driver)


@settings(max_examples=60, derandomize=True, database=None, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    aborts=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 15)), max_size=16),
    num_pages=st.integers(6, 14),
    caching=st.booleans(),
    num_in_flight=st.integers(0, 1),
)
def test_sch_01_any_interleaving_of_aborts_leaves_no_page_slot_or_record(
    sizes: list[int], aborts: list[tuple[int, int]], num_pages: int, caching: bool, num_in_flight: int
) -> None:
    """`check_drained` looks; afterwards a request as large as all of memory must fit."""
    driver = Driver(num_pages=num_pages, max_num_batched_tokens=7, caching=caching, max_num_seqs=3)
    everybody = [r for i, num in enumerate(sizes) for r in driver.add_family(num, prompt(6 + i, i % 2), lasting(9))]
    for step in range(21):
        for at, who in aborts:
            if at == step:
                driver.abort(everybody[who % len(everybody)].request_id)
        driver.plan()
        if len(driver.submitted) > num_in_flight:
            driver.collect()
        driver.check()
    finish(driver)
    whole = driver.add(prompt(driver.kv.capacity_tokens), SamplingParams(max_tokens=1))
    assert split(driver.step())[whole.request_id] > 0
    finish(driver)


def test_a_sibling_does_not_copy_from_a_page_that_is_copied_to_in_the_same_step() -> None:
    driver = Driver(page_size=4, num_pages=40, max_num_seqs=2)
    prompt, params = (1, 2, 3, 4, 5, 6), SamplingParams(max_tokens=12, ignore_eos=True)
    driver.add(prompt, params, seed=1)
    driver.drain()
    other = driver.add((9, 9), SamplingParams(max_tokens=30, ignore_eos=True))
    first, sibling = driver.add_family(2, prompt, params)
    driver.step()
    driver.preempt(first)
    driver.abort(other.request_id)
    plan = driver.plan()
    assert plan is not None and [new.request_id for new in plan.new] == [first.request_id]
    assert plan.page_copies
    plan = driver.plan()
    assert plan is not None and sibling.request_id in [new.request_id for new in plan.new]
    driver.drain()
    driver.retire()
