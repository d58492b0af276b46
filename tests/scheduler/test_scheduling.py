"""Budgets, admission and preemption: small tables with every number worked out by hand."""

from __future__ import annotations

import pytest

from jaxllm.errors import CapacityError, ConfigError, EngineDead, RequestError
from jaxllm.scheduler.policies.fcfs import FirstComeFirstServed
from jaxllm.scheduler.policy import SchedulerView
from jaxllm.types.request import FinishReason, Request, RequestStatus
from jaxllm.types.sampling import SamplingParams
from jaxllm.types.step import SchedulerOutput, StepOutput
from tests.scheduler.driver import Driver, make_kv
from tests.scheduler.paged_device import solo_run


def prompt(num_tokens: int, first: int = 0) -> tuple[int, ...]:
    return tuple((first * 7 + 3 * i) % 29 for i in range(num_tokens))


def lasting(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def split(plan: SchedulerOutput | None) -> dict[str, int]:
    assert plan is not None
    return dict(zip(plan.rows.request_ids, plan.rows.num_tokens.tolist(), strict=True))


def roomy(**options: int) -> Driver:
    return Driver(**{"num_pages": 1000, "max_model_len": 2000, **options})


class OldestYields(FirstComeFirstServed):
    def victim(self, view: SchedulerView, needing: Request) -> Request:
        return view.running[0]


# Budgets


def test_long_prompts_share_the_budget_in_order_and_decodes_go_first() -> None:
    driver = roomy(max_num_batched_tokens=100, max_num_seqs=8)
    for i, num_tokens in enumerate((70, 140, 20)):
        driver.add(prompt(num_tokens, i), lasting(50))
    assert split(driver.step()) == {"r0": 70, "r1": 30}
    plan = driver.step()
    assert split(plan) == {"r0": 1, "r1": 99}
    assert plan is not None and plan.rows.num_decode == 1 and plan.rows.samples.tolist() == [True, False]
    plan = driver.step()
    assert split(plan) == {"r0": 1, "r1": 11, "r2": 20}
    assert plan is not None and plan.rows.samples.tolist() == [True, True, True]
    plan = driver.step()
    assert split(plan) == {"r0": 1, "r1": 1, "r2": 1}
    assert plan is not None and plan.rows.num_decode == 3 and plan.rows.starts.tolist() == [72, 140, 20]


def test_decode_rows_come_first_whatever_the_order_of_admission() -> None:
    driver = roomy(max_num_batched_tokens=8, max_num_seqs=8)
    driver.add(prompt(20), lasting(9))
    driver.add(prompt(3, 1), lasting(9))
    for _ in range(3):
        driver.step()
    driver.add(prompt(20, 2), lasting(9))
    plan = driver.step()
    assert split(plan) == {"r0": 1, "r1": 1, "r2": 6}
    driver.add(prompt(1, 3), lasting(9))
    driver.step()
    plan = driver.step()  # r2 ends its prompt with 2 tokens, r3 starts with 1: neither is a decode
    assert plan is not None
    assert list(split(plan).items()) == [("r0", 1), ("r1", 1), ("r2", 6)]
    plan = driver.step()
    assert plan is not None
    assert list(split(plan).items()) == [("r0", 1), ("r1", 1), ("r2", 2), ("r3", 1)]
    assert plan.rows.num_decode == 2


def test_a_small_budget_serves_running_requests_in_list_order() -> None:
    driver = roomy(max_num_batched_tokens=2, max_num_seqs=8)
    for i in range(3):
        driver.add(prompt(2, i), lasting(2))
    assert [split(driver.step()) for _ in range(5)] == [
        {"r0": 2},
        {"r0": 1, "r1": 1},
        {"r1": 1, "r2": 1},
        {"r1": 1, "r2": 1},
        {"r2": 1},
    ]
    driver.check_drained()


def test_max_num_seqs_bounds_the_running_and_slots_are_reused_smallest_first() -> None:
    driver = roomy(max_num_seqs=2)
    for i in range(4):
        driver.add(prompt(3, i), lasting(2 if i == 0 else 4))
    assert split(driver.step()) == {"r0": 3, "r1": 3}
    assert driver.scheduler.num_running == 2 and driver.scheduler.num_waiting == 2
    driver.step()  # r0 ends
    plan = driver.step()
    assert plan is not None
    assert plan.finished == ("r0",)
    assert [(new.request_id, new.slot) for new in plan.new] == [("r2", 0)]
    driver.drain()


def test_without_chunks_a_prompt_waits_for_a_step_that_holds_it_whole() -> None:
    driver = roomy(chunked=False, max_num_batched_tokens=20, max_model_len=20)
    for i, num_tokens in enumerate((12, 10, 2)):
        driver.add(prompt(num_tokens, i), lasting(5))
    assert split(driver.step()) == {"r0": 12}  # r2 would fit, but does not overtake
    assert split(driver.step()) == {"r0": 1, "r1": 10, "r2": 2}
    driver.drain()


def test_without_chunks_a_cached_prefix_does_not_count_against_the_budget() -> None:
    driver = roomy(chunked=False, max_num_batched_tokens=20, max_model_len=20)
    driver.add(prompt(17), lasting(1))
    driver.step()
    driver.add(prompt(10, 5), lasting(2))
    driver.add(prompt(17), lasting(1))
    assert split(driver.step()) == {"r1": 10, "r2": 1}


def test_without_chunks_the_budget_must_hold_the_longest_sequence() -> None:
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens=16 is too small.*max_model_len=64"):
        Driver(chunked=False)


def test_a_request_is_told_whole_on_entry_and_by_its_new_pages_later() -> None:
    driver = Driver(page_size=4, max_num_batched_tokens=6)
    driver.add(prompt(9), lasting(4))
    plans = [driver.step() for _ in range(4)]
    assert all(plan is not None for plan in plans)
    new = plans[0].new[0]  # type: ignore[union-attr]
    assert (new.token_ids, new.num_prompt_tokens, new.num_cached, new.slot) == (prompt(9), 9, 0, 0)
    entries = [[(d.indices.tolist(), d.pages.tolist()) for d in plan.page_diffs] for plan in plans if plan]
    assert entries == [[([0, 1], [1, 2])], [([2], [3])], [([], [])], [([], [])]]


# Prefix cache


@pytest.mark.parametrize(
    ("num_tokens", "cached", "cached_longer", "partial"),
    [
        *[(15, 0, 0, False), (16, 0, 16, False), (17, 16, 16, False), (32, 16, 32, False)],
        *[(15, 14, 15, True), (16, 15, 16, True), (17, 16, 16, True), (32, 31, 32, True)],  # one token: not worth it
    ],
)
def test_sch_04_a_prompt_sent_twice_gives_the_same_from_the_cache(
    num_tokens: int, cached: int, cached_longer: int, partial: bool
) -> None:
    driver = Driver(page_size=16, num_pages=20, partial=partial)
    first = driver.add(prompt(num_tokens), lasting(20))
    driver.drain()
    second = driver.add(prompt(num_tokens), lasting(20))
    longer = driver.add(prompt(num_tokens) + prompt(9, 4), lasting(20))
    plan = driver.plan()
    assert plan is not None and plan.new[0].num_cached == second.num_cached == cached
    driver.drain()
    assert longer.num_cached == cached_longer
    assert first.output_ids == second.output_ids
    driver.retire()


def test_prefix_counters_count_tokens_once_a_request() -> None:
    driver = Driver(page_size=4, num_pages=20)
    for _ in range(2):
        driver.add(prompt(10), lasting(3))
        driver.drain()
    assert (driver.scheduler.prefix_queries, driver.scheduler.prefix_hits) == (20, 9)  # of the last page one is copied


# Admission and preemption


def test_a_request_is_admitted_only_if_its_whole_sequence_fits_now() -> None:
    driver = Driver(num_pages=9, page_size=4, max_num_batched_tokens=8)  # 8 pages
    driver.add(prompt(14), lasting(3))  # 4 pages
    driver.add(prompt(17, 1), lasting(3))  # 5 pages, the first piece would need 1
    driver.add(prompt(1, 2), lasting(3))
    driver.step()
    assert split(driver.step()) == {"r0": 6}  # r1 does not fit, r2 does not overtake
    assert driver.scheduler.num_waiting == 2
    driver.drain()
    driver.retire()


def test_the_most_recently_admitted_yields_and_waits_in_front() -> None:
    driver = Driver(num_pages=7, page_size=4, max_num_seqs=3)  # 6 pages
    requests = [driver.add(prompt(6, i), lasting(9)) for i in range(3)]  # 2 pages each
    late = driver.add(prompt(2, 3), lasting(1))
    for _ in range(3):
        driver.step()  # 8 tokens computed each: full
    plan = driver.step()
    assert plan is not None
    assert plan.preempted == ("r2",)
    assert split(plan) == {"r0": 1, "r1": 1}  # each takes one of the pages of r2
    assert requests[2].status is RequestStatus.PREEMPTED
    assert (requests[2].num_computed, requests[2].num_preemptions, requests[2].slot) == (0, 1, None)
    assert [r.request_id for r in driver.scheduler._waiting.view()] == ["r2", "r3"]
    assert late.num_computed == 0
    driver.drain()
    driver.retire()


def test_a_victim_that_had_its_piece_in_this_step_loses_it() -> None:
    driver = Driver(num_pages=5, page_size=4, policy=OldestYields())  # 4 pages
    first = driver.add(prompt(4), lasting(9))
    driver.add(prompt(7, 1), lasting(9))
    driver.step()  # 1 page and 2
    driver.step()  # 2 and 2: full
    plan = driver.step()  # r0 has its piece when r1 needs a third page
    assert plan is not None
    assert (split(plan), plan.preempted) == ({"r1": 1}, ("r0",))
    assert plan.page_diffs[0].slots.tolist() == [1]
    assert (first.num_in_flight, first.num_pending, first.num_output_tokens) == (0, 0, 2)
    driver.drain()
    driver.retire()


def test_a_request_that_is_its_own_victim_ends_the_running_loop() -> None:
    driver = Driver(num_pages=5, page_size=4)  # 4 pages
    driver.add(prompt(7), lasting(5))
    last = driver.add(prompt(8, 1), lasting(5))
    driver.step()  # r0: 7 in 2 pages, r1: 8 in 2 pages
    plan = driver.step()
    assert plan is not None
    assert split(plan) == {"r0": 1}
    assert plan.preempted == ("r1",)
    assert last.num_output_tokens == 1  # what it sampled stays
    assert driver.scheduler.num_running == 1
    driver.drain()
    driver.retire()


@pytest.mark.parametrize("caching", [False, True])
def test_sch_02_a_preempted_request_gives_what_it_gives_alone(caching: bool) -> None:
    driver = Driver(num_pages=7, page_size=16, max_model_len=128, max_num_batched_tokens=64, caching=caching)
    requests = [driver.add(prompt(34, i), lasting(35)) for i in range(2)]  # 5 pages each when done, 6 in all
    driver.drain()
    assert driver.scheduler.num_preemptions >= 1
    for request in requests:
        output, reason, _ = solo_run(request.prompt_ids, request.params, eos_ids=(), max_len=128)
        assert (tuple(request.output_ids), request.finish_reason) == (output, reason)
        assert len(output) == 35


def test_a_sequence_that_fills_all_of_memory_ends_by_length() -> None:
    driver = Driver(num_pages=4, page_size=4, max_model_len=64)  # 12 tokens
    request = driver.add(prompt(10), lasting(50))
    other = driver.add(prompt(3, 1), lasting(50))
    driver.drain()
    assert request.finish_reason is other.finish_reason is FinishReason.LENGTH
    assert request.num_tokens == other.num_tokens == 13  # the last is sampled, and needs no page


def test_nobody_is_given_more_than_its_full_length_with_a_step_in_flight() -> None:
    driver = roomy()
    request = driver.add(prompt(3), lasting(2))
    assert split(driver.plan()) == {"r0": 3}
    assert split(driver.plan()) == {"r0": 1}
    assert driver.plan() is None
    assert driver.collect() == {"r0": (request.output_ids[0],)}
    assert driver.plan() is None
    driver.collect()
    assert request.finish_reason is FinishReason.LENGTH
    driver.check_drained()


# What is refused


def test_what_can_never_run_is_refused_at_the_door() -> None:
    driver = Driver(num_pages=4, page_size=4, max_model_len=20, max_num_queued_reqs=2)
    with pytest.raises(RequestError, match="prompt has 0 tokens; accepted: 1 to 19"):
        driver.add(())
    with pytest.raises(RequestError, match="prompt has 20 tokens; accepted: 1 to 19"):
        driver.add(prompt(20))
    with pytest.raises(CapacityError, match="prompt has 13 tokens; accepted: at most 12, all that the 3 pages"):
        driver.add(prompt(13))
    request = driver.add(prompt(12))
    with pytest.raises(RequestError, match="request_id='r0' is in use"):
        driver.scheduler.add(request)
    driver.add(prompt(12))
    with pytest.raises(CapacityError, match="2 requests wait or run; accepted: at most max_num_queued_reqs=2"):
        driver.add(prompt(1))
    assert driver.scheduler.num_waiting == 2
    driver.drain()


@pytest.mark.parametrize(("num_prompt", "num_output"), [(18, 2), (19, 1)])
def test_sch_03_a_prompt_just_below_the_longest_gets_what_is_left(num_prompt: int, num_output: int) -> None:
    driver = roomy(max_model_len=20)
    request = driver.add(prompt(num_prompt), SamplingParams(max_tokens=None, ignore_eos=True))
    driver.drain()
    assert (request.num_output_tokens, request.finish_reason) == (num_output, FinishReason.LENGTH)


def test_an_answer_for_another_step_or_without_a_token_is_an_executor_fault() -> None:
    driver = roomy()
    driver.add(prompt(3))
    plan = driver.scheduler.schedule(0.0)
    assert plan is not None
    with pytest.raises(EngineDead, match="step 0 is next to collect; got step 0, output 1"):
        driver.scheduler.update(plan, StepOutput(1, {}))
    with pytest.raises(EngineDead, match=r"step 0 answered \(\) for request r0; accepted: one token"):
        driver.scheduler.update(plan, StepOutput(0, {}))
    with pytest.raises(EngineDead, match="step None is next"):
        driver.scheduler.update(plan, StepOutput(0, {}))


def test_an_empty_scheduler_plans_nothing() -> None:
    driver = Driver()
    assert driver.plan() is None
    assert not driver.scheduler.has_unfinished
    assert make_kv(4, 4).usage == 0.0
