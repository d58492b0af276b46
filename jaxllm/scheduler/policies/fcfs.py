"""First come, first served."""

from __future__ import annotations

from collections.abc import Iterable

from jaxllm.scheduler.policy import SchedulerView
from jaxllm.types.request import Request


class FirstComeFirstServed:
    """Admit in order of arrival, with the whole budget; the most recently admitted yields."""

    def order(self, view: SchedulerView) -> Iterable[Request]:
        return view.waiting

    def admit(self, request: Request, view: SchedulerView) -> bool:
        return True

    def token_budget(self, view: SchedulerView) -> int:
        return view.token_cap

    def victim(self, view: SchedulerView, needing: Request) -> Request:
        return view.running[-1]
