"""One turn of the engine: plan a step, start it, take in the one before it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from jaxllm.engine.clock import Clock
from jaxllm.engine.executor import Executor, Ticket
from jaxllm.engine.kv_events import KVEventPublisher
from jaxllm.engine.messages import (
    AbortRequests,
    AddRequest,
    CoreFailed,
    ErrorKind,
    RequestFailure,
    StepDeltas,
    TokenDelta,
)
from jaxllm.engine.step_recorder import StepRecorder, StepTimes
from jaxllm.engine.trace import TraceRecorder
from jaxllm.engine.watchdog import Heartbeat
from jaxllm.errors import CapacityError, RequestError
from jaxllm.memory.manager import KVManager
from jaxllm.metrics.stats import CoreStats
from jaxllm.scheduler.scheduler import RequestUpdate, Scheduler
from jaxllm.types.profile import PhaseClock
from jaxllm.types.request import FinishReason, Request
from jaxllm.types.step import SchedulerOutput


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
        phases: PhaseClock | None = None,
        recorder: StepRecorder | None = None,
        trace: TraceRecorder | None = None,
        kv_events: KVEventPublisher | None = None,
    ) -> None:
        """`phases`: what the front end spends, counted in the steps it belongs to. `recorder`: in place of its own.

        `trace` and `kv_events` are closed with the core.
        """
        self._executor = executor
        self._scheduler = scheduler
        self._kv = kv  # read for statistics and events; the scheduler owns it
        self._clock = clock
        self._max_left_in_flight = 1 if async_scheduling else 0
        self._heartbeat = heartbeat or Heartbeat(clock)
        self.recorder = recorder or StepRecorder(phases)
        self._trace = trace
        self._kv_events = kv_events
        self._in_flight: deque[tuple[SchedulerOutput, Ticket, StepTimes]] = deque()
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
        if self._trace is not None:
            self._trace.arrived(message)
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
            service=message.service,
        )
        try:
            self._scheduler.add(request)
        except RequestError as error:
            return _refusal(message, RequestFailure(ErrorKind.REQUEST, str(error), error.param, error.code))
        except CapacityError as error:
            return _refusal(message, RequestFailure(ErrorKind.CAPACITY, str(error)))
        return None

    def abort(self, message: AbortRequests) -> None:
        if self._trace is not None:
            self._trace.aborted(message)
        self._scheduler.abort(message.request_ids)

    def reset_prefix_cache(self) -> bool | None:
        """Forget every cached page; False where a request holds one, None where it is too early to say.

        It is while steps are in flight that no request waits for: they hold pages until they are collected.
        """
        if self._in_flight and not self._scheduler.has_unfinished:
            return None
        if self._trace is not None:
            self._trace.cache_reset()
        is_done = self._kv.reset_prefix_cache()
        self._publish()
        return is_done

    def step(self) -> StepDeltas | None:
        """Plan and start a step if there is one to plan; collect the oldest if that is due.

        Returns None when nothing was collected and no deadline passed. Whatever the executor raises passes through: the
        core must not be stepped again, and `fail` ends what is open.
        """
        started_s = time.perf_counter()
        now_s = self._clock.now_s()
        expired = self._scheduler.expire(now_s)
        plan = self._scheduler.schedule(now_s)
        if self._trace is not None:
            self._trace.planned(plan, now_s)
        if plan is not None:
            planned_s = time.perf_counter()
            self._heartbeat.beat()
            ticket = self._executor.submit(plan)
            self._in_flight.append((plan, ticket, StepTimes(started_s, planned_s, time.perf_counter(), ticket.build_s)))
        self._publish()  # before a step is waited for: what is planned can be shared already
        self._is_stalled = plan is None and not self._in_flight
        due = len(self._in_flight) > (self._max_left_in_flight if plan is not None else 0)
        collected = self._collect_oldest() if due else None
        self._publish()
        return _with_expired(expired, collected or StepDeltas((), self.stats())) if expired else collected

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
            num_policy_faults=scheduler.num_policy_faults,
            phase_seconds=self.recorder.phase_seconds,
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
        if self._trace is not None:
            self._trace.close()
        if self._kv_events is not None:
            self._kv_events.close()
        self._executor.close()

    def _publish(self) -> None:
        if self._kv_events is None:
            return
        events = self._kv.take_events()
        if events:
            self._kv_events.publish(events)

    def _collect_oldest(self) -> StepDeltas:
        plan, ticket, times = self._in_flight.popleft()
        self._heartbeat.beat()
        output = self._executor.collect(ticket)
        times.collected_s = time.perf_counter()
        self._heartbeat.beat()
        self._num_steps += 1
        if self._trace is not None:
            self._trace.collected(output)
        deltas = tuple([_delta(update) for update in self._scheduler.update(plan, output)])
        num_tokens = plan.total_tokens
        self.recorder.record(plan.rows, num_tokens, output, times)
        return StepDeltas(deltas, self.stats(), num_tokens)


def _delta(update: RequestUpdate) -> TokenDelta:
    request = update.request
    return TokenDelta(
        request.request_id,
        update.new_ids,
        request.finish_reason,
        request.stop_reason,
        request.num_hits,
        request.scheduled_s,
        update.logprobs,
        update.prompt_logprobs,
    )


def _with_expired(expired: Sequence[Request], step: StepDeltas) -> StepDeltas:
    """A step's deltas behind the ends of those whose deadline passed before it was planned."""
    ends = [_delta(RequestUpdate(request, ())) for request in expired]
    return StepDeltas((*ends, *step.deltas), step.stats, step.num_scheduled_tokens)


def _refusal(message: AddRequest, failure: RequestFailure) -> TokenDelta:
    return TokenDelta(message.request_id, finish_reason=FinishReason.ERROR, error=failure)
