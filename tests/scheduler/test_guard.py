"""A policy that fails, does not end or talks nonsense is reported and replaced for the step."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from jaxllm.scheduler.guard import GuardedPolicy
from jaxllm.scheduler.policies.fcfs import FirstComeFirstServed
from jaxllm.scheduler.policy import SchedulerView
from jaxllm.types.request import Request
from jaxllm.types.sampling import SamplingParams
from tests.scheduler.driver import Driver


class Misbehaving(FirstComeFirstServed):
    """Answers each question as `misdeeds` has it, or as fcfs does."""

    def __init__(self, **misdeeds: Callable[..., Any]) -> None:
        self.misdeeds = misdeeds

    def order(self, view: SchedulerView) -> Iterable[Request]:
        return self.misdeeds.get("order", super().order)(view)

    def admit(self, request: Request, view: SchedulerView) -> bool:
        return self.misdeeds.get("admit", super().admit)(request, view)

    def token_budget(self, view: SchedulerView) -> int:
        return self.misdeeds.get("token_budget", super().token_budget)(view)

    def victim(self, view: SchedulerView, needing: Request) -> Request:
        return self.misdeeds.get("victim", super().victim)(view, needing)

    def preempt(self, candidate: Request, view: SchedulerView) -> Request | None:
        return self.misdeeds.get("preempt", lambda *_: None)(candidate, view)


def fail(*_: object) -> Any:
    raise ZeroDivisionError("a bug")


class Unprintable:
    def __repr__(self) -> str:
        raise ZeroDivisionError("a bug in a bug")


def endless(view: SchedulerView) -> Iterator[Request]:
    while True:
        yield from view.waiting


ANSWERS: dict[str, list[Callable[..., Any]]] = {
    "order": [
        *[fail, endless, lambda v: None, lambda v: 7, lambda v: [None], lambda v: list(v.running), lambda v: []],
        lambda v: [Request("nobody", (1,), SamplingParams(), 0.0)],
        lambda v: [*v.waiting, *v.waiting][::-1],
        lambda v: [Unprintable()],
        lambda v: sys.exit(1),
    ],
    "admit": [fail, lambda r, v: None, lambda r, v: "yes", lambda r, v: True],
    "token_budget": [fail, *[lambda v, x=x: x for x in (None, "9", 2.5, float("nan"), -3, 10**30, True, 3)]],
    "victim": [fail, lambda v, n: None, lambda v, n: next(iter(v.waiting), None), lambda v, n: n, lambda v, n: "r0"],
    "preempt": [fail, lambda c, v: c, lambda c, v: v.running[0], lambda c, v: 3, lambda c, v: v.running[-1]],
}


def run(driver: Driver, rng: random.Random, num_steps: int) -> None:
    for _ in range(num_steps):
        if driver.scheduler.num_waiting < 3:
            tokens = tuple(rng.randrange(3) for _ in range(rng.randrange(1, 9)))
            driver.add(tokens, SamplingParams(max_tokens=rng.randrange(1, 20)))
        if len(driver.submitted) < 2:
            driver.plan()
        driver.check()
        if driver.submitted:
            driver.collect()
        driver.retire()


@pytest.mark.parametrize("seed", range(100))
def test_ill_behaved_policies_do_no_harm(seed: int) -> None:
    rng = random.Random(seed)
    chosen = {question: rng.choice(answers) for question, answers in ANSWERS.items() if rng.random() < 0.6}
    policy = GuardedPolicy(Misbehaving(**chosen))
    driver = Driver(policy=policy, num_pages=9, max_num_seqs=3)
    run(driver, rng, 40)
    policy._policy = FirstComeFirstServed()
    driver.drain()
    driver.retire()
    assert driver.all == []


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        *[(question, answer) for question in ("order", "admit", "token_budget") for answer in ANSWERS[question][:3]],
        *[("order", answer) for answer in (ANSWERS["order"][7], *ANSWERS["order"][-2:])],
        ("token_budget", lambda view: -3),
    ],
)
def test_a_fault_is_counted_logged_once_and_fcfs_decides(
    question: str, answer: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver(policy=Misbehaving(**{question: answer}))
    requests = [driver.add((i,) * 3) for i in range(3)]
    plan = driver.plan()
    assert plan is not None and plan.rows.request_ids == tuple(r.request_id for r in requests)
    driver.drain()
    assert driver.scheduler.num_policy_faults >= 1
    assert len([record for record in caplog.records if f"failed at {question}" in record.message]) == 1


def test_a_policy_that_never_comes_back_is_broken_off_and_the_thread_goes_on_unharmed() -> None:
    def hang(view: SchedulerView) -> int:
        while True:
            pass

    policy = GuardedPolicy(Misbehaving(token_budget=hang), limit_s=0.05)
    driver = Driver(policy=policy)
    request = driver.add((1,) * 3, SamplingParams(max_tokens=2, ignore_eos=True))
    driver.drain()
    assert policy.num_faults >= 2
    driver.check_result(request)


def test_a_policy_that_catches_what_breaks_it_off_is_late_all_the_same() -> None:
    def stubborn(view: SchedulerView) -> int:
        end_s = time.monotonic() + 0.2
        while time.monotonic() < end_s:
            try:
                while time.monotonic() < end_s:
                    pass
            except BaseException:
                pass
        return 64

    policy = GuardedPolicy(Misbehaving(token_budget=stubborn), limit_s=0.05)
    driver = Driver(policy=policy)
    request = driver.add((1,) * 3, SamplingParams(max_tokens=1))
    driver.drain()
    assert policy.num_faults >= 1
    driver.check_result(request)


def test_what_was_in_time_is_not_broken_off() -> None:
    policy = GuardedPolicy(FirstComeFirstServed(), limit_s=5.0)
    driver = Driver(policy=policy)
    driver.add((1,) * 3)
    driver.drain()
    assert policy.num_faults == 0


def test_a_question_broken_off_leaves_nothing_behind_for_its_thread() -> None:
    """An interpreter that goes on looking for an exception never gets past a function's first instruction here."""

    def hang(view: SchedulerView) -> int:
        while True:
            pass

    def probe() -> None: ...

    def count(frame: object, event: str, argument: object) -> None:
        events.append(event)
        if len(events) > 100:
            raise AssertionError("the interpreter turns on the spot")

    policy = GuardedPolicy(Misbehaving(token_budget=hang), limit_s=0.05)
    Driver(policy=policy).plan()
    events: list[str] = []
    sys.setprofile(count)
    try:
        probe()
    finally:
        sys.setprofile(None)
    assert policy.num_faults == 1
