"""Prompts that are scored, and answers of the executor that do not fit what was asked."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxllm.errors import CapacityError, EngineDead, RequestError
from jaxllm.scheduler.answers import PromptScores
from jaxllm.types.request import FinishReason, Request
from jaxllm.types.sampling import SamplingParams
from jaxllm.types.step import Logprobs, PromptLogprobs
from tests.scheduler.driver import Driver

ONLY_SCORED = SamplingParams(max_tokens=0, prompt_logprobs=0, logprobs=0)
SCORED = SamplingParams(max_tokens=6, prompt_logprobs=0, logprobs=0, ignore_eos=True)


def prompt(num_tokens: int, first: int = 0) -> tuple[int, ...]:
    return tuple((first * 7 + 3 * i) % 29 for i in range(num_tokens))


def columns(*token_ids: int) -> Logprobs:
    num = len(token_ids)
    values = [-float(i) for i in token_ids]
    return Logprobs(list(token_ids), values, [1] * num, [[i] for i in token_ids], [[v] for v in values])


# Prompts that are only scored


@pytest.mark.parametrize("budget", [64, 5, 1])
@pytest.mark.parametrize("num_prompt", [1, 2, 9, 16])
def test_a_prompt_that_is_only_scored_ends_by_length_without_a_token(num_prompt: int, budget: int) -> None:
    driver = Driver(num_pages=30, max_num_batched_tokens=budget)
    request = driver.add(prompt(num_prompt), ONLY_SCORED)
    driver.drain()
    assert (request.output_ids, request.finish_reason, request.stop_reason) == ([], FinishReason.LENGTH, None)
    assert len(driver.prompt_scores[request]) == num_prompt - 1
    assert driver.num_prompt_computed == num_prompt
    driver.retire()


@pytest.mark.parametrize(("num_prompt", "is_accepted"), [(18, True), (19, True), (20, True), (21, False)])
def test_sch_03_a_prompt_that_is_only_scored_may_fill_the_whole_length(num_prompt: int, is_accepted: bool) -> None:
    driver = Driver(num_pages=30, max_model_len=20)
    if not is_accepted:
        with pytest.raises(RequestError, match=r"21 tokens; accepted: 1 to 20, max_model_len=20"):
            driver.add(prompt(num_prompt), ONLY_SCORED)
        return
    request = driver.add(prompt(num_prompt), ONLY_SCORED)
    driver.drain()
    assert (request.num_tokens, request.finish_reason) == (num_prompt, FinishReason.LENGTH)
    driver.retire()


@pytest.mark.parametrize("num_prompt", [18, 19, 20, 21])
def test_sch_03_lengths_around_the_longest_give_what_is_left_or_are_refused(num_prompt: int) -> None:
    driver = Driver(num_pages=30, max_model_len=20)
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    if num_prompt >= 20:
        with pytest.raises(RequestError, match=rf"{num_prompt} tokens; accepted: 1 to 19, .*max_model_len=20"):
            driver.add(prompt(num_prompt), params)
        assert not driver.scheduler.requests
    else:
        request = driver.add(prompt(num_prompt), params)
        driver.drain()
        assert (request.num_output_tokens, request.finish_reason) == (20 - num_prompt, FinishReason.LENGTH)
    after = driver.add(prompt(3), SamplingParams(max_tokens=2, ignore_eos=True))
    driver.drain()
    assert after.num_output_tokens == 2


def test_a_prompt_that_is_only_scored_may_fill_all_pages_but_not_more() -> None:
    driver = Driver(num_pages=4, page_size=4)
    driver.add(prompt(12), ONLY_SCORED)
    with pytest.raises(CapacityError, match="13 tokens; accepted: at most 12"):
        driver.add(prompt(13), ONLY_SCORED)
    driver.drain()
    driver.retire()


def test_siblings_of_a_prompt_that_is_only_scored_end_too() -> None:
    driver = Driver(num_pages=30)
    family = driver.add_family(3, prompt(9), ONLY_SCORED)
    driver.drain()
    assert [(r.output_ids, r.finish_reason) for r in family] == [([], FinishReason.LENGTH)] * 3
    driver.retire()


# Scores, once each


def test_scores_come_with_the_step_that_computes_them() -> None:
    driver = Driver(num_pages=30, max_num_batched_tokens=4)
    request = driver.add(prompt(9), SCORED)
    counts: list[tuple[int, int]] = []
    for _ in range(4):
        driver.step()
        counts.append((len(driver.prompt_scores[request]), len(driver.streamed[request])))
    assert counts == [(4, 0), (8, 0), (8, 1), (8, 2)]
    driver.drain()
    driver.retire()


@pytest.mark.parametrize("params", [SCORED, replace(SCORED, max_tokens=0)], ids=["generates", "only scored"])
def test_a_scored_request_that_is_preempted_gives_each_position_once(params: SamplingParams) -> None:
    """The driver fails on a position that comes twice, is left out, or has another score than alone."""
    driver = Driver(num_pages=7, page_size=4, max_num_batched_tokens=6)  # 6 pages
    driver.add(prompt(7, 3), SamplingParams(max_tokens=17, ignore_eos=True))
    request = driver.add(prompt(15), params)
    driver.plan()
    driver.plan()
    assert request.num_in_flight > 0
    driver.scheduler._preempt(request, _EmptyPlan(driver))  # type: ignore[arg-type]
    driver.drain()
    assert request.num_preemptions >= 1
    assert len(driver.prompt_scores[request]) == 14
    driver.retire()


class _EmptyPlan:
    def __init__(self, driver: Driver) -> None:
        self.withdraw = driver.kv.release


def test_parts_are_cut_where_they_were_passed_on_before() -> None:
    scores = PromptScores()
    request = Request("r", prompt(9), SCORED, 0.0)
    assert scores.unseen(request, None) is None
    part = PromptLogprobs(1, columns(5, 6, 7))
    assert scores.unseen(request, part) is part
    assert scores.unseen(request, PromptLogprobs(1, columns(5, 6))) is None
    assert scores.unseen(request, PromptLogprobs(2, columns(6, 7, 8, 9))) == PromptLogprobs(4, columns(8, 9))
    with pytest.raises(EngineDead, match="request r is scored from 7 on, not from 6"):
        scores.unseen(request, PromptLogprobs(7, columns(1)))
    scores.forget(request)
    assert len(scores) == 0


# Answers that do not fit


def test_log_probabilities_that_are_missing_are_an_executor_fault() -> None:
    driver = Driver()
    driver.add(prompt(5), SCORED)
    driver.plan()
    plan, output = driver.submitted.popleft()
    step = driver.scheduler._in_flight[0]
    for broken, message in (
        (replace(output, logprobs={}), "logprobs=None for request r0; accepted: log probabilities at positions: 1"),
        (replace(output, logprobs={"r0": columns(1, 2)}), "accepted: log probabilities at positions: 1"),
        (replace(output, prompt_logprobs={}), "prompt_logprobs=None .* of the 4 prompt tokens from position 1 on"),
        (replace(output, prompt_logprobs={"r0": PromptLogprobs(1, columns(1, 2, 3))}), "the 4 prompt tokens"),
        (replace(output, prompt_logprobs={"r0": PromptLogprobs(2, columns(1, 2, 3, 4))}), "the 4 prompt tokens"),
    ):
        driver.scheduler._in_flight.appendleft(step)
        with pytest.raises(EngineDead, match=message):
            driver.scheduler.update(plan, broken)
