"""Aborts at every stage, and what one step in flight does to stops and preemptions."""

from __future__ import annotations

import pytest

from jaxllm.types.request import FinishReason, Request, RequestStatus
from jaxllm.types.sampling import SamplingParams
from tests.scheduler.driver import EOS, Driver
from tests.scheduler.paged_device import solo_run


def lasting(max_tokens: int = 30) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def prompt(num_tokens: int, first: int = 0) -> tuple[int, ...]:
    return tuple((first * 7 + 3 * i) % 29 for i in range(num_tokens))


def assert_gone(driver: Driver, request: Request) -> None:
    assert request.finish_reason is FinishReason.ABORT
    assert (request.pages, request.slot, request.num_in_flight) == ([], None, 0)
    driver.check()


def test_sch_01_abort_while_waiting() -> None:
    driver = Driver(max_num_seqs=1)
    other, request = driver.add(prompt(5), lasting()), driver.add(prompt(5, 1), lasting())
    driver.plan()
    assert driver.abort("r1") == [request]
    assert_gone(driver, request)
    assert not other.is_finished
    driver.drain()
    driver.retire()


def test_sch_01_abort_while_running_with_nothing_in_flight() -> None:
    driver = Driver()
    request = driver.add(prompt(5), lasting())
    driver.step()
    assert driver.abort("r0") == [request]
    assert_gone(driver, request)
    driver.check_drained()
    driver.add(prompt(3, 1), lasting(1))
    plan = driver.plan()
    assert plan is not None and plan.finished == ("r0",)


@pytest.mark.parametrize("num_in_flight", [1, 2])
def test_sch_01_abort_in_flight_keeps_pages_and_slot_until_the_step_is_collected(num_in_flight: int) -> None:
    driver = Driver(max_num_seqs=2)
    request = driver.add(prompt(5), lasting())
    driver.step()
    for _ in range(num_in_flight):
        driver.plan()
    pages, slot, num_output = request.pages, request.slot, request.num_output_tokens
    assert driver.abort("r0") == [request]
    assert (request.pages, request.slot) == (pages, slot) != ([], None)
    assert driver.scheduler.requests == {} and driver.scheduler.has_unfinished
    newcomer = driver.add(prompt(5, 1), lasting(2))
    plan = driver.plan() if num_in_flight == 1 else None
    if plan is not None:
        assert (newcomer.slot, plan.finished) == (1, ("r0",))
    for _ in range(num_in_flight):
        assert "r0" not in driver.collect()
    assert_gone(driver, request)
    assert request.num_output_tokens == num_output
    driver.drain()
    driver.retire()


def test_sch_01_abort_of_a_half_read_prompt_in_flight() -> None:
    driver = Driver(max_num_batched_tokens=8)
    request = driver.add(prompt(20), lasting())
    driver.plan()
    driver.plan()
    driver.abort("r0")
    driver.collect()
    driver.collect()
    assert_gone(driver, request)
    assert driver.kv.match_prefix(Request("x", prompt(20), lasting(), 0.0)) == 16  # what it computed stays of use


def preempted_in_flight() -> tuple[Driver, Request, Request]:
    """A driver whose second request was preempted while a step that samples for it is in flight."""
    driver = Driver(num_pages=5, page_size=4)  # 4 pages
    first, second = driver.add(prompt(7), lasting(6)), driver.add(prompt(8, 1), lasting(6))
    driver.plan()
    plan = driver.plan()
    assert plan is not None and plan.preempted == ("r1",)
    assert (second.status, second.num_pending, second.num_in_flight) == (RequestStatus.PREEMPTED, 1, 0)
    assert second.pages == [] and second.slot is None
    return driver, first, second


def test_a_preempted_request_keeps_the_token_that_was_in_flight() -> None:
    driver, _, second = preempted_in_flight()
    updates = driver.collect()
    assert len(updates["r1"]) == 1 and second.output_ids == list(updates["r1"])
    assert (second.num_computed, second.num_pending) == (0, 0)
    driver.drain()
    driver.retire()


def test_a_preempted_request_is_not_readmitted_before_its_tokens_are_here() -> None:
    driver, first, second = preempted_in_flight()
    third = driver.add(prompt(1, 2), lasting(1))
    driver.collect()
    driver.abort(first.request_id)
    driver.collect()
    assert driver.kv.num_free_pages == 4
    second.num_pending = 1  # as if one more step in flight had promised it a token
    assert driver.plan() is None  # though there is room, also for the one behind it
    second.num_pending = 0
    plan = driver.plan()
    assert plan is not None
    assert [new.token_ids for new in plan.new] == [second.token_ids(), third.token_ids()]
    driver.drain()
    driver.retire()


