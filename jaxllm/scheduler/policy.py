"""What a scheduling policy sees, and the four questions it answers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxllm.types.request import Request


def _nothing_pending(request: Request) -> int:
    del request
    return 0


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
    pending_prefix: Callable[[Request], int] = _nothing_pending  # tokens behind those that others will compute
    waiting_version: int | None = None  # the same as long as `waiting` is the same; None: not known


class SchedulingPolicy(Protocol):
    """Decides who goes first. Page safety, budgets, prefix hits and stops stay with the scheduler.

    Answers are checked, so a wrong policy is slow or unfair, but harms no memory: one that raises or
    answers nonsense is reported, and fcfs answers in its place for the rest of the step.

    A policy may have a fifth method, `preempt` (see `PreemptivePolicy`).
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


@runtime_checkable
class PreemptivePolicy(Protocol):
    """A policy that lets waiting requests take the place of running ones."""

    def preempt(self, candidate: Request, view: SchedulerView) -> Request | None:
        """The running request that gives up its slot and pages for `candidate`, which finds none; None: nobody.

        Asked for the first in order that cannot start, until it can, or until the answer is None. Who
        gave way waits in front and is computed again: for a candidate no better than it, the two would
        take turns for ever.
        """
        ...
