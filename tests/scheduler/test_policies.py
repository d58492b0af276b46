"""A wrong policy is slow, unfair or refused; it harms no memory."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import FrozenInstanceError

import pytest

from jaxllm.scheduler.guard import GuardedPolicy
from jaxllm.scheduler.policies.fcfs import FirstComeFirstServed
from jaxllm.scheduler.policy import SchedulerView
from jaxllm.types.request import Request
from jaxllm.types.sampling import SamplingParams
from tests.scheduler.driver import Driver


class Erratic(FirstComeFirstServed):
    """Answers at random, sometimes nonsense, sometimes an exception."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.fails = True

    def order(self, view: SchedulerView) -> Iterable[Request]:
        chosen = self.rng.choices([*view.waiting, *view.running], k=4)
        yield from chosen
        self._maybe_fail()

    def admit(self, request: Request, view: SchedulerView) -> bool:
        assert view.cached_prefix(request) < request.num_tokens
        self._maybe_fail()
        return self.rng.random() < 0.7

    def token_budget(self, view: SchedulerView) -> int:
        self._maybe_fail()
        return self.rng.randrange(-3, 2 * view.token_cap)

    def victim(self, view: SchedulerView, needing: Request) -> Request:
        self._maybe_fail()
        if self.fails and self.rng.random() < 0.1:
            return Request("nobody", (1,), SamplingParams(), 0.0)
        return self.rng.choice(view.running)

    def _maybe_fail(self) -> None:
        if self.fails and self.rng.random() < 0.05:
            raise ZeroDivisionError("a bug of the policy")


@pytest.mark.parametrize("seed", range(4))
def test_an_erratic_policy_corrupts_nothing_and_all_requests_end(seed: int) -> None:
    driver, rng = Driver(policy=Erratic(seed), num_pages=10), random.Random(seed)
    for _ in range(600):
        if driver.scheduler.num_waiting < 4:
            tokens = tuple(rng.randrange(3) for _ in range(rng.randrange(1, 9)))
            driver.add(tokens, SamplingParams(max_tokens=rng.randrange(1, 25)))
        if len(driver.submitted) < 2:
            driver.plan()
        driver.check()
        if driver.submitted and rng.random() < 0.6:
            driver.collect()
        driver.retire()
    assert driver.scheduler.num_policy_faults > 20
    driver.scheduler._policy = GuardedPolicy(FirstComeFirstServed())
    driver.drain()
    driver.retire()
    assert driver.all == []


def test_a_victim_that_does_not_run_is_told_of_and_the_latest_yields(caplog: pytest.LogCaptureFixture) -> None:
    class Wrong(FirstComeFirstServed):
        def victim(self, view: SchedulerView, needing: Request) -> Request:
            return next(iter(view.waiting))

    driver = Driver(policy=Wrong(), num_pages=5, page_size=4)
    for first in range(3):
        driver.add((first,) * 7, SamplingParams(max_tokens=9, ignore_eos=True))
    for _ in range(3):
        driver.step()
    assert driver.scheduler.num_policy_faults == 1
    assert "policy Wrong failed at victim (PolicyFault: victim 'r2'; accepted: one of the running" in caplog.text
    assert driver.all[1].num_preemptions == 1
    driver.drain()


def test_a_view_is_read_only_and_tells_what_there_is() -> None:
    views: list[SchedulerView] = []

    class Looking(FirstComeFirstServed):
        def admit(self, request: Request, view: SchedulerView) -> bool:
            views.append(view)
            assert request in view.waiting
            return True

    driver = Driver(policy=Looking(), num_pages=12, page_size=4, max_num_batched_tokens=16)
    for first in range(2):
        driver.add((first,) * 5, SamplingParams(max_tokens=2))
    driver.step()
    assert [(v.now_s, len(v.running), v.free_pages, v.page_size, v.token_cap) for v in views] == [
        (0.0, 0, 11, 4, 16),
        (0.0, 1, 9, 4, 16),
    ]
    with pytest.raises(FrozenInstanceError):
        views[0].free_pages = 0  # type: ignore[misc]


def test_a_policy_may_pass_over_a_request_and_it_keeps_its_place() -> None:
    class OnlyShort(FirstComeFirstServed):
        def admit(self, request: Request, view: SchedulerView) -> bool:
            return request.num_prompt_tokens < 4 or not view.running

    driver = Driver(policy=OnlyShort(), num_pages=30)
    for num_tokens in (3, 6, 2):
        driver.add((1,) * num_tokens, SamplingParams(max_tokens=3, ignore_eos=True))
    plan = driver.step()
    assert plan is not None and plan.rows.request_ids == ("r0", "r2")
    assert [r.request_id for r in driver.scheduler._waiting.view()] == ["r1"]
    driver.drain()
