"""Plain numbers about a running engine: the core's state, and totals over all requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from jaxllm.types.profile import PHASES

FINISH_REASONS = ("stop", "length", "abort", "error")


@dataclass(frozen=True, slots=True)
class CoreStats:
    """The core after a step. The counters only grow; the others are the state of this moment."""

    num_running: int = 0
    num_waiting: int = 0
    num_free_pages: int = 0
    num_pages: int = 0
    kv_usage: float = 0.0  # 0 to 1
    num_preemptions: int = 0  # counter
    prefix_queries_tokens: int = 0  # counter: prompt tokens looked up in the prefix cache
    prefix_hits_tokens: int = 0  # counter: of those, tokens found
    num_steps: int = 0  # counter: steps collected
    num_policy_faults: int = 0  # counter: answers of the scheduling policy that were not to be used
    phase_seconds: tuple[float, ...] = (0.0,) * len(PHASES)  # counters, in the order of `PHASES`


@dataclass(slots=True)
class RequestTotals:
    """Counters over all requests since start. Mutable; owned by the front end's output processor."""

    prompt_tokens: int = 0  # of requests that got a first token
    cached_prompt_tokens: int = 0  # of those, tokens found in the prefix cache
    generation_tokens: int = 0  # delivered to callers: the sum of their usage
    finished: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FINISH_REASONS, 0))

    def copy(self) -> RequestTotals:
        return RequestTotals(self.prompt_tokens, self.cached_prompt_tokens, self.generation_tokens, dict(self.finished))


@dataclass(frozen=True, slots=True)
class EngineStats:
    core: CoreStats
    totals: RequestTotals  # a copy
    num_open_requests: int = 0  # accepted by the front end, not ended
    compilations_after_ready: int = 0


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """One ended request, for histograms. Moments in seconds on the front end's clock; None: never reached."""

    reason: str  # of the last of its sequences to end
    num_prompt_tokens: int
    num_generation_tokens: int  # of all its sequences
    max_tokens: int | None
    arrival_s: float
    scheduled_s: float | None
    first_token_s: float | None
    last_token_s: float | None
    finished_s: float
    num_sequences: int = 1  # the request's n
    longest_generation_tokens: int | None = None  # of its longest sequence; None: it has one
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache


class Observer(Protocol):
    """Receives what a counter cannot hold: durations and sizes, one observation at a time."""

    def first_token(self, seconds: float) -> None: ...

    def inter_token(self, seconds: float) -> None: ...

    def step(self, num_tokens: int) -> None: ...

    def finished(self, request: FinishedRequest) -> None: ...


class NoObserver:
    """For engines that nobody scrapes."""

    def first_token(self, seconds: float) -> None:
        del seconds

    def inter_token(self, seconds: float) -> None:
        del seconds

    def step(self, num_tokens: int) -> None:
        del num_tokens

    def finished(self, request: FinishedRequest) -> None:
        del request


StatsReader = Callable[[], EngineStats]
