"""The one door between deciding and computing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from jaxllm.types.step import SchedulerOutput, StepOutput


@dataclass(frozen=True, slots=True)
class Ticket:
    """Claim on a submitted step. `handle` belongs to the executor that made it."""

    step_id: int
    handle: Any = None
    build_s: float = 0.0  # seconds that packing the plan took, of those that `submit` took


class Executor(Protocol):
    """Computes steps, in the order they were submitted.

    `submit` and `collect` are two calls, so that step n+1 is planned and dispatched while step n
    runs. An exception from either means the executor is broken: the engine ends every request
    with an error and calls neither again, only `close`.
    """

    def submit(self, plan: SchedulerOutput) -> Ticket:
        """Start a step and return without waiting for the device."""
        ...

    def collect(self, ticket: Ticket) -> StepOutput:
        """Wait for a submitted step, oldest first, and return its tokens."""
        ...

    def close(self) -> None:
        """Release the device. Safe to call twice."""
        ...
