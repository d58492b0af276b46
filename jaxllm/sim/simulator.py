"""One engine and one workload, from the first request to the last."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jaxllm.sim.cost import CostModel
from jaxllm.sim.executor import TokenSource, any_token
from jaxllm.sim.replica import Counts, EngineSetup, Replica, Served
from jaxllm.sim.workload import Arrival, Workload


@dataclass(frozen=True, slots=True)
class Run:
    """What a simulation saw."""

    served: list[Served]  # in the order of their end
    duration_s: float  # until the last token
    counts: tuple[Counts, ...]  # by replica
    num_preemptions: int
    num_computed_tokens: int
    busy_s: float  # of all devices together
    prefix_queries: int
    prefix_hits: int
    replica_s: float = 0.0  # replicas times the seconds they were there


def simulate(setup: EngineSetup, cost: CostModel, workload: Workload, *, tokens: TokenSource = any_token) -> Run:
    """Run until every request has ended."""
    replica = Replica(setup, cost, tokens=tokens)
    served: list[Served] = []

    def on_end(request: Served, output_ids: Sequence[int]) -> None:
        served.append(request)
        for following in workload.ended(request.arrival, replica.clock.now_s(), output_ids):
            replica.put(following)

    coming = _Coming(iter(workload.start()))
    while (arrival := coming.next) is not None:
        replica.put(arrival)
        coming.take()
        replica.run_until(coming.at_s, on_end)
    replica.run_until(float("inf"), on_end)
    return Run(
        served,
        replica.clock.now_s(),
        (replica.counts,),
        replica.scheduler.num_preemptions,
        replica.executor.num_tokens,
        replica.executor.busy_s,
        replica.scheduler.prefix_queries,
        replica.scheduler.prefix_hits,
        replica_s=replica.clock.now_s(),
    )


class _Coming:
    """Requests that come whatever happens, one ahead."""

    def __init__(self, arrivals: Iterator[Arrival]) -> None:
        self._arrivals = arrivals
        self.next: Arrival | None = next(arrivals, None)

    def take(self) -> None:
        self.next = next(self._arrivals, None)

    @property
    def at_s(self) -> float:
        return float("inf") if self.next is None else self.next.at_s
