"""One engine on a virtual clock: requests in, times out."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from jaxllm.config.engine import CacheConfig, SchedulerConfig
from jaxllm.engine.core import EngineCore
from jaxllm.engine.messages import AddRequest, StepDeltas, TokenDelta
from jaxllm.engine.step_recorder import StepRecorder, StepTimes
from jaxllm.memory.plan import KVCachePlan, KVGroup
from jaxllm.memory.spec import FullKV
from jaxllm.scheduler.make import make_scheduler
from jaxllm.sim.clock import VirtualClock
from jaxllm.sim.cost import CostModel
from jaxllm.sim.executor import SimulatedExecutor, TokenSource, any_token
from jaxllm.sim.workload import Arrival
from jaxllm.types.profile import PHASES, StepProfile
from jaxllm.types.request import FinishReason
from jaxllm.types.sampling import SamplingParams
from jaxllm.types.step import ScheduledRows, StepOutput

_STALL_S = 0.01  # how long an engine that can do nothing waits before it looks again, as the real one does


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """What an engine is, apart from its device."""

    scheduler: SchedulerConfig
    cache: CacheConfig  # `num_pages` must be given
    host_s: float = 0.0  # seconds the host spends on a step
    loads_kv: bool = False  # what stands before the last token of a prompt comes from elsewhere


@dataclass(slots=True)
class Served:
    """What became of a request; times are None until they come."""

    arrival: Arrival
    replica: int = 0
    scheduled_s: float | None = None
    first_s: float | None = None  # when its first token was there
    last_s: float | None = None
    num_output: int = 0
    num_hits: int = 0  # prompt tokens found in the prefix cache at the first admission
    longest_gap_s: float = 0.0  # between two of its tokens
    end_s: float | None = None
    reason: FinishReason | None = None
    error: str | None = None  # why it was refused
    num_retries: int = 0  # of replicas that failed


@dataclass(slots=True)
class KVSlots:
    """Token slots of KV memory, summed over the steps that were looked at."""

    held: int = 0  # in pages that requests hold
    used: int = 0  # of those, with a token in them
    all: int = 0  # in the whole pool


@dataclass(slots=True)
class Sample:
    """The state of an engine at a moment."""

    at_s: float
    num_running: int
    num_waiting: int
    kv_usage: float


@dataclass(slots=True)
class Counts:
    """What an engine did. Mutable."""

    num_steps: int = 0
    num_row_steps: int = 0  # requests, summed over steps
    slots: KVSlots = field(default_factory=KVSlots)
    samples: list[Sample] = field(default_factory=list[Sample])


OnEnd = Callable[[Served, Sequence[int]], None]  # with its output ids


class Replica:
    """The real core, scheduler and memory on a modelled device. Mutable; of one thread.

    Time is this replica's own, and passes in `run_until`.
    """

    def __init__(
        self,
        setup: EngineSetup,
        cost: CostModel,
        *,
        number: int = 0,
        start_s: float = 0.0,
        tokens: TokenSource = any_token,
        look_every: int = 16,
    ) -> None:
        """`look_every`: steps between two looks at memory and queues; 0: none. `start_s`: when it is ready."""
        config, cache = setup.scheduler, setup.cache
        if cache.num_pages is None:
            raise ValueError("a simulated engine needs cache.num_pages")
        plan = KVCachePlan((KVGroup((0,), FullKV(cache.page_size, 1, 1)),), cache.num_pages, cache.page_size)
        self.number = number
        self.clock = VirtualClock(start_s)
        self.scheduler, self.kv = make_scheduler(config, cache, plan)
        self.executor = SimulatedExecutor(cost, self.clock, host_s=setup.host_s, loads_kv=setup.loads_kv, tokens=tokens)
        self.core = EngineCore(
            self.executor,
            self.scheduler,
            self.kv,
            self.clock,
            async_scheduling=config.async_scheduling,
            recorder=_NoRecorder(),
        )
        self.counts = Counts()
        self._look_every = look_every
        self._inbox: list[tuple[float, int, Arrival]] = []
        self._num_put = 0  # breaks ties: the first to be put comes first
        self._open: dict[str, tuple[Served, list[int]]] = {}

    @property
    def num_open(self) -> int:
        """Requests that are here and have not ended, those still to come included."""
        return len(self._open) + len(self._inbox)

    def put(self, arrival: Arrival) -> None:
        """A request that comes at its time, or now if that has passed."""
        heapq.heappush(self._inbox, (arrival.at_s, self._num_put, arrival))
        self._num_put += 1

    def run_until(self, limit_s: float, on_end: OnEnd) -> None:
        """Let time pass up to a moment, or until nothing is left; the step that passes it is the last.

        `on_end` is told of each request that ends, and may `put` more.
        """
        while True:
            self._take_arrivals(on_end)
            now_s = self.clock.now_s()
            if now_s >= limit_s:
                return
            if not self.core.has_work:
                if not self._inbox or self._inbox[0][0] >= limit_s:
                    return
                self.clock.advance_to(self._inbox[0][0])
                continue
            deltas = self.core.step()
            if deltas is not None:
                self._take_in(deltas, on_end)
            elif self.core.is_stalled:
                self.clock.advance_to(min(now_s + _STALL_S, limit_s))

    def take_open(self) -> list[Arrival]:
        """All that has not ended, to be sent elsewhere: this engine is gone. In the order in which they came."""
        left = [served.arrival for served, _ in self._open.values()] + [arrival for *_, arrival in sorted(self._inbox)]
        self._open, self._inbox = {}, []
        return left

    def _take_arrivals(self, on_end: OnEnd) -> None:
        now_s = self.clock.now_s()
        while self._inbox and self._inbox[0][0] <= now_s:
            arrival = heapq.heappop(self._inbox)[2]
            served = Served(arrival, self.number)
            self._open[arrival.request_id] = (served, [])
            refused = self.core.add(_message(arrival))
            if refused is not None:
                self._note(refused, now_s, on_end)

    def _take_in(self, deltas: StepDeltas, on_end: OnEnd) -> None:
        now_s = self.clock.now_s()
        counts = self.counts
        counts.num_steps += 1
        counts.num_row_steps += len(deltas.deltas)
        if self._look_every and counts.num_steps % self._look_every == 0:
            self._look(now_s)
        for delta in deltas.deltas:
            self._note(delta, now_s, on_end)

    def _note(self, delta: TokenDelta, now_s: float, on_end: OnEnd) -> None:
        served, output_ids = self._open[delta.request_id]
        if delta.token_ids:
            if served.last_s is None:
                served.first_s = now_s
                served.scheduled_s = delta.scheduled_s
                served.num_hits = delta.num_cached
            else:
                served.longest_gap_s = max(served.longest_gap_s, now_s - served.last_s)
            served.last_s = now_s
            served.num_output += len(delta.token_ids)
            output_ids.extend(delta.token_ids)
        if delta.finish_reason is not None or delta.error is not None:
            del self._open[delta.request_id]
            served.end_s, served.reason = now_s, delta.finish_reason
            served.error = None if delta.error is None else delta.error.message
            on_end(served, output_ids)

    def _look(self, now_s: float) -> None:
        scheduler, page_size = self.scheduler, self.kv.page_size
        slots = self.counts.slots
        for request in scheduler.requests.values():
            if request.pages:
                slots.held += len(request.pages[0]) * page_size
                slots.used += request.num_computed + request.num_in_flight
        slots.all += (self.kv.num_pages - 1) * page_size
        self.counts.samples.append(Sample(now_s, scheduler.num_running, scheduler.num_waiting, self.kv.usage))


class _NoRecorder(StepRecorder):
    """Real time means nothing here, and a thousand replicas have no memory for it."""

    def __init__(self) -> None:
        self._sums = [0.0] * len(PHASES)

    def record(self, rows: ScheduledRows, num_tokens: int, output: StepOutput, times: StepTimes) -> None:
        """Nothing is kept."""

    def take(self) -> list[StepProfile]:
        return []

    def rest(self) -> None:
        """Nothing is kept."""


def _message(arrival: Arrival) -> AddRequest:
    return AddRequest(
        request_id=arrival.request_id,
        prompt_ids=arrival.prompt_ids,
        params=SamplingParams(max_tokens=arrival.num_output, ignore_eos=True, temperature=0.0),
        arrival_s=arrival.at_s,
        seed=0,
        priority=arrival.priority,
        cache_salt=arrival.cache_salt,
        service=arrival.service,
    )
