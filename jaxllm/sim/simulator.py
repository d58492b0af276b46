"""One engine and one workload, from the first request to the last."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from jaxllm.sim.cost import CostModel
from jaxllm.sim.executor import TokenSource, any_token
from jaxllm.sim.replica import Counts, EngineSetup, Replica, Served
from jaxllm.sim.workload import Arrival, Workload

_PIECE_S = 10.0  # of simulated time, between two looks at the real one


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
    plan_hash: str = ""  # equal for runs in which every step was decided the same


class OneEngine:
    """One engine and its workload, in pieces of time. Mutable; used once. Nothing depends on the pieces' length."""

    def __init__(
        self,
        setup: EngineSetup,
        cost: CostModel,
        workload: Workload,
        *,
        tokens: TokenSource = any_token,
        keep_prompts: bool = False,
    ) -> None:
        """`keep_prompts`: of requests that have ended, which else are as good as lengths and take no memory."""
        self._replica = Replica(setup, cost, tokens=tokens)
        self._workload = workload
        self._keep_prompts = keep_prompts
        self._served: list[Served] = []
        self._until_s = 0.0
        self._num_taken = 0  # of the requests that come whatever happens
        self._arrivals: Iterator[Arrival] = iter(())
        self._next: Arrival | None = None

    def start(self) -> None:
        self._arrivals = islice(iter(self._workload.start()), self._num_taken, None)
        self._next = next(self._arrivals, None)

    def advance(self) -> bool:
        """Let some time pass; False, and nothing happens, if nothing is left to do."""
        replica = self._replica
        if self._next is None and not replica.num_open:
            return False
        end_s = self._until_s + _PIECE_S
        if not replica.num_open and self._next is not None:
            end_s = max(end_s, self._next.at_s + _PIECE_S)
        while self._next is not None and self._next.at_s < end_s:
            replica.put(self._next)
            self._num_taken += 1
            self._next = next(self._arrivals, None)
        replica.run_until(end_s, self._note)
        self._until_s = end_s
        return True

    def dump(self) -> Any:
        return self._replica, self._workload, self._served, self._until_s, self._num_taken

    def resume(self, dumped: Any) -> None:
        """Go on from what `dump` gave."""
        self._replica, self._workload, self._served, self._until_s, self._num_taken = dumped
        self.start()

    def finish(self) -> Run:
        replica = self._replica
        return Run(
            self._served,
            replica.clock.now_s(),
            (replica.counts,),
            replica.scheduler.num_preemptions,
            replica.executor.num_tokens,
            replica.executor.busy_s,
            replica.scheduler.prefix_queries,
            replica.scheduler.prefix_hits,
            replica_s=replica.clock.now_s(),
            plan_hash=replica.executor.plan_hash.hex(),
        )

    def _note(self, request: Served, output_ids: Sequence[int]) -> None:
        self._served.append(request)
        for following in self._workload.ended(request.arrival, self._replica.clock.now_s(), output_ids):
            self._replica.put(following)
        if not self._keep_prompts:
            request.arrival = request.arrival.without_prompt()


def simulate(
    setup: EngineSetup,
    cost: CostModel,
    workload: Workload,
    *,
    tokens: TokenSource = any_token,
    keep_prompts: bool = False,
) -> Run:
    """Run until every request has ended."""
    engine = OneEngine(setup, cost, workload, tokens=tokens, keep_prompts=keep_prompts)
    engine.start()
    while engine.advance():
        pass
    return engine.finish()
