"""When a request ends, as far as token ids tell; stop strings are the front end's."""

from __future__ import annotations

from dataclasses import dataclass

from jaxllm.types.request import FinishReason, Request


@dataclass(frozen=True, slots=True)
class Stop:
    reason: FinishReason
    stop_id: int | None = None  # the entry of stop_token_ids that matched; None for EOS and length


_EOS = Stop(FinishReason.STOP)
_LENGTH = Stop(FinishReason.LENGTH)


@dataclass(frozen=True, slots=True)
class StopRules:
    """Ends by EOS, by a stop id, or by length. `max_model_len` counts prompt and output tokens."""

    eos_ids: frozenset[int]
    max_model_len: int

    def max_tokens(self, request: Request) -> int:
        """Tokens, prompt and output together, at which the request has its full length."""
        max_tokens = request.params.max_tokens
        if max_tokens is None:
            return self.max_model_len
        return min(len(request.prompt_ids) + max_tokens, self.max_model_len)

    def check(self, request: Request) -> Stop | None:
        """Whether the newest output token ends the request.

        Below `min_tokens` outputs neither EOS nor a stop id ends it; the full length always does.
        Of several causes on one token EOS counts first, then a stop id, then length.
        """
        params = request.params
        token = request.output_ids[-1]
        if len(request.output_ids) >= params.min_tokens:
            if token in self.eos_ids and not params.ignore_eos:
                return _EOS
            if token in params.stop_token_ids:
                return Stop(FinishReason.STOP, token)
        return _LENGTH if request.num_tokens >= self.max_tokens(request) else None
