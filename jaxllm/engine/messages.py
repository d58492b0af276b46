"""The only language between front end and core.

Token ids and counts, never text. In one process the objects are handed over as they are; between
processes the same structs are encoded with msgpack (they are tagged, so a union decodes itself).
"""

from __future__ import annotations

import enum

import msgspec

from jaxllm.metrics.stats import CoreStats
from jaxllm.types.request import FinishReason
from jaxllm.types.sampling import SamplingParams
from jaxllm.types.service import DEFAULT_SERVICE, ServiceParams
from jaxllm.types.step import Logprobs, PromptLogprobs


class AddRequest(msgspec.Struct, frozen=True, tag="add"):
    """One sequence, checked and complete. `request_id` is unique for the life of the engine.

    A request with n > 1 is n of these: each but the first names the first in `fork_of`, and only the
    first asks for prompt_logprobs. `params.n` means nothing to the core.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    arrival_s: float
    seed: int
    priority: int = 0
    adapter_id: str | None = None
    cache_salt: str | None = None
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    fork_of: str | None = None
    service: ServiceParams = DEFAULT_SERVICE


class AbortRequests(msgspec.Struct, frozen=True, tag="abort"):
    """Forget these requests. Unknown ids are ignored; nothing is sent back for them."""

    request_ids: tuple[str, ...]


class ResetPrefixCache(msgspec.Struct, frozen=True, tag="reset_prefix_cache"):
    """Forget every cached page, unless a request holds one. Answered by `PrefixCacheReset` of the same serial."""

    serial: int


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Leave the loop and close the executor."""


class ErrorKind(enum.Enum):
    """Which error of the tree the caller of a request gets."""

    REQUEST = "request"
    CAPACITY = "capacity"
    DEAD = "dead"


class RequestFailure(msgspec.Struct, frozen=True):
    kind: ErrorKind
    message: str
    param: str | None = None
    code: str | None = None


class TokenDelta(msgspec.Struct, frozen=True):
    """What one collected step means for one request."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached: int = 0  # tokens found in the prefix cache when the request was first admitted
    scheduled_s: float | None = None  # when it was first scheduled, on the core's clock
    logprobs: Logprobs | None = None  # of `token_ids`
    prompt_logprobs: PromptLogprobs | None = None
    error: RequestFailure | None = None  # it ends here, with this error


class StepDeltas(msgspec.Struct, frozen=True, tag="deltas"):
    deltas: tuple[TokenDelta, ...]
    stats: CoreStats
    num_scheduled_tokens: int = 0  # of the collected step; 0 when none was collected


class PrefixCacheReset(msgspec.Struct, frozen=True, tag="prefix_cache_reset"):
    serial: int
    is_done: bool  # False: a request held pages


class CoreFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The core's last words: nothing follows."""

    message: str


ToCore = AddRequest | AbortRequests | ResetPrefixCache | Shutdown
ToFrontEnd = StepDeltas | PrefixCacheReset | CoreFailed
