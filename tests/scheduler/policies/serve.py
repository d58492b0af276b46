"""Arrivals in modelled time, run through the real scheduler: what a policy promises, without a clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from jaxllm.types.request import Request
from tests.scheduler.driver import Driver

STEP_S = 0.01
TOKEN_S = 0.001  # a token of a step


@dataclass
class Served:
    first_s: dict[Request, float] = field(default_factory=dict[Request, float])
    end_s: dict[Request, float] = field(default_factory=dict[Request, float])
    duration_s: float = 0.0


def serve(
    driver: Driver,
    arrivals: Sequence[tuple[float, Callable[[float], Request]]],
    until_s: float = float("inf"),
    on_step: Callable[[float], None] = lambda _: None,
) -> Served:
    """Add each request when its time has come; a step takes a fixed time and some more for each token."""
    served, now_s, pending, open_ = Served(), 0.0, list(arrivals), list[Request]()
    while (pending or open_) and now_s < until_s:
        while pending and pending[0][0] <= now_s:
            at_s, add = pending.pop(0)
            open_.append(add(at_s))
        plan = driver.scheduler.schedule(now_s)
        if plan is None:
            now_s = max(now_s, pending[0][0]) if pending else now_s
            assert pending, "requests are left and nothing is planned"
            continue
        now_s += STEP_S + TOKEN_S * plan.total_tokens
        driver.scheduler.update(plan, driver.device.run(plan))
        for request in open_:
            if request.output_ids:
                served.first_s.setdefault(request, now_s)
            if request.is_finished:
                served.end_s[request] = now_s
        open_ = [request for request in open_ if not request.is_finished]
        on_step(now_s)
    served.duration_s = now_s
    return served
