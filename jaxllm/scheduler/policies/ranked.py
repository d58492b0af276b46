"""Policies that are no more than a number for each request."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

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


def positive(name: str, value: object) -> float:
    """An option that must be a number above 0.

    Raises:
        ValueError: it is not; the registry makes a ConfigError of it.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ValueError(f"{name}={value!r}; accepted: a number above 0")
    return float(value)
