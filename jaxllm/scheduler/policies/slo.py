"""By the time that is left until a target is missed."""

from __future__ import annotations

from jaxllm.scheduler.policies.ranked import Ranked, positive
from jaxllm.scheduler.policy import SchedulerView
from jaxllm.types.request import Request

_MISSED = 1e9  # seconds: behind all that can still be met


class LeastSlack(Ranked):
    """Least slack first: seconds until the first token must be there, less those that computing it takes.

    A request whose target cannot be met any more comes after all that can: it would only make others
    late too. Targets are the request's own (`ttft_target_s`), else `ttft_target_s` here; computing a
    prompt is taken to go at `prefill_tokens_per_s`. The running request with the loosest target for a
    token (`tpot_target_s`) yields its pages.
    """

    def __init__(
        self, ttft_target_s: float = 1.0, tpot_target_s: float = 0.1, prefill_tokens_per_s: float = 2000.0
    ) -> None:
        self._ttft_s = positive("ttft_target_s", ttft_target_s)
        self._tpot_s = positive("tpot_target_s", tpot_target_s)
        self._rate = positive("prefill_tokens_per_s", prefill_tokens_per_s)

    def rank(self, request: Request, view: SchedulerView) -> float:
        if request.output_ids:  # preempted: its next token is due
            return -1.0 / (request.service.tpot_target_s or self._tpot_s)
        due_s = request.arrival_s + (request.service.ttft_target_s or self._ttft_s)
        slack_s = due_s - view.now_s - (request.num_tokens - view.cached_prefix(request)) / self._rate
        return slack_s if slack_s >= 0 else _MISSED - slack_s

    def victim(self, view: SchedulerView, needing: Request) -> Request:
        targets = [(r.service.tpot_target_s or self._tpot_s, place) for place, r in enumerate(view.running)]
        return view.running[max(targets)[1]]