def test_abort_while_preempted_with_a_step_in_flight() -> None:
    driver, _, second = preempted_in_flight()
    assert driver.abort("r1") == [second]
    assert_gone(driver, second)
    assert "r1" not in driver.collect()
    assert second.output_ids == [] and second.num_pending == 0
    plan = driver.plan()
    assert plan is not None and plan.finished == ("r1",)
    driver.drain()
    driver.retire()


def test_a_preempted_request_may_finish_while_it_waits() -> None:
    driver = Driver(num_pages=5, page_size=4)
    driver.add(prompt(7), lasting(6))
    second = driver.add(prompt(8, 1), lasting(1))
    driver.plan()
    assert second.num_pending == 1
    driver.scheduler._preempt(second, _EmptyPlan(driver))  # type: ignore[arg-type]
    driver.collect()
    assert second.finish_reason is FinishReason.LENGTH and second.num_output_tokens == 1
    assert driver.scheduler.num_waiting == 0
    driver.drain()
    driver.retire()


class _EmptyPlan:
    def __init__(self, driver: Driver) -> None:
        self.withdraw = driver.kv.release


def test_unknown_finished_and_repeated_ids_are_ignored() -> None:
    driver = Driver()
    request = driver.add(prompt(3), lasting())
    assert driver.abort("nobody") == []
    assert driver.abort("r0", "r0") == [request]
    assert driver.abort("r0") == []
    driver.check_drained()


def test_an_abort_may_carry_an_error() -> None:
    driver = Driver()
    request = driver.add(prompt(3), lasting())
    driver.scheduler.abort(["r0"], FinishReason.ERROR)
    assert request.finish_reason is FinishReason.ERROR


def test_an_id_may_come_again_while_its_first_owner_is_still_in_flight() -> None:
    driver = Driver()
    driver.add(prompt(5), lasting())
    driver.plan()
    driver.abort("r0")
    again = Request("r0", prompt(4, 2), lasting(3), 0.0)
    driver.scheduler.add(again)
    plan = driver.scheduler.schedule(0.0)
    assert plan is not None
    assert (plan.finished, [new.token_ids for new in plan.new]) == (("r0",), [again.token_ids()])
    assert driver.scheduler.update(*driver.submitted.popleft()) == []
    assert again.num_output_tokens == 0 and driver.scheduler.requests == {"r0": again}
    updates = driver.scheduler.update(plan, driver.device.run(plan))
    assert [update.request for update in updates] == [again]


def find_eos_prompt(at_output: int) -> tuple[int, ...]:
    """A prompt whose solo run samples EOS as output number `at_output` and not before."""
    params = SamplingParams(max_tokens=at_output)
    for first in range(10_000):
        candidate = (first % 29, first // 29 % 29, first // 841)
        output, reason, _ = solo_run(candidate, params, eos_ids={EOS}, max_len=64)
        if reason is FinishReason.STOP and len(output) == at_output:
            return candidate
    raise AssertionError("no such prompt")


def test_a_stop_found_late_costs_one_token_and_frees_memory_when_its_step_is_collected() -> None:
    driver = Driver()
    request = driver.add(find_eos_prompt(2), SamplingParams(max_tokens=20))
    driver.plan()
    driver.plan()
    driver.collect()
    driver.plan()  # goes one token beyond the EOS that nobody has seen
    assert driver.collect() == {"r0": (EOS,)}
    assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, None)
    assert request.pages != [] and request.slot == 0 and driver.scheduler.num_running == 0
    assert driver.plan() is None and driver.scheduler.has_unfinished
    assert driver.collect() == {}
    assert not driver.scheduler.has_unfinished
    driver.check_drained()
    driver.retire()


@pytest.mark.parametrize("num_calls", range(1, 9))
def test_an_error_inside_planning_leaves_nothing_half_done(num_calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(page_size=4, num_pages=40)
    driver.add(prompt(9), lasting(6))
    driver.step()
    driver.add(prompt(14), lasting(6))
    driver.add(prompt(6, 3), lasting(6))
    left, grow = [num_calls], driver.kv.grow

    def failing(request: Request, num_tokens: int) -> object:
        left[0] -= 1
        if left[0] == 0:
            raise ZeroDivisionError("a bug")
        return grow(request, num_tokens)

    monkeypatch.setattr(driver.kv, "grow", failing)
    for _ in range(4):
        try:
            driver.plan()
        except ZeroDivisionError:
            break
        driver.collect()
    driver.check()
    monkeypatch.undo()
    driver.drain()
    driver.retire()
    assert driver.all == []
