"""What the other policies promise, each beside fcfs on the same arrivals."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from statistics import mean

from jaxllm.scheduler.policies.cache_aware import CacheAware
from jaxllm.scheduler.policies.fair import Fair
from jaxllm.scheduler.policies.fcfs import FirstComeFirstServed
from jaxllm.scheduler.policies.shortest_first import ShortestFirst
from jaxllm.scheduler.policies.slo import LeastSlack
from jaxllm.scheduler.policy import SchedulingPolicy
from jaxllm.types.request import Request
from jaxllm.types.sampling import SamplingParams
from jaxllm.types.service import ServiceParams
from tests.scheduler.driver import Driver
from tests.scheduler.policies.serve import Served, serve

Add = Callable[[float], Request]


def exactly(num: int) -> SamplingParams:
    return SamplingParams(max_tokens=num, ignore_eos=True)


def test_shortest_first_ends_requests_sooner_on_average() -> None:
    def mean_s(policy: SchedulingPolicy) -> float:
        driver, rng = Driver(policy=policy, num_pages=60, max_num_seqs=2), random.Random(0)
        lengths = [rng.choice((2, 3, 30)) for _ in range(30)]
        adds = [partial(_add, driver, (i % 7,) * 4, exactly(n), None) for i, n in enumerate(lengths)]
        served = serve(driver, [(0.0, add) for add in adds])
        return mean(served.end_s.values())

    assert mean_s(ShortestFirst()) < 0.75 * mean_s(FirstComeFirstServed())


def test_shortest_first_lets_a_long_one_run_at_last() -> None:
    """100 tokens longer, at 1,000 tokens for a second: overtaken by those within 0.1 s of it alone."""
    driver = Driver(policy=ShortestFirst(ageing_tokens_per_s=1000.0), num_pages=60, max_num_seqs=1, max_model_len=200)
    arrivals: list[tuple[float, Add]] = [(0.0, partial(_add, driver, (1,) * 4, exactly(2), None))]
    arrivals += [(0.001, partial(_add, driver, (1,) * 4, exactly(102), None))]
    arrivals += [(0.01 * i, partial(_add, driver, (1,) * 4, exactly(2), None)) for i in range(1, 40)]
    served = serve(driver, arrivals)
    ends = {r.params.max_tokens: at_s for r, at_s in served.end_s.items() if r.params.max_tokens == 102}
    assert all(served.end_s[r] > ends[102] for r in served.end_s if r.arrival_s > 0.11)


def test_cache_aware_finds_more_in_a_cache_that_does_not_hold_everything() -> None:
    """Four long prefixes, asked for in turn, of which the pages hold two: fcfs evicts each before it is asked for."""

    def hit_rate(policy: SchedulingPolicy) -> float:
        driver = Driver(policy=policy, num_pages=25, max_num_seqs=1, max_model_len=64)
        prefixes = [tuple(range(30 * i, 30 * i + 40)) for i in range(4)]
        adds = [partial(_add, driver, (*prefixes[i % 4], 1000 + i), exactly(2), None) for i in range(24)]
        serve(driver, [(0.0, add) for add in adds])
        return driver.scheduler.prefix_hits / driver.scheduler.prefix_queries

    assert hit_rate(FirstComeFirstServed()) < 0.1
    assert hit_rate(CacheAware()) > 0.75


def test_cache_aware_does_not_let_one_wait_longer_than_its_patience_behind_hits() -> None:
    driver = Driver(policy=CacheAware(patience_s=0.2), num_pages=40, max_num_seqs=1)
    hot = tuple(range(40))
    arrivals: list[tuple[float, Add]] = [(0.0, partial(_add, driver, hot, exactly(2), None))]
    arrivals += [(0.001, partial(_add, driver, (5,) * 20, exactly(2), None))]
    arrivals += [(0.002 * i, partial(_add, driver, (*hot, i), exactly(2), None)) for i in range(1, 60)]
    served = serve(driver, arrivals)
    cold = next(r for r in served.end_s if r.prompt_ids == (5,) * 20)
    assert served.first_s[cold] < 0.2 + 0.2  # its patience, and the step and request that ran then


def jain(shares: list[float]) -> float:
    return sum(shares) ** 2 / (len(shares) * sum(share**2 for share in shares))


def test_fair_serves_tenants_alike_though_one_asks_for_ten_times_as_much() -> None:
    def shares(policy: SchedulingPolicy) -> list[float]:
        driver = Driver(policy=policy, num_pages=80, max_num_seqs=4)
        big = [("big", 0.001 * i) for i in range(300)]
        small = [("small", 0.01 * i) for i in range(30)]
        arrivals: list[tuple[float, Add]] = [
            (at_s, partial(_add, driver, (7,) * 6, exactly(10), ServiceParams(tenant=tenant)))
            for tenant, at_s in sorted(big + small, key=lambda pair: pair[1])
        ]
        served: dict[str | None, int] = {"big": 0, "small": 0}
        serve(driver, arrivals, until_s=1.6)
        for request in driver.all:
            served[request.service.tenant] += request.num_computed
        assert any(r.service.tenant == "small" and not r.is_finished for r in driver.all), "both still want more"
        return [float(tokens) for tokens in served.values()]

    assert jain(shares(FirstComeFirstServed())) < 0.8
    assert jain(shares(Fair(quantum_tokens=32))) >= 0.95


def test_fair_charges_what_ended_before_somebody_was_chosen_again() -> None:
    policy = Fair()
    driver = Driver(policy=policy, num_pages=40, max_num_seqs=2)
    driver.add((1,) * 4, exactly(20), service=ServiceParams(tenant="long"))
    driver.add((2,) * 4, exactly(3), service=ServiceParams(tenant="short"))
    driver.step()
    before = dict(policy._credit)
    for _ in range(6):
        driver.step()  # nobody waits, so nobody is chosen, while one of them ends
    assert policy._credit == before
    driver.add((3,) * 4, exactly(3), service=ServiceParams(tenant="short"))
    driver.plan()
    assert before["short"] - policy._credit["short"] == 4 + 3 - 1  # the last token is not computed
    assert before["long"] - policy._credit["long"] == 4 + 7 - 1
    driver.drain()


def test_fair_forgets_tenants_that_left() -> None:
    policy = Fair()
    driver = Driver(policy=policy, num_pages=40)
    for i in range(50):
        driver.add((1,) * 4, exactly(2), service=ServiceParams(tenant=f"t{i}"))
        driver.drain()
        driver.retire()
    driver.add((1,) * 4, exactly(2), service=ServiceParams(tenant="last"))
    driver.step()
    assert len(policy._credit) <= 2
    driver.drain()


def test_slo_meets_more_targets_than_fcfs_where_not_all_can_be_met() -> None:
    def goodput(policy: SchedulingPolicy) -> float:
        driver, rng = Driver(policy=policy, num_pages=120, max_num_seqs=2), random.Random(1)
        arrivals: list[tuple[float, Add]] = []
        for i in range(60):
            target = ServiceParams(ttft_target_s=rng.choice((0.15, 0.15, 2.0)))
            arrivals.append((0.025 * i, partial(_add, driver, (i % 5,) * 12, exactly(6), target)))
        served: Served = serve(driver, arrivals)
        met = [r for r, at_s in served.first_s.items() if at_s - r.arrival_s <= (r.service.ttft_target_s or 0.0)]
        return len(met) / served.duration_s

    policy = LeastSlack(prefill_tokens_per_s=500.0)
    assert goodput(policy) > 1.3 * goodput(FirstComeFirstServed())


def _add(
    driver: Driver, prompt: tuple[int, ...], params: SamplingParams, service: ServiceParams | None, at_s: float
) -> Request:
    return driver.add(prompt, params, arrival_s=at_s, service=service or ServiceParams())
