"""By priority, with ageing."""

from __future__ import annotations

from jaxllm.scheduler.policies.ranked import FixedRanked, positive
from jaxllm.scheduler.policy import SchedulerView
from jaxllm.types.request import Request


class Priority(FixedRanked):
    """Lower `priority` first, and at the cost of a running one of higher number; equal ones as they arrive.

    A priority is worth `ageing_s` seconds of waiting: rank = arrival + priority × ageing_s. Ranks never
    change, so of two requests one is always before the other and they never take turns; and nobody
    starves: a request of priority p is overtaken only by those of a priority q < p that arrive less than
    (p - q) × ageing_s seconds after it. Once these have ended, it runs, and is not preempted again.
    """

    def __init__(self, ageing_s: float = 60.0) -> None:
        super().__init__()
        self._ageing_s = positive("ageing_s", ageing_s)

    def rank(self, request: Request, view: SchedulerView) -> float:
        return request.arrival_s + request.priority * self._ageing_s

    def preempt(self, candidate: Request, view: SchedulerView) -> Request | None:
        """The last in rank, if it is of higher number and behind the candidate."""
        worst = self.victim(view, candidate)
        is_behind = self.rank(worst, view) > self.rank(candidate, view)
        return worst if is_behind and worst.priority > candidate.priority else None
