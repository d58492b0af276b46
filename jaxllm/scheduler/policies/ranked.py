"""Policies that are no more than a number for each request."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from jaxllm.scheduler.policies.fcfs import FirstComeFirstServed
from jaxllm.scheduler.policy import SchedulerView
from jaxllm.types.request import Request


class Ranked(FirstComeFirstServed):
    """The smallest rank first, of equal ones in the order of the queue; the largest yields its pages.

    O(waiting) a step that admits anybody, and O(log waiting) for each that is admitted.
    """

    def rank(self, request: Request, view: SchedulerView) -> float:
        """The smaller, the earlier."""
        raise NotImplementedError

    def order(self, view: SchedulerView) -> Iterator[Request]:
        heap = [(self.rank(request, view), place, request) for place, request in enumerate(view.waiting)]
        heapq.heapify(heap)
        while heap:
            yield heapq.heappop(heap)[2]

    def victim(self, view: SchedulerView, needing: Request) -> Request:
        ranks = [(self.rank(request, view), place) for place, request in enumerate(view.running)]
        return view.running[max(ranks)[1]]


class FixedRanked(Ranked):
    """Ranks that are the same at all times: who is first is worked out anew only when somebody comes or goes."""

    def __init__(self) -> None:
        self._sorted: list[Request] = []
        self._version: int | None = None  # of the queue that is sorted
        self._worst: Request | None = None
        self._running: Sequence[Request] = ()  # among whom it is the worst

    def order(self, view: SchedulerView) -> Iterator[Request]:
        if view.waiting_version is None or view.waiting_version != self._version:
            self._sorted = sorted(view.waiting, key=lambda request: self.rank(request, view))
            self._version = view.waiting_version
        return iter(self._sorted)

    def victim(self, view: SchedulerView, needing: Request) -> Request:
        if self._worst is None or view.running is not self._running:  # the scheduler's tuple: another if it changes
            self._worst, self._running = super().victim(view, needing), view.running
        return self._worst


def positive(name: str, value: object) -> float:
    """An option that must be a number above 0.

    Raises:
        ValueError: it is not; the registry makes a ConfigError of it.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ValueError(f"{name}={value!r}; accepted: a number above 0")
    return float(value)
