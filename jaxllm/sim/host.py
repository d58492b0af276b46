"""Some of a fleet's replicas, in this process or in one of their own."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from jaxllm.errors import JaxLLMError
from jaxllm.sim.cost import CostModel
from jaxllm.sim.replica import Counts, EngineSetup, Replica, Served
from jaxllm.sim.workload import Arrival
from jaxllm.types.request import FinishReason

_LAST_S = 600.0  # how long a process may take to end


class Ended(NamedTuple):
    """A request's end, without what the fleet knows of it already."""

    end_s: float
    replica: int
    request_id: str
    scheduled_s: float | None
    first_s: float | None
    last_s: float | None
    num_output: int
    num_hits: int
    longest_gap_s: float
    reason: FinishReason | None
    error: str | None


class Report(NamedTuple):
    """The load of a replica."""

    replica: int
    num_open: int
    kv_usage: float


@dataclass(frozen=True, slots=True)
class Window:
    """What happened on some replicas until the end of a window."""

    ended: list[Ended]
    reports: list[Report]  # of replicas that did something


@dataclass(frozen=True, slots=True)
class Totals:
    """What a replica did in its life."""

    counts: Counts
    now_s: float
    num_preemptions: int
    num_computed_tokens: int
    busy_s: float
    prefix_queries: int
    prefix_hits: int
    plan_hash: bytes


@dataclass(slots=True)
class Host:
    """Replicas by number. Mutable; of one process, and picklable with all that is in it."""

    kinds: Sequence[tuple[EngineSetup, CostModel]]  # what a replica may be
    look_every: int = 16
    replicas: dict[int, Replica] = field(default_factory=dict[int, Replica])
    _ended: list[Ended] = field(default_factory=list[Ended])

    def start(self, number: int, kind: int, start_s: float) -> None:
        setup, cost = self.kinds[kind]
        self.replicas[number] = Replica(setup, cost, number=number, start_s=start_s, look_every=self.look_every)

    def stop(self, number: int) -> tuple[Totals, list[Arrival]]:
        """Take a replica away; returns what it has not finished."""
        replica = self.replicas.pop(number)
        return _totals(replica), replica.take_open()

    def run(self, put: Mapping[int, Sequence[Arrival]], end_s: float) -> Window:
        """Give replicas their requests and let time pass."""
        for number, arrivals in put.items():
            for arrival in arrivals:
                self.replicas[number].put(arrival)
        reports: list[Report] = []
        for number, replica in self.replicas.items():
            if replica.num_open:
                replica.run_until(end_s, self._on_end)
                reports.append(Report(number, replica.num_open, replica.kv.usage))
        ended, self._ended = self._ended, []
        return Window(ended, reports)

    def totals(self) -> dict[int, Totals]:
        return {number: _totals(replica) for number, replica in self.replicas.items()}

    def dump(self) -> bytes:
        return pickle.dumps(self.replicas)

    def load(self, content: bytes) -> None:
        self.replicas = pickle.loads(content)

    def _on_end(self, served: Served, output_ids: Sequence[int]) -> None:
        end_s = served.end_s if served.end_s is not None else 0.0
        times = (served.scheduled_s, served.first_s, served.last_s)
        counts = (served.num_output, served.num_hits, served.longest_gap_s)
        self._ended.append(
            Ended(end_s, served.replica, served.arrival.request_id, *times, *counts, served.reason, served.error)
        )


class HostProcess:
    """A `Host` in a process of its own. A call is sent at once, and answered when it is asked for."""

    def __init__(self, host: Host) -> None:
        self._pipe, there = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=_serve, args=(host, there), daemon=True)
        self._process.start()
        there.close()

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    def send(self, name: str, *arguments: Any) -> None:
        """
        Raises:
            JaxLLMError: the process is gone.
        """
        try:
            self._pipe.send((name, arguments))
        except OSError:  # not to be taken for a reader of the output that has gone
            raise self._gone() from None

    def answer(self) -> Any:
        """Of the oldest call without one.

        Raises:
            JaxLLMError: the process failed or is gone.
        """
        try:
            is_done, answer = self._pipe.recv()
        except (EOFError, OSError):
            raise self._gone() from None
        if not is_done:
            raise JaxLLMError(f"a process of the simulation failed: {answer}")
        return answer

    def _gone(self) -> JaxLLMError:
        self._process.join(1.0)
        return JaxLLMError(f"a process of the simulation ended (exit code {self._process.exitcode})")

    def close(self) -> None:
        self._pipe.close()
        self._process.join(_LAST_S)


class LocalHost:
    """The same calls, in this process."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._answers: list[Any] = []

    def send(self, name: str, *arguments: Any) -> None:
        self._answers.append(getattr(self._host, name)(*arguments))

    def answer(self) -> Any:
        return self._answers.pop(0)

    def close(self) -> None:
        """Nothing to end."""


def _serve(host: Host, pipe: Connection) -> None:
    while True:
        try:
            name, arguments = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        try:
            pipe.send((True, getattr(host, name)(*arguments)))
        except Exception as error:
            pipe.send((False, f"{type(error).__name__}: {error}"))


def _totals(replica: Replica) -> Totals:
    return Totals(
        replica.counts,
        replica.clock.now_s(),
        replica.scheduler.num_preemptions,
        replica.executor.num_tokens,
        replica.executor.busy_s,
        replica.scheduler.prefix_queries,
        replica.scheduler.prefix_hits,
        replica.executor.plan_hash,
    )
