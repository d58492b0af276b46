"""Simulations to be reported: made by hand, and small real ones."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from jaxllm.config.engine import CacheConfig, SchedulerConfig
from jaxllm.sim.fleet import Failure, FleetSetup, Pool, run_fleet
from jaxllm.sim.replica import Counts, EngineSetup, Served
from jaxllm.sim.simulator import Run, simulate
from jaxllm.sim.workload import Arrival
from jaxllm.types.request import FinishReason
from jaxllm.types.service import ServiceParams
from jaxllm.types.step import SchedulerOutput


def served(
    at_s: float = 0.0, times: Sequence[float] = (1.0,), *, scheduled_s: float | None = None, **about: Any
) -> Served:
    """A finished request with tokens at these times; `about`: num_prompt, num_hits, and fields of ServiceParams."""
    num_prompt, num_hits = about.pop("num_prompt", 10), about.pop("num_hits", 0)
    arrival = Arrival(at_s, f"r{at_s}-{times}", tuple(range(num_prompt)), len(times), service=ServiceParams(**about))
    gaps = [later - earlier for earlier, later in pairwise(times)]
    return Served(
        arrival,
        scheduled_s=at_s if scheduled_s is None else scheduled_s,
        first_s=times[0],
        last_s=times[-1],
        num_output=len(times),
        num_hits=num_hits,
        longest_gap_s=max(gaps, default=0.0),
        end_s=times[-1],
        reason=FinishReason.LENGTH,
    )


def without_token(at_s: float, end_s: float, error: str | None = None, **service: Any) -> Served:
    """Refused if there is an error, else ended at its deadline."""
    arrival = Arrival(at_s, f"x{at_s}-{end_s}", (1, 2, 3), 5, service=ServiceParams(**service))
    return Served(arrival, end_s=end_s, reason=None if error else FinishReason.ABORT, error=error)


def run_of(*requests: Served, counts: Sequence[Counts] = (), **figures: Any) -> Run:
    """Lasts until the last end."""
    duration_s = max((request.end_s or 0.0 for request in requests), default=0.0)
    known: dict[str, Any] = {
        "num_preemptions": 0,
        "num_computed_tokens": 0,
        "busy_s": 0.0,
        "prefix_queries": 0,
        "prefix_hits": 0,
    }
    return Run(list(requests), duration_s, tuple(counts) or (Counts(),), **{**known, **figures})


class CountingCost:
    """10 ms a step and 0.1 ms a token; notes which positions of which request were computed."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.positions: set[tuple[str, int]] = set()

    def step_seconds(self, plan: SchedulerOutput) -> float:
        rows = plan.rows
        for request_id, start, num in zip(rows.request_ids, rows.starts, rows.num_tokens, strict=True):
            self.num_tokens += int(num)
            self.positions.update((request_id, position) for position in range(start, start + num))
        return 0.01 + 0.0001 * plan.total_tokens


class _Random:
    def __init__(self, seed: int, num_requests: int) -> None:
        self._random, self._num_requests = random.Random(seed), num_requests

    def start(self) -> Iterator[Arrival]:
        draw, at_s = self._random, 0.0
        for number in range(self._num_requests):
            at_s += draw.expovariate(20)
            prompt = tuple(draw.randrange(1000) for _ in range(draw.randrange(5, 200)))
            service = ServiceParams(tenant=draw.choice(("ann", "bob")))
            yield Arrival(at_s, f"r{number}", prompt, draw.randrange(1, 60), service=service)

    def ended(self, arrival: Arrival, at_s: float, output_ids: Sequence[int]) -> Sequence[Arrival]:
        return ()


def small_run(
    policy: str = "fcfs",
    seed: int = 0,
    *,
    num_pages: int = 40,
    num_requests: int = 50,
    cost: CountingCost | None = None,
) -> Run:
    setup = EngineSetup(scheduler=SchedulerConfig(policy=policy), cache=CacheConfig(num_pages=num_pages))
    return simulate(setup, cost or CountingCost(), _Random(seed, num_requests))


def small_fleet(cost: CountingCost, *, fails_at_s: float, num_requests: int = 50) -> Run:
    """Two replicas, of which the first is gone at that moment."""
    setup = EngineSetup(scheduler=SchedulerConfig(), cache=CacheConfig(num_pages=4000))
    pool = Pool(name="all", setup=setup, cost=cost, num_replicas=2)
    fleet = FleetSetup(pools=(pool,), failures=(Failure(at_s=fails_at_s, replica=0),))
    return run_fleet(fleet, _Random(0, num_requests))
