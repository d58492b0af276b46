"""By expected length."""

from __future__ import annotations

from jaxllm.scheduler.policies.ranked import FixedRanked, positive
from jaxllm.scheduler.policy import SchedulerView
from jaxllm.types.request import Request


class ShortestFirst(FixedRanked):
    """Those with the fewest tokens left to compute first: mean completion time is least.

    Output tokens are those that the request predicts (`predicted_tokens`), else its max_tokens, else
    `default_tokens`. A second of waiting is worth `ageing_tokens_per_s` tokens: a request of s tokens is
    overtaken only by shorter ones, of r tokens, that arrive less than (s - r) / ageing_tokens_per_s
    seconds after it.
    """

    def __init__(self, default_tokens: float = 256, ageing_tokens_per_s: float = 20.0) -> None:
        super().__init__()
        self._default_tokens = positive("default_tokens", default_tokens)
        self._ageing = positive("ageing_tokens_per_s", ageing_tokens_per_s)

    def rank(self, request: Request, view: SchedulerView) -> float:
        predicted = request.service.predicted_tokens
        output = predicted if predicted is not None else request.params.max_tokens
        num_output = self._default_tokens if output is None else output
        return request.num_prompt_tokens + num_output + request.arrival_s * self._ageing
