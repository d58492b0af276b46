"""What a core decided, step by step, written down so that it can be decided again."""

from __future__ import annotations

from typing import Protocol

from jaxllm.engine.messages import AbortRequests, AddRequest
from jaxllm.types.step import SchedulerOutput, StepOutput


class TraceRecorder(Protocol):
    """Hears all that goes into a core's decisions, and what they were, in the order in which it happens.

    The core's thread calls it: `arrived`, `aborted` and `cache_reset` before the scheduler or the KV
    manager is told, `planned` after each call of `schedule`, `collected` before `update`. It keeps the
    objects and never changes them; it does not raise, and it does not wait for a disk.
    """

    def arrived(self, message: AddRequest) -> None:
        """Refused ones too: whether it is refused is a decision."""
        ...

    def aborted(self, message: AbortRequests) -> None: ...

    def cache_reset(self) -> None:
        """The prefix cache is about to be forgotten, on somebody's request."""
        ...

    def planned(self, plan: SchedulerOutput | None, now_s: float) -> None:
        """`now_s`: what `schedule` was given. None: there was nothing to plan."""
        ...

    def collected(self, output: StepOutput) -> None: ...

    def close(self) -> None:
        """Write what is left. Safe to call twice; what comes after it is dropped."""
        ...
