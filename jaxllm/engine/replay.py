"""Decides again what a trace says was decided: the real core, scheduler and memory, and no device."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from jaxllm.engine.core import EngineCore
from jaxllm.engine.executor import Ticket
from jaxllm.engine.messages import AbortRequests
from jaxllm.engine.trace import (
    Aborted,
    Arrived,
    CacheReset,
    Collected,
    Decision,
    Ended,
    Header,
    Line,
    Planned,
)
from jaxllm.engine.trace_file import read_trace
from jaxllm.errors import ConfigError, EngineDead
from jaxllm.memory.manager import KVManager
from jaxllm.scheduler.make import make_scheduler
from jaxllm.scheduler.scheduler import Scheduler
from jaxllm.types.step import Logprobs, PromptLogprobs, SchedulerOutput, StepOutput


@dataclass(frozen=True, slots=True)
class Difference:
    """The first step that was decided otherwise; texts hold one `name=value` a line for each field that differs."""

    step: int
    fields: tuple[str, ...]
    recorded: str
    replayed: str

    def __str__(self) -> str:
        return (
            f"step {self.step} was decided otherwise: {', '.join(self.fields)}\n"
            f"recorded:\n{self.recorded}\nnow:\n{self.replayed}"
        )


@dataclass(frozen=True, slots=True)
class Replay:
    num_requests: int
    num_steps: int  # that were decided as recorded
    num_preemptions: int
    plan_hash: str  # over the hashes of these steps
    ended: str | None  # why the trace ends; None: it was cut off
    difference: Difference | None


def replay(path: str | Path) -> Replay:
    """Give the core what it was given, at the recorded times, and compare each plan by its hash.

    A policy that was broken off for the time it took cannot be replayed in that step.

    Raises:
        ConfigError: the file cannot be read, is no trace, or needs a policy that is not here.
    """
    header, lines = read_trace(path)
    return _Replayed(header).run(line for _, line in lines)


def decided_by(header: Header) -> tuple[Scheduler, KVManager]:
    """A scheduler and its memory like those that a trace is of.

    Raises:
        ConfigError: it needs a policy that is not here.
    """
    return make_scheduler(header.scheduler, header.cache, header.kv_plan, eos_ids=header.eos_ids)


class _Differs(Exception):
    """The executor was asked for what the trace does not say."""


class _Replayed:
    """A core on a recorded device at recorded times: implements `Executor` and `Clock`. Mutable; used once."""

    def __init__(self, header: Header) -> None:
        self._scheduler, kv = decided_by(header)
        self._now_s = 0.0
        self._core = EngineCore(self, self._scheduler, kv, self, async_scheduling=header.scheduler.async_scheduling)
        self._plan: SchedulerOutput | None = None  # what was decided since the last look
        self._answer: Collected | None = None  # what the next collected step has answered
        self._num_requests = self._num_steps = 0
        self._hash = hashlib.blake2b(digest_size=16)

    def run(self, lines: Iterable[Line]) -> Replay:
        ahead = _Ahead(lines)
        ended: str | None = None
        difference: Difference | None = None
        for line in ahead:
            match line:
                case Arrived():
                    self._num_requests += 1
                    self._core.add(line.request)
                case Aborted():
                    self._core.abort(AbortRequests(line.request_ids))
                case CacheReset():
                    self._core.reset_prefix_cache()
                case Planned():
                    self._answer = ahead.take_collected()
                    difference = self._step(line, is_last=ahead.is_at_end)
                case Ended():
                    ended = line.reason
                case Header() | Collected():
                    raise ConfigError(f"a trace has a line {type(line).__name__!r} where none can be")
            if difference is not None:
                break
        return Replay(
            *(self._num_requests, self._num_steps, self._scheduler.num_preemptions, self._hash.hexdigest()),
            ended,
            difference,
        )

    def _step(self, line: Planned, *, is_last: bool) -> Difference | None:
        """`is_last`: nothing follows, so the core may have ended in this step."""
        self._now_s = line.now_s
        self._plan = None
        try:
            self._core.step()
            is_as_collected = self._answer is None
        except (_Differs, EngineDead):  # the second: an answer that ended the recorded core too
            is_as_collected = is_last
        decision = None if self._plan is None else Decision.of(self._plan)
        if (None if decision is None else decision.hash) != line.hash:
            return _difference(self._next_step(line), line.decision, decision)
        if not is_as_collected:
            return Difference(self._next_step(line), ("steps in flight",), "", "")
        if line.hash is not None:
            self._num_steps += 1
            self._hash.update(line.hash.encode())
        return None

    def _next_step(self, line: Planned) -> int:
        return self._num_steps if line.decision is None else line.decision.step

    # The device and the clock

    def now_s(self) -> float:
        return self._now_s

    def submit(self, plan: SchedulerOutput) -> Ticket:
        self._plan = plan
        return Ticket(plan.step_id, None)

    def collect(self, ticket: Ticket) -> StepOutput:
        answer, self._answer = self._answer, None
        if answer is None or answer.step != ticket.step_id:
            raise _Differs
        return _output(answer)

    def close(self) -> None:
        """Nothing is held."""


class _Ahead:
    """Lines, one of them looked at before its turn. Mutable."""

    def __init__(self, lines: Iterable[Line]) -> None:
        self._lines = iter(lines)
        self._next: Line | None = next(self._lines, None)

    def __iter__(self) -> Iterator[Line]:
        while self._next is not None:
            line, self._next = self._next, next(self._lines, None)
            yield line

    @property
    def is_at_end(self) -> bool:
        return self._next is None or isinstance(self._next, Ended)

    def take_collected(self) -> Collected | None:
        """What follows, if a step collects it."""
        line = self._next
        if not isinstance(line, Collected):
            return None
        self._next = next(self._lines, None)
        return line


def _output(answer: Collected) -> StepOutput:
    return StepOutput(
        answer.step,
        answer.tokens,
        answer.num_accepted,
        {request_id: _columns(num) for request_id, num in answer.num_logprobs.items()},
        {i: PromptLogprobs(start, _columns(num)) for i, (start, num) in answer.prompt_logprobs.items()},
        answer.device_s,
    )


def _columns(num: int) -> Logprobs:
    """Of as many positions as there were, since nothing was kept of their values."""
    return Logprobs([0] * num, [0.0] * num, [1] * num, [[] for _ in range(num)], [[] for _ in range(num)])


def _difference(step: int, recorded: Decision | None, replayed: Decision | None) -> Difference:
    if recorded is None or replayed is None:
        texts = ["no step" if each is None else _text(each, each.__struct_fields__) for each in (recorded, replayed)]
        return Difference(step, ("whether there is a step",), *texts)
    names = tuple(n for n in Decision.__struct_fields__ if getattr(recorded, n) != getattr(replayed, n))
    return Difference(step, names, _text(recorded, names), _text(replayed, names))


def _text(decision: Decision, names: Iterable[str]) -> str:
    return "\n".join(f"  {name}={getattr(decision, name)!r}" for name in names)
