"""What may wait, for how long, and how much of a step prompts may take."""

from __future__ import annotations

import heapq
from collections.abc import Collection

from jaxllm.config.engine import SchedulerConfig
from jaxllm.errors import CapacityError, RequestError
from jaxllm.memory.manager import KVManager
from jaxllm.scheduler.queues import WaitingQueue
from jaxllm.types.request import Request

_FEWEST_SWEPT = 64


class QueueLimits:
    """Which requests are taken in at all."""

    def __init__(self, config: SchedulerConfig, kv: KVManager, max_model_len: int) -> None:
        self._config = config
        self._kv = kv
        self._max_model_len = max_model_len

    def check(self, request: Request, unfinished: Collection[str], waiting: WaitingQueue) -> None:
        """Raise unless the request may wait.

        Raises:
            RequestError: its id is in use, or its prompt is empty or leaves no room for a token (one that
                is only scored needs none).
            CapacityError: the queue is full, or the prompt is larger than all of KV memory.
        """
        if request.request_id in unfinished:
            raise RequestError(
                f"request_id={request.request_id!r} is in use; accepted: an id of no unfinished request",
                param="request_id",
            )
        self._check_prompt(request)
        most_reqs, most_tokens = self._config.max_num_queued_reqs, self._config.max_num_queued_tokens
        if most_reqs is not None and len(unfinished) >= most_reqs:
            raise CapacityError(
                f"{len(unfinished)} requests wait or run; accepted: at most max_num_queued_reqs={most_reqs}"
            )
        if most_tokens is not None and waiting.num_prompt_tokens >= most_tokens:
            raise CapacityError(
                f"{waiting.num_prompt_tokens} prompt tokens wait; accepted: below max_num_queued_tokens={most_tokens}"
            )

    def _check_prompt(self, request: Request) -> None:
        num_prompt = request.num_prompt_tokens
        num_more = 0 if request.params.max_tokens == 0 else 1
        if not 0 < num_prompt <= self._max_model_len - num_more:
            room = "which leaves room for one more within " if num_more else ""
            raise RequestError(
                f"the prompt has {num_prompt} tokens; accepted: 1 to {self._max_model_len - num_more}, {room}"
                f"max_model_len={self._max_model_len}",
                param="prompt",
            )
        if num_prompt > self._kv.capacity_tokens:
            raise CapacityError(
                f"the prompt has {num_prompt} tokens; accepted: at most {self._kv.capacity_tokens}, "
                f"all that the {self._kv.num_pages - 1} pages of KV memory hold"
            )


class Deadlines:
    """Requests that end at a time, whatever they have. Mutable; owned by the scheduler. O(log n) each."""

    def __init__(self, default_s: float | None) -> None:
        self._default_s = default_s  # after arrival, of a request that names none
        self._heap: list[tuple[float, int, Request]] = []
        self._num_added = 0  # breaks ties: requests do not compare
        self._sweep_at = _FEWEST_SWEPT

    def add(self, request: Request) -> None:
        after_s = request.service.deadline_s or self._default_s
        if after_s is not None:
            self._sweep()
            heapq.heappush(self._heap, (request.arrival_s + after_s, self._num_added, request))
            self._num_added += 1

    def __len__(self) -> int:
        return len(self._heap)

    def _sweep(self) -> None:
        """Forget those that ended, once in as many additions as there are entries."""
        if len(self._heap) < self._sweep_at:
            return
        self._heap = [entry for entry in self._heap if not entry[2].is_finished]
        heapq.heapify(self._heap)
        self._sweep_at = max(_FEWEST_SWEPT, 2 * len(self._heap))

    def take(self, now_s: float) -> list[Request]:
        """Unfinished requests whose time has come, each once."""
        passed: list[Request] = []
        while self._heap and (self._heap[0][0] <= now_s or self._heap[0][2].is_finished):
            request = heapq.heappop(self._heap)[2]
            if not request.is_finished:
                passed.append(request)
        return passed


class PromptLimits:
    """How steps are shared between prompts, and between prompts and decodes."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._longest_short = config.long_prefill_token_threshold or config.max_num_batched_tokens
        self.limits_partial = not (config.max_num_partial_prefills is config.max_long_partial_prefills is None)

    def budget(self, budget: int, num_decodes: int) -> int:
        """Tokens that all prompts together may take of a step of `budget` tokens, decodes included; at least 1."""
        share = self._config.decode_budget_share if self._config.enable_chunked_prefill and num_decodes else 0.0
        return max(1, int(budget * (1.0 - share)))

    def longest_piece(self, *, is_shared: bool) -> int:
        """Tokens that one prompt may take of a step, which it shares with other requests or not."""
        threshold = self._config.long_prefill_token_threshold
        is_limited = threshold > 0 and is_shared and self._config.enable_chunked_prefill
        return threshold if is_limited else self._config.max_num_batched_tokens

    def takes_partial(self, request: Request, partial: Collection[Request]) -> bool:
        """Whether one more prompt may be left half computed beside those that are."""
        most, most_long = self._config.max_num_partial_prefills, self._config.max_long_partial_prefills
        if most is not None and len(partial) >= most:
            return False
        num_long = sum(map(self._is_long, partial))
        return most_long is None or not self._is_long(request) or num_long < most_long

    def _is_long(self, request: Request) -> bool:
        return request.num_tokens > self._longest_short
