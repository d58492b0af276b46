"""What policies do in a step in which nothing changed: next to nothing."""

from __future__ import annotations

from collections import Counter

import pytest

from jaxllm.scheduler.policies.priority import Priority
from jaxllm.scheduler.policies.ranked import FixedRanked
from jaxllm.scheduler.policies.shortest_first import ShortestFirst
from jaxllm.scheduler.policy import SchedulerView
from jaxllm.types.request import Request
from jaxllm.types.sampling import SamplingParams
from tests.scheduler.driver import Driver


@pytest.mark.parametrize("kind", [Priority, ShortestFirst])
def test_a_fixed_rank_is_asked_for_only_after_somebody_came_or_left(kind: type[FixedRanked]) -> None:
    asked: Counter[Request] = Counter()

    class Counting(kind):  # type: ignore[misc, valid-type]
        def rank(self, request: Request, view: SchedulerView) -> float:
            asked[request] += 1
            return float(super().rank(request, view))

    driver = Driver(policy=Counting(), max_num_seqs=2, num_pages=40)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    requests = [driver.add((i, 2, 3), params, priority=1) for i in range(6)]
    driver.step()
    driver.step()
    asked.clear()
    for _ in range(5):
        driver.step()
    assert sum(asked.values()) <= 2 * 5  # of the candidate and the one that might yield, for no other
    late = driver.add((9, 2, 3), params, priority=2)
    driver.step()
    if kind is Priority:
        assert asked[late] == 1
    driver.drain()
    assert all(request.is_finished for request in (*requests, late))


def test_the_order_follows_who_comes_and_goes() -> None:
    driver = Driver(policy=Priority(), max_num_seqs=1, num_pages=40)
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    running = driver.add((1, 2, 3), params, priority=0)
    driver.step()
    low, high, gone = (driver.add((i, 2, 3), params, priority=p) for i, p in ((4, 5), (5, 1), (6, 0)))
    driver.step()
    driver.abort(gone.request_id)
    higher = driver.add((7, 2, 3), params, priority=0)
    ended: list[Request] = []
    while driver.scheduler.has_unfinished:
        driver.step()
        ended += [r for r in (running, low, high, higher) if r.is_finished and r not in ended]
    assert ended == [running, higher, high, low]
