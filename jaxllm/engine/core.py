"""One turn of the engine: plan a step, start it, take in the one before it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from jaxllm.engine.clock import Clock
from jaxllm.engine.executor import Executor, Ticket
from jaxllm.engine.messages import (
    AbortRequests,
    AddRequest,
    CoreFailed,
    ErrorKind,
    RequestFailure,
    StepDeltas,
    TokenDelta,
)
from jaxllm.engine.watchdog import Heartbeat
from jaxllm.errors import CapacityError, RequestError
from jaxllm.memory.manager import KVManager
from jaxllm.metrics.stats import CoreStats
from jaxllm.scheduler.scheduler import RequestUpdate, Scheduler
from jaxllm.types.request import FinishReason, Request
from jaxllm.types.step import SchedulerOutput


@dataclass(slots=True)
class _FirstSchedule:
    """What was true when a request first got tokens; later admissions after preemption do not count."""

    at_s: float
    num_cached: int


class EngineCore:
    """Scheduler and executor in step. Mutable; owned by the one thread that calls it.

    With `async_scheduling` one step is in flight while the next is planned and started: the step
    before is collected only then, or when there is nothing to plan.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        kv: KVManager,
        clock: Clock,
        *,
        async_scheduling: bool = True,
        heartbeat: Heartbeat | None = None,
    ) -> None:
        self._executor = executor
        self._scheduler = scheduler
        self._kv = kv  # read for statistics; the scheduler owns it
        self._clock = clock
        self._max_left_in_flight = 1 if async_scheduling else 0
        self._heartbeat = heartbeat or Heartbeat(clock)
        self._in_flight: deque[tuple[SchedulerOutput, Ticket]] = deque()
        self._first: dict[str, _FirstSchedule] = {}
        self._num_steps = 0
        self._is_stalled = False

    @property
    def has_work(self) -> bool:
        return bool(self._in_flight) or self._scheduler.has_unfinished

    @property
    def is_stalled(self) -> bool:
        """Whether the latest `step` could neither plan nor collect, though requests wait."""
        return self._is_stalled

    def add(self, message: AddRequest) -> TokenDelta | None:
        """Hand a request to the scheduler; a refusal comes back as the delta that ends it."""
        request = Request(
            request_id=message.request_id,
            prompt_ids=message.prompt_ids,
            params=message.params,
            arrival_s=message.arrival_s,
            seed=message.seed,
            priority=message.priority,
            adapter_id=message.adapter_id,
            cache_salt=message.cache_salt,
            bad_word_ids=message.bad_word_ids,
            fork_of=message.fork_of,
        )
        try:
            self._scheduler.add(request)
        except RequestError as error:
            return _refusal(message, RequestFailure(ErrorKind.REQUEST, str(error), error.param, error.code))
        except CapacityError as error:
            return _refusal(message, RequestFailure(ErrorKind.CAPACITY, str(error)))
        return None

    def abort(self, message: AbortRequests) -> None:
        self._scheduler.abort(message.request_ids)
        for request_id in message.request_ids:
            self._first.pop(request_id, None)

    def step(self) -> StepDeltas | None:
        """Plan and start a step if there is one to plan; collect the oldest if that is due.

        Returns None when nothing was collected. Whatever the executor raises passes through: the
        core must not be stepped again, and `fail` ends what is open.
        """
        now_s = self._clock.now_s()
        plan = self._scheduler.schedule(now_s)
        if plan is not None:
            self._note_first(plan, now_s)
            self._heartbeat.beat()
            self._in_flight.append((plan, self._executor.submit(plan)))
        self._is_stalled = plan is None and not self._in_flight
        due = len(self._in_flight) > (self._max_left_in_flight if plan is not None else 0)
        return self._collect_oldest() if due else None

    def stats(self) -> CoreStats:
        scheduler = self._scheduler
        return CoreStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_free_pages=self._kv.num_free_pages,
            num_pages=self._kv.num_pages,
            kv_usage=self._kv.usage,
            num_preemptions=scheduler.num_preemptions,
            prefix_queries_tokens=scheduler.prefix_queries,
            prefix_hits_tokens=scheduler.prefix_hits,
            num_steps=self._num_steps,
        )

    def fail(self, message: str) -> tuple[StepDeltas, CoreFailed]:
        """Last words: an error for each request the scheduler knows, then that nothing follows."""
        failure = RequestFailure(ErrorKind.DEAD, message)
        deltas = tuple(
            TokenDelta(request_id, finish_reason=FinishReason.ERROR, error=failure)
            for request_id in self._scheduler.requests
        )
        return StepDeltas(deltas, self.stats()), CoreFailed(message)

    def close(self) -> None:
        self._executor.close()

    def _note_first(self, plan: SchedulerOutput, now_s: float) -> None:
        for new in plan.new:
            # What a sibling takes over is no prefix hit: its prompt was counted with the first one's.
            is_fork = self._scheduler.requests[new.request_id].fork_of is not None
            self._first.setdefault(new.request_id, _FirstSchedule(now_s, 0 if is_fork else new.num_cached))

    def _collect_oldest(self) -> StepDeltas:
        plan, ticket = self._in_flight.popleft()
        self._heartbeat.beat()
        output = self._executor.collect(ticket)
        self._heartbeat.beat()
        self._num_steps += 1
        deltas = tuple(self._delta(update) for update in self._scheduler.update(plan, output))
        return StepDeltas(deltas, self.stats(), plan.total_tokens)

    def _delta(self, update: RequestUpdate) -> TokenDelta:
        request = update.request
        first = self._first.get(request.request_id)
        if request.is_finished:
            self._first.pop(request.request_id, None)
        return TokenDelta(
            request_id=request.request_id,
            token_ids=update.new_ids,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            num_cached=first.num_cached if first else 0,
            scheduled_s=first.at_s if first else None,
            logprobs=update.logprobs,
            prompt_logprobs=update.prompt_logprobs,
        )


def _refusal(message: AddRequest, failure: RequestFailure) -> TokenDelta:
    return TokenDelta(message.request_id, finish_reason=FinishReason.ERROR, error=failure)
