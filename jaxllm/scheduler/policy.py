"""What a scheduling policy sees, and the four questions it answers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from jaxllm.types.request import Request


@dataclass(frozen=True, slots=True)
class SchedulerView:
    """The scheduler's state at one moment, to read: a policy changes neither it nor a request in it."""

    now_s: float
    waiting: Collection[Request]  # in order of arrival, preempted ones first; read lazily, do not keep
    running: Sequence[Request]  # in order of admission
    free_pages: int
    page_size: int
    token_cap: int  # max_num_batched_tokens
    cached_prefix: Callable[[Request], int]  # tokens of a waiting request that are cached now


class SchedulingPolicy(Protocol):
    """Decides who goes first. Page safety, budgets, prefix hits and stops stay with the scheduler.

    Answers are checked, so a wrong policy is slow or unfair, but harms no memory. An exception from
    one is passed on after the step it interrupts has been undone.
    """

    def order(self, view: SchedulerView) -> Iterable[Request]:
        """The waiting requests, the one to admit first in front; consumed as far as there is room.

        Admission ends at the first that finds no memory. Left out: not admitted in this step.
        """
        ...

    def admit(self, request: Request, view: SchedulerView) -> bool:
        """Whether it may start now. If not, the next one is asked."""
        ...

    def token_budget(self, view: SchedulerView) -> int:
        """Tokens for this step; cut to 0 .. `view.token_cap`."""
        ...

    def victim(self, view: SchedulerView, needing: Request) -> Request:
        """The running request that yields its pages to `needing`; it may be `needing` itself."""
        ...
