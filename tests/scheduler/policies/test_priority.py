"""Priority: before others, at their cost, and never for ever."""

from __future__ import annotations

from jaxllm.scheduler.policies.priority import Priority
from jaxllm.types.request import RequestStatus
from jaxllm.types.sampling import SamplingParams
from tests.scheduler.driver import Driver


def long(num: int = 20) -> SamplingParams:
    return SamplingParams(max_tokens=num, ignore_eos=True)


def test_sch_07_a_high_one_takes_the_slot_of_a_low_one_which_still_ends_within_the_bound() -> None:
    """One slot; a low one runs; then a steady flow of high ones, one a step."""
    driver = Driver(policy=Priority(ageing_s=10.0), max_num_seqs=1)
    low = driver.add((1,) * 3, long(), priority=4, arrival_s=0.0)
    driver.step()
    driver.step()
    first = driver.add((2,) * 3, long(2), priority=0, arrival_s=float(driver.num_steps))
    plan = driver.step()
    assert plan is not None and (plan.rows.request_ids, plan.preempted) == ((first.request_id,), (low.request_id,))
    for _ in range(60):
        now_s = float(driver.num_steps)
        high = driver.add((2,) * 3, long(2), priority=0, arrival_s=now_s)
        driver.step()
        if now_s < 30:
            assert high.status is RequestStatus.RUNNING or high.is_finished or low.status is not RequestStatus.RUNNING
    before_it = [r for r in driver.all if r is not low and r.arrival_s < 40.0]
    while not low.is_finished:
        driver.step()
    assert all(r.is_finished for r in before_it), "those within (4 - 0) × 10 s of it come first"
    later = [r for r in driver.all if r.arrival_s > 40.0]
    assert later and not any(r.is_finished for r in later), "nobody beyond the bound came before it"
    assert low.num_preemptions >= 1
    driver.drain()
    driver.retire()


def test_sch_07_equal_priorities_never_take_turns() -> None:
    driver = Driver(policy=Priority(), max_num_seqs=1)
    for arrival in range(3):
        driver.add((arrival,) * 3, long(6), priority=2, arrival_s=float(arrival))
    driver.drain()
    assert driver.scheduler.num_preemptions == 0


def test_sch_07_a_high_one_finds_memory_too() -> None:
    driver = Driver(policy=Priority(), num_pages=7, page_size=4)
    lows = [driver.add((i,) * 8, long(4), priority=1) for i in range(2)]
    driver.step()
    high = driver.add((9,) * 16, long(2), priority=0, arrival_s=1.0)
    plan = driver.step()
    assert plan is not None and high.request_id in plan.rows.request_ids
    assert high.status is RequestStatus.RUNNING
    assert any(low.status is RequestStatus.PREEMPTED for low in lows)
    driver.drain()
    driver.retire()


def test_short_of_memory_the_last_in_rank_yields() -> None:
    driver = Driver(policy=Priority(), num_pages=6, page_size=4)
    high = driver.add((1,) * 7, long(9), priority=0, arrival_s=1.0)
    low = driver.add((2,) * 7, long(9), priority=1, arrival_s=0.0)
    driver.drain()
    assert (high.num_preemptions, low.num_preemptions > 0) == (0, True)
    driver.retire()
