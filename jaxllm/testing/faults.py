"""Faults at a chosen step, for any executor."""

from __future__ import annotations

import enum
import threading
from collections.abc import Sequence

import msgspec

from jaxllm.engine.executor import Executor, Ticket
from jaxllm.types.step import SchedulerOutput, StepOutput


class FaultKind(enum.Enum):
    RAISE = "raise"  # RuntimeError
    FREEZE = "freeze"  # the call does not return until the executor is closed or released
    DIE = "die"  # SystemExit, which ends the thread that made the call


class FaultPlace(enum.Enum):
    SUBMIT = "submit"
    COLLECT = "collect"


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What goes wrong in the `step`-th step (1 is the first) and in which of its two calls."""

    step: int
    kind: FaultKind
    where: FaultPlace = FaultPlace.COLLECT


class FaultInjector:
    """Plays faults when told of calls. Mutable; owned by one executor."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self._faults = tuple(faults)
        self._released = threading.Event()

    def reach(self, step: int, where: FaultPlace) -> None:
        """To be called in step number `step`, before the call does its work."""
        for fault in self._faults:
            if fault.step == step and fault.where is where:
                self._play(fault)

    def release(self) -> None:
        """Let frozen calls go on; they raise RuntimeError."""
        self._released.set()

    def _play(self, fault: Fault) -> None:
        text = f"scripted fault in {fault.where.value} of step {fault.step}"
        if fault.kind is FaultKind.DIE:
            raise SystemExit(text)
        if fault.kind is FaultKind.FREEZE:
            self._released.wait()
        raise RuntimeError(text)


class FaultyExecutor:
    """Another executor with faults put in. Mutable; owned by the engine core."""

    def __init__(self, inner: Executor, faults: Sequence[Fault]) -> None:
        self._inner = inner
        self._injector = FaultInjector(faults)
        self._num_submitted = 0

    def submit(self, plan: SchedulerOutput) -> Ticket:
        self._num_submitted += 1
        self._injector.reach(self._num_submitted, FaultPlace.SUBMIT)
        return Ticket(plan.step_id, (self._num_submitted, self._inner.submit(plan)))

    def collect(self, ticket: Ticket) -> StepOutput:
        step, inner_ticket = ticket.handle
        self._injector.reach(step, FaultPlace.COLLECT)
        return self._inner.collect(inner_ticket)

    def release(self) -> None:
        """Let frozen calls go on, for instance at the end of a test."""
        self._injector.release()

    def close(self) -> None:
        self._injector.release()
        self._inner.close()
