"""A request as the scheduler sees it: token ids and counts, never text."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from jaxllm.types.sampling import SamplingParams
from jaxllm.types.service import DEFAULT_SERVICE, ServiceParams


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"  # lost its pages; waits at the front of the queue to be recomputed
    FINISHED = "finished"


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


DEADLINE = "deadline"  # the stop reason of a request that ended at it


@dataclass(slots=True, eq=False)
class Request:
    """One sequence from arrival to finish. Mutable; owned by the scheduler alone.

    Invariant: ``num_cached <= num_computed <= num_tokens``. With one step in flight while the
    next is planned, `num_in_flight` tokens are on the device but not collected yet, and
    `num_pending` sampled tokens are promised but unknown to the host. Drafts hold a place among those in
    flight, `num_placeholders` in all, and promise nothing.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    arrival_s: float
    seed: int = 0  # always resolved: the user's, or drawn by the front end
    priority: int = 0
    adapter_id: str | None = None
    cache_salt: str | None = None
    service: ServiceParams = DEFAULT_SERVICE
    bad_word_ids: tuple[tuple[int, ...], ...] = ()  # token sequences that the output may not hold
    fork_of: str | None = None  # first sibling of the same prompt, whose KV this one takes over once it is there
    media_keys: tuple[tuple[str, int, int], ...] = ()  # (content hash, first token, num tokens)

    output_ids: list[int] = field(default_factory=list[int])
    draft_ids: tuple[int, ...] = ()  # tokens that may follow the last known one, for the next step to check
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # stop id that ended it, "repetition" or "deadline"; None for EOS and length
    num_computed: int = 0  # tokens whose KV collected steps have written
    num_cached: int = 0  # of those, tokens found in the prefix cache at the latest admission
    scheduled_s: float | None = None  # when it was first given tokens, on the core's clock
    num_hits: int = 0  # tokens found in the prefix cache then; what a sibling takes over is none
    num_in_flight: int = 0  # tokens in submitted, uncollected steps
    num_placeholders: int = 0  # of those, drafts: computed if they turn out right, else forgotten
    num_pending: int = 0  # sampled tokens that uncollected steps will deliver
    num_preemptions: int = 0  # also the epoch: pieces scheduled before a preemption carry an older one
    slot: int | None = None  # row on the device while running
    pages: list[list[int]] = field(default_factory=list[list[int]])  # page ids by KV group

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens whose ids the host knows: prompt and output."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def num_uncomputed(self) -> int:
        """Tokens a step could still be given, counting the ones promised by steps in flight."""
        return self.num_tokens + self.num_pending + self.num_placeholders - self.num_computed - self.num_in_flight

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def token_ids(self) -> tuple[int, ...]:
        return self.prompt_ids + tuple(self.output_ids)
