"""What callers of the engine receive; field names are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token_id: int
    logprob: float  # natural logarithm
    rank: int | None  # 1 = most likely; None for tokens of logprob_token_ids, which are not ranked
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One sampled sequence. With output_kind DELTA, `text` and `token_ids` hold only what is new."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None = None
    logprobs: tuple[tuple[TokenLogprob, ...], ...] | None = None  # per token: itself first, then the top, by rank
    finish_reason: str | None = None  # "stop" | "length" | "abort" | "error"
    stop_reason: int | str | None = None  # the stop string or stop id; None for EOS and length


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Moments of one request on the engine's monotonic clock, in seconds."""

    arrival_s: float
    first_token_s: float | None = None
    finished_s: float | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0  # all output tokens so far, also with output_kind DELTA
    prompt_logprobs: tuple[tuple[TokenLogprob, ...] | None, ...] | None = None
    metrics: RequestMetrics | None = None
    error: str | None = None  # set when finish_reason is "error"

    @property
    def usage(self) -> Usage:
        return Usage(len(self.prompt_token_ids), self.num_generated_tokens, self.num_cached_tokens)
