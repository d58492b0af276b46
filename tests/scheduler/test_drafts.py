"""Draft tokens: checked in one step, kept as far as they are right, forgotten without a trace where not."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from jaxllm.errors import EngineDead
from jaxllm.types.request import FinishReason, Request
from jaxllm.types.sampling import SamplingParams
from jaxllm.types.step import SchedulerOutput, StepOutput
from tests.scheduler.driver import EOS, Driver
from tests.scheduler.paged_device import VOCABULARY, continuation


def drafting(num: int = 3, **options: int) -> Driver:
    return Driver(**{"num_pages": 40, "num_speculative_tokens": num, **options})


def lasting(num: int, **extra: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": num, "ignore_eos": True, **extra})  # type: ignore[arg-type]


def right(request: Request, num: int) -> list[int]:
    return continuation(request.token_ids(), num, adapter_id=request.adapter_id, seed=request.seed)


def wrong(request: Request, num: int, num_right: int = 0) -> list[int]:
    drafts = right(request, num)
    return drafts[:num_right] + [(token + 1) % VOCABULARY for token in drafts[num_right:]]


def drafts_of(plan: SchedulerOutput | None) -> list[int]:
    assert plan is not None
    return list(map(len, plan.draft_ids))


@pytest.mark.parametrize(("num_right", "num_steps"), [(3, 1 + 5), (1, 1 + 10), (0, 1 + 19)])
def test_a_step_gives_the_drafts_that_are_right_and_one_token_more(num_right: int, num_steps: int) -> None:
    driver = drafting()
    request = driver.add((1, 2, 3), lasting(20))
    while driver.scheduler.has_unfinished:
        driver.scheduler.propose({request.request_id: wrong(request, 3, num_right)})
        before = request.num_output_tokens
        driver.step()
        left = 20 - before
        assert request.num_output_tokens - before == (min(num_right + 1, left) if before else 1)
    assert driver.num_steps == num_steps
    driver.check_result(request)
    driver.check_drained()


def test_a_row_with_drafts_is_no_decode_and_takes_their_number_of_the_budget() -> None:
    driver = drafting(4, max_num_batched_tokens=7)
    first, second = driver.add((1,), lasting(20)), driver.add((2,), lasting(20))
    driver.step()
    driver.scheduler.propose({first.request_id: right(first, 4), second.request_id: right(second, 4)})
    plan = driver.step()
    assert drafts_of(plan) == [4, 1] and plan is not None
    assert (plan.rows.num_tokens.tolist(), plan.rows.num_decode) == ([5, 2], 0)
    assert first.num_computed == 6 and second.num_computed == 3
    driver.drain()
    driver.retire()


def test_nothing_is_planned_for_a_request_whose_answer_is_on_its_way() -> None:
    driver = drafting()
    request = driver.add((1, 2, 3), lasting(9))
    driver.plan()
    assert driver.plan() is None
    driver.scheduler.propose({request.request_id: [1, 2]})  # would follow a token that is not known yet
    assert request.draft_ids == ()
    driver.collect()
    driver.scheduler.propose({request.request_id: right(request, 2), "nobody": [1]})
    driver.plan()
    assert (request.num_in_flight, request.num_placeholders, request.num_pending) == (3, 2, 1)
    assert driver.plan() is None
    driver.collect()
    assert (request.num_in_flight, request.num_placeholders, request.num_pending) == (0, 0, 0)
    driver.drain()
    driver.retire()


@pytest.mark.parametrize("max_tokens", range(1, 7))
def test_drafts_never_reach_beyond_the_full_length(max_tokens: int) -> None:
    driver = drafting()
    request = driver.add((1, 2), lasting(max_tokens))
    while driver.scheduler.has_unfinished:
        driver.scheduler.propose({request.request_id: right(request, 3)})
        plan = driver.step()
        assert plan is not None
        assert int((plan.rows.starts + plan.rows.num_tokens).max()) < 2 + max_tokens
    assert request.finish_reason is FinishReason.LENGTH
    driver.check_result(request)


def test_the_token_that_ends_a_request_ends_it_within_its_drafts() -> None:
    for seed in range(40):
        driver = drafting(6)
        params = SamplingParams(max_tokens=30, stop_token_ids=(3, 11), logprobs=0)
        request = driver.add((1, 2, 3), params, seed=seed)
        while driver.scheduler.has_unfinished:
            driver.scheduler.propose({request.request_id: right(request, 6)})
            driver.step()
        assert request.output_ids[-1] in (EOS, 3, 11) or request.num_output_tokens == 30
        driver.check_result(request)  # its log probabilities too
        driver.check_drained()


def test_drafts_cost_nobody_their_pages() -> None:
    driver = drafting(3, num_pages=5, page_size=4)  # four pages
    first, second = driver.add((1,) * 7, lasting(9)), driver.add((2,) * 7, lasting(9))
    driver.step()
    driver.scheduler.propose({first.request_id: right(first, 3), second.request_id: right(second, 3)})
    assert drafts_of(driver.step()) == []  # each has room for one token in its second page
    assert driver.scheduler.num_preemptions == 0
    driver.drain()
    driver.retire()


def test_what_rejected_drafts_wrote_is_not_found_in_the_prefix_cache() -> None:
    driver = drafting(6, page_size=4)
    request = driver.add((1, 2, 3), lasting(12))
    driver.step()
    driver.scheduler.propose({request.request_id: wrong(request, 6)})
    driver.step()
    assert request.num_computed == 4
    again = driver.add((*request.token_ids()[:3], *wrong(request, 6), 1), lasting(1))
    assert driver.kv.match_prefix(again) == 0
    driver.drain()
    driver.retire()


@pytest.mark.parametrize("is_preempted", [True, False])
def test_a_request_that_goes_while_its_drafts_are_checked_gives_everything_back(is_preempted: bool) -> None:
    driver = drafting()
    request = driver.add((1, 2, 3), lasting(9))
    driver.step()
    driver.scheduler.propose({request.request_id: right(request, 3)})
    plan = driver.plan()
    assert drafts_of(plan) == [3]
    if is_preempted:
        driver.preempt(request)
        assert request.num_placeholders == 0
    else:
        driver.abort(request.request_id)
    driver.check()
    driver.collect()
    driver.drain()
    driver.retire()


@pytest.mark.parametrize(
    ("tokens", "num_accepted", "message"),
    [
        ((), None, r"a beginning of the drafts \(.*\) and one token"),
        ((1, 1), None, "a beginning of the drafts"),
        ((0, 0, 0, 0, 0), None, "a beginning of the drafts"),
        (None, 1, "num_accepted=1 for request r0; accepted: 3, as many"),
    ],
)
def test_an_answer_that_is_no_beginning_of_the_drafts_is_an_executor_fault(
    tokens: tuple[int, ...] | None, num_accepted: int | None, message: str
) -> None:
    driver = drafting()
    request = driver.add((1, 2, 3), lasting(20))
    driver.step()
    driver.scheduler.propose({request.request_id: right(request, 3)})
    driver.plan()
    plan, output = driver.submitted.popleft()
    said = output.num_accepted if num_accepted is None else {"r0": num_accepted}
    broken: StepOutput = replace(output, tokens=output.tokens if tokens is None else {"r0": tokens}, num_accepted=said)
    with pytest.raises(EngineDead, match=message):
        driver.scheduler.update(plan, broken)


def test_drafts_of_any_quality_change_no_output() -> None:
    rng = random.Random(3)
    driver = drafting(5, num_pages=14, page_size=3, max_num_seqs=6)
    for i in range(30):
        driver.add_family(rng.randrange(1, 3), (i, 2, 3) * rng.randrange(1, 4), lasting(rng.randrange(1, 20)))
    while driver.scheduler.has_unfinished:
        driver.propose(rng)
        if driver.plan() is None or len(driver.submitted) > 1:
            driver.collect()
        driver.check()
    assert 0 < driver.num_accepted < driver.num_drafts
    assert driver.scheduler.num_preemptions > 0
    driver.retire()
    driver.check_drained()
