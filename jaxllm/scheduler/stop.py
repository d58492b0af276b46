"""When a request ends, as far as token ids tell; stop strings are the front end's."""

from __future__ import annotations

from dataclasses import dataclass

from jaxllm.types.request import FinishReason, Request
from jaxllm.types.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Stop:
    reason: FinishReason
    cause: int | str | None = None  # the entry of stop_token_ids, or "repetition"; None for EOS and length


_EOS = Stop(FinishReason.STOP)
_LENGTH = Stop(FinishReason.LENGTH)
_REPETITION = Stop(FinishReason.STOP, "repetition")


@dataclass(frozen=True, slots=True)
class StopRules:
    """Ends by EOS, by a stop id, by length, or by repetition. `max_model_len` counts prompt and output tokens."""

    eos_ids: frozenset[int]
    max_model_len: int

    def max_tokens(self, request: Request) -> int:
        """Tokens, prompt and output together, at which the request has its full length."""
        max_tokens = request.params.max_tokens
        if max_tokens is None:
            return self.max_model_len
        return min(len(request.prompt_ids) + max_tokens, self.max_model_len)

    def is_full(self, request: Request, num_tokens: int) -> bool:
        """Whether the request has its full length with `num_tokens` tokens, prompt and output together.

        A prompt that is only scored is full once something was sampled after it, which is then dropped.
        """
        return num_tokens >= self.max_tokens(request) and num_tokens > len(request.prompt_ids)

    def end_ids(self, params: SamplingParams) -> frozenset[int]:
        """Tokens that end a request of these params, once it has `min_tokens`."""
        eos_ids = frozenset[int]() if params.ignore_eos else self.eos_ids
        return eos_ids.union(params.stop_token_ids) if params.stop_token_ids else eos_ids

    def check(self, request: Request, *, repeats: bool = False) -> Stop | None:
        """Whether the newest output token ends the request.

        Below `min_tokens` outputs neither EOS, a stop id nor repetition (`repeats`: the output ends in
        copies of a pattern) ends it; the full length always does. Of several causes on one token EOS
        counts first, then a stop id, length, repetition.
        """
        params = request.params
        if params.max_tokens == 0:
            return _LENGTH
        token = request.output_ids[-1]
        may_stop = len(request.output_ids) >= params.min_tokens
        if may_stop:
            if token in self.eos_ids and not params.ignore_eos:
                return _EOS
            if token in params.stop_token_ids:
                return Stop(FinishReason.STOP, token)
        if request.num_tokens >= self.max_tokens(request):
            return _LENGTH
        return _REPETITION if repeats and may_stop else None
