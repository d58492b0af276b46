"""All open requests: what the core sends becomes what callers get, and is counted once."""

from __future__ import annotations

import time
from collections.abc import Iterable

from jaxllm.engine.logprobs import TokenTexts
from jaxllm.engine.messages import AddRequest, ErrorKind, RequestFailure, StepDeltas, TokenDelta
from jaxllm.engine.open_request import Deliver, OpenRequest, OpenSequence, PushText
from jaxllm.errors import CapacityError, EngineDead, RequestError
from jaxllm.metrics.stats import FinishedRequest, Observer, RequestTotals
from jaxllm.tokenizer.base import Tokenizer
from jaxllm.types.profile import PhaseClock
from jaxllm.types.request import FinishReason

CoreIds = dict[int, list[str]]  # sequences that a core must drop, by the core's number


class OutputProcessor:
    """All open requests. Mutable; owned by the front end.

    Each request ends exactly once: with a finished `RequestOutput`, or with an exception handed
    to its `deliver`. What the core still sends for an ended request is ignored.
    """

    def __init__(
        self, tokenizer: Tokenizer, observer: Observer, num_cores: int = 1, phases: PhaseClock | None = None
    ) -> None:
        """`phases` gets the seconds spent on text."""
        self._tokenizer = tokenizer
        self._observer = observer
        self._phases = phases or PhaseClock()
        self._texts = TokenTexts(tokenizer)
        self._open: dict[str, OpenRequest] = {}  # by the callers' ids
        self._sequences: dict[str, OpenSequence] = {}  # those not ended, by the cores' ids
        self.totals = RequestTotals()
        self.loads = [0] * num_cores  # sequences not ended, by core

    @property
    def num_open(self) -> int:
        return len(self._open)

    def is_open(self, request_id: str) -> bool:
        return request_id in self._open

    def open(
        self,
        message: AddRequest,
        core_ids: Iterable[str],
        prompt: str | None,
        deliver: Deliver,
        *,
        core: int = 0,
        is_counted: bool = True,
        push_text: PushText | None = None,
    ) -> None:
        """Take in a request under the caller's id, whose sequences the core at number `core` knows as `core_ids`.

        With `push_text`, what is text alone is offered to that first.
        """
        request = OpenRequest(message, tuple(core_ids), prompt, deliver, self._tokenizer, self._texts)
        request.core, request.is_counted, request.push_text = core, is_counted, push_text
        self._open[request.request_id] = request
        self._sequences.update((sequence.core_id, sequence) for sequence in request.sequences)
        self.loads[core] += len(request.sequences)

    def process(self, step: StepDeltas, now_s: float) -> list[str]:
        """Deliver a step's news; returns the sequences that the core must drop: it does not know they ended.

        A request hears of all its sequences at once.
        """
        if step.num_scheduled_tokens:
            self._observer.step(step.num_scheduled_tokens)
        dropped: list[str] = []
        news: dict[str, OpenRequest] = {}
        started_s = time.perf_counter()
        for delta in step.deltas:
            sequence = self._sequences.get(delta.request_id)
            if sequence is None:
                continue
            request = sequence.request
            if self._take_in(sequence, delta, dropped, now_s):
                news[request.request_id] = request
            else:
                news.pop(request.request_id, None)
        self._phases.detokenise_s += time.perf_counter() - started_s
        for request in news.values():
            request.show()
        return dropped

    def abort(self, request_ids: Iterable[str], now_s: float) -> CoreIds:
        """End requests by the callers' ids, unknown ones ignored; returns what the cores must drop."""
        dropped: CoreIds = {}
        for request_id in request_ids:
            request = self._open.get(request_id)
            if request is None:
                continue
            running = self._close_sequences(request)
            for sequence in running:
                sequence.abort()
            dropped.setdefault(request.core, []).extend(sequence.core_id for sequence in running)
            self._end(request, FinishReason.ABORT, now_s)
            request.deliver(request.output())
        return dropped

    def abort_all(self, now_s: float) -> CoreIds:
        return self.abort(list(self._open), now_s)

    def fail_all(self, message: str, now_s: float) -> None:
        """The engine is dead: end every open request with `EngineDead`."""
        for request in list(self._open.values()):
            self._fail(request, EngineDead(message), now_s)

    def count(self, request: FinishedRequest) -> None:
        """Count a request that ran as many others, which were not counted."""
        if request.first_token_s is not None:
            self.totals.prompt_tokens += request.num_prompt_tokens
            self.totals.cached_prompt_tokens += request.num_cached_tokens
            self._observer.first_token(request.first_token_s - request.arrival_s)
        self.totals.generation_tokens += request.num_generation_tokens
        self.totals.finished[request.reason] += 1
        self._observer.finished(request)

    def _take_in(self, sequence: OpenSequence, delta: TokenDelta, dropped: list[str], now_s: float) -> bool:
        """A step's news of one sequence; False if they end its request with an exception."""
        request = sequence.request
        try:
            if delta.error is not None:
                raise _exception(delta.error)
            num_new = sequence.push(delta)
            if delta.prompt_logprobs is not None and request.prompt_positions is not None:
                request.prompt_positions.push(delta.prompt_logprobs)
        except Exception as error:  # one request's text must not take the others down
            running = self._fail(request, error, now_s)
            has_ended = delta.error is not None or delta.finish_reason is not None
            dropped += [each.core_id for each in running if each is not sequence or not has_ended]
            return False
        self._count_tokens(sequence, delta, num_new, now_s)
        if sequence.finish_reason is not None:
            del self._sequences[sequence.core_id]
            self.loads[request.core] -= 1
            request.num_running -= 1
            if delta.finish_reason is None:
                dropped.append(sequence.core_id)
            if request.num_running == 0:
                self._end(request, sequence.finish_reason, now_s)
        return True

    def _count_tokens(self, sequence: OpenSequence, delta: TokenDelta, num_new: int, now_s: float) -> None:
        request = sequence.request
        if not request.has_counted_prompt and (num_new or delta.finish_reason is not None):
            self._count_prompt(sequence, delta)
        if not num_new:
            return
        if request.is_counted:
            self.totals.generation_tokens += num_new
            if sequence.last_token_s is not None:
                self._observer.inter_token(now_s - sequence.last_token_s)
            elif request.first_token_s is None:
                self._observer.first_token(now_s - request.arrival_s)
        if request.first_token_s is None:
            request.first_token_s = now_s
        request.last_token_s = sequence.last_token_s = now_s

    def _count_prompt(self, sequence: OpenSequence, delta: TokenDelta) -> None:
        request = sequence.request
        request.has_counted_prompt = True
        request.scheduled_s = delta.scheduled_s
        request.num_cached = delta.num_cached if sequence.index == 0 else 0  # the others share its pages
        if request.is_counted:
            self.totals.prompt_tokens += len(request.prompt_ids)
            self.totals.cached_prompt_tokens += request.num_cached

    def _fail(self, request: OpenRequest, error: Exception, now_s: float) -> list[OpenSequence]:
        """End a request with an exception; returns its sequences that had not ended."""
        running = self._close_sequences(request)
        if isinstance(error, (RequestError, CapacityError)):
            del self._open[request.request_id]  # refused, never accepted: no request to count
        else:
            self._end(request, FinishReason.ERROR, now_s)
        request.deliver(error)
        return running

    def _close_sequences(self, request: OpenRequest) -> list[OpenSequence]:
        running = [s for s in request.sequences if self._sequences.pop(s.core_id, None) is not None]
        self.loads[request.core] -= len(running)
        request.num_running = 0
        return running

    def _end(self, request: OpenRequest, reason: FinishReason, now_s: float) -> None:
        del self._open[request.request_id]
        request.finished_s = now_s
        if not request.is_counted:
            return
        self.totals.finished[reason.value] += 1
        lengths = [len(sequence.token_ids) for sequence in request.sequences]
        self._observer.finished(
            FinishedRequest(
                reason=reason.value,
                num_prompt_tokens=len(request.prompt_ids),
                num_generation_tokens=sum(lengths),
                max_tokens=request.params.max_tokens,
                arrival_s=request.arrival_s,
                scheduled_s=request.scheduled_s,
                first_token_s=request.first_token_s,
                last_token_s=request.last_token_s,
                finished_s=now_s,
                num_sequences=len(lengths),
                longest_generation_tokens=max(lengths) if len(lengths) > 1 else None,
                num_cached_tokens=request.num_cached,
            )
        )


def _exception(failure: RequestFailure) -> Exception:
    match failure.kind:
        case ErrorKind.REQUEST:
            return RequestError(failure.message, param=failure.param, code=failure.code)
        case ErrorKind.CAPACITY:
            return CapacityError(failure.message)
        case ErrorKind.DEAD:
            return EngineDead(failure.message)
