"""What may wait, for how long, and how prompts share steps with what decodes."""

from __future__ import annotations

import pytest

from jaxllm.errors import CapacityError
from jaxllm.types.request import FinishReason, Request
from jaxllm.types.sampling import SamplingParams
from jaxllm.types.service import ServiceParams
from jaxllm.types.step import SchedulerOutput
from tests.scheduler.driver import Driver


def tokens_of(plan: SchedulerOutput | None, request: Request) -> int:
    assert plan is not None
    counts = dict(zip(plan.rows.request_ids, plan.rows.num_tokens.tolist(), strict=True))
    return counts.get(request.request_id, 0)


def test_prompts_are_refused_while_as_many_tokens_wait_as_may() -> None:
    driver = Driver(max_num_queued_tokens=10, max_num_seqs=1)
    driver.add((1,) * 9)
    driver.add((2,) * 6)
    with pytest.raises(CapacityError, match="15 prompt tokens wait; accepted: below max_num_queued_tokens=10"):
        driver.add((3,) * 2)
    driver.step()  # admits the first
    driver.add((3,) * 2)
    driver.drain()


def test_a_request_that_waits_past_its_deadline_ends_without_output() -> None:
    driver = Driver(max_num_seqs=1)
    running = driver.add((1,) * 3, SamplingParams(max_tokens=8, ignore_eos=True))
    waiting = driver.add((2,) * 3, service=ServiceParams(deadline_s=2.5), arrival_s=1.0)
    driver.step()
    assert driver.scheduler.expire(3.4) == []
    assert driver.scheduler.expire(3.5) == [waiting]
    assert (waiting.finish_reason, waiting.stop_reason, waiting.output_ids) == (FinishReason.ABORT, "deadline", [])
    driver.drain()
    assert running.num_output_tokens == 8


def test_a_request_that_runs_past_its_deadline_keeps_what_it_has_and_gives_its_pages_back() -> None:
    driver = Driver(default_deadline_s=3.0)
    request = driver.add((1,) * 3, SamplingParams(max_tokens=30, ignore_eos=True))
    longer = driver.add((2,) * 3, SamplingParams(max_tokens=5, ignore_eos=True), service=ServiceParams(deadline_s=99.0))
    driver.step()
    driver.plan()  # one token is on its way when the time has come
    assert driver.scheduler.expire(3.0) == [request]
    driver.collect()
    assert request.num_output_tokens == 1
    driver.drain()
    assert longer.finish_reason is FinishReason.LENGTH
    driver.retire()


def test_requests_that_ended_are_not_kept_until_their_deadline() -> None:
    driver = Driver(default_deadline_s=1e6)
    for _ in range(200):
        driver.add((1,) * 3, SamplingParams(max_tokens=1))
        driver.drain()
        driver.retire()
    assert len(driver.scheduler._deadlines) < 100


def test_a_request_that_ended_in_time_is_not_ended_again() -> None:
    driver = Driver(default_deadline_s=50.0)
    driver.add((1,) * 3)
    driver.drain()
    assert driver.scheduler.expire(60.0) == []


def test_a_long_prompt_takes_its_share_of_a_step_that_others_share_and_all_of_one_that_it_has_alone() -> None:
    driver = Driver(long_prefill_token_threshold=5, num_pages=30)
    alone = driver.add((1,) * 30, SamplingParams(max_tokens=2, ignore_eos=True))
    assert tokens_of(driver.step(), alone) == 16
    other = driver.add((2,) * 30)
    plan = driver.step()
    assert (tokens_of(plan, alone), tokens_of(plan, other)) == (5, 5)
    driver.drain()


def test_prompts_leave_decodes_their_share_of_the_budget() -> None:
    driver = Driver(decode_budget_share=0.75, num_pages=30)
    driver.add((1,) * 4, SamplingParams(max_tokens=12, ignore_eos=True))
    driver.step()
    long = driver.add((2,) * 20, SamplingParams(max_tokens=2, ignore_eos=True))
    assert [tokens_of(driver.step(), long) for _ in range(3)] == [4, 4, 4]
    driver.drain()


def test_no_more_prompts_are_half_computed_than_may_be_and_shorter_ones_pass_by() -> None:
    driver = Driver(max_num_partial_prefills=1, long_prefill_token_threshold=4, num_pages=40)
    first, second = driver.add((1,) * 20), driver.add((2,) * 20)
    short = driver.add((3,) * 3)
    plan = driver.step()
    assert [tokens_of(plan, r) for r in (first, second, short)] == [4, 0, 3]
    driver.drain()


def test_long_prompts_have_a_cap_of_their_own() -> None:
    driver = Driver(max_long_partial_prefills=1, long_prefill_token_threshold=6, num_pages=40)
    first, second = driver.add((1,) * 20), driver.add((2,) * 20)
    third = driver.add((3,) * 6)
    plan = driver.step()
    assert [tokens_of(plan, r) for r in (first, second, third)] == [6, 0, 6]
    driver.drain()


@pytest.mark.parametrize("sharing", [True, False])
def test_a_prefix_that_another_request_computes_is_computed_once(sharing: bool) -> None:
    driver = Driver(num_pages=60, max_num_seqs=8, in_batch_prefix_sharing=sharing, max_num_batched_tokens=64)
    prefix = tuple(range(20, 52))
    requests = [driver.add((*prefix, i, i)) for i in range(4)]
    driver.drain()
    for request in requests:
        driver.check_result(request)
    least = 34 + 3 * 2
    assert driver.num_prompt_computed == least if sharing else driver.num_prompt_computed > least


def test_who_waits_for_a_prefix_computes_it_alone_when_the_other_ends() -> None:
    driver = Driver(num_pages=60, max_num_batched_tokens=8)
    prefix = tuple(range(20, 52))
    first, second = driver.add((*prefix, 1)), driver.add((*prefix, 2))
    plan = driver.plan()
    assert tokens_of(plan, second) == 0
    driver.abort(first.request_id)
    driver.drain()
    driver.check_result(second)


def test_a_short_common_beginning_is_not_waited_for() -> None:
    driver = Driver(num_pages=60, max_num_batched_tokens=64)
    first, second = driver.add((9, 9, 9, 9, *range(20))), driver.add((9, 9, 9, 9, *range(30, 50)))
    plan = driver.step()
    assert [tokens_of(plan, r) for r in (first, second)] == [24, 24]
    driver.drain()
