"""From token ids to what callers see: safe text, stop strings, usage, moments."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from jaxllm.engine.messages import AddRequest, ErrorKind, RequestFailure, StepDeltas, TokenDelta
from jaxllm.errors import CapacityError, EngineDead, RequestError
from jaxllm.metrics.stats import FinishedRequest, Observer, RequestTotals
from jaxllm.tokenizer.base import Tokenizer
from jaxllm.tokenizer.detokenize import IncrementalDetokenizer
from jaxllm.tokenizer.stops import StopMatcher
from jaxllm.types.outputs import CompletionOutput, RequestMetrics, RequestOutput
from jaxllm.types.request import FinishReason
from jaxllm.types.sampling import OutputKind, SamplingParams

Deliver = Callable[[RequestOutput | Exception], None]


class RequestText:
    """The text of one request as its ids come in. Mutable; owned by its `OpenRequest`.

    Stop strings are looked for in the text of the tokens after the first `min_tokens`.
    """

    __slots__ = ("_detokenizer", "_has_stops", "_matcher", "_unchecked_tokens", "matched", "text")

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._detokenizer: IncrementalDetokenizer | None = None
        if params.detokenize:
            self._detokenizer = IncrementalDetokenizer(
                tokenizer, params.skip_special_tokens, params.spaces_between_special_tokens
            )
        self._has_stops = bool(params.stop)
        self._matcher = StopMatcher(params.stop, params.include_stop_str_in_output)
        self._unchecked_tokens = params.min_tokens
        self.text = ""
        self.matched: str | None = None

    def push(self, token_id: int) -> None:
        if self._detokenizer is None:
            return
        text = self._detokenizer.push((token_id,))
        if self._unchecked_tokens > 0:
            self._unchecked_tokens -= 1
            self.text += text
        else:
            self._check(text)

    def finish(self) -> None:
        """No more ids: show what was held back, unless a stop string already ended the text."""
        if self._detokenizer is None or self.matched is not None:
            return
        self._check(self._detokenizer.finish())
        if self.matched is None:
            self.text += self._matcher.finish()

    def _check(self, text: str) -> None:
        if self._has_stops:
            text, self.matched = self._matcher.push(text)
        self.text += text


class OpenRequest:
    """One request between acceptance and its end. Mutable; owned by the `OutputProcessor`."""

    def __init__(self, message: AddRequest, request_id: str, prompt: str | None, text: RequestText) -> None:
        self.request_id = request_id
        self.core_id = message.request_id
        self.prompt = prompt
        self.prompt_ids = message.prompt_ids
        self.params = message.params
        self.arrival_s = message.arrival_s
        self.token_ids: list[int] = []
        self.text = text
        self.num_cached = 0
        self.scheduled_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.finished_s: float | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self._shown_tokens = 0
        self._shown_chars = 0

    def push(self, delta: TokenDelta) -> int:
        """Take in the ids of a step; returns how many count (those after a stop string do not)."""
        before = len(self.token_ids)
        for token_id in delta.token_ids:
            self.token_ids.append(token_id)
            self.text.push(token_id)
            if self.text.matched is not None:
                break
        if self.text.matched is not None:
            self.finish(FinishReason.STOP, self.text.matched)
        elif delta.finish_reason is not None:
            self.finish(delta.finish_reason, delta.stop_reason)
        return len(self.token_ids) - before

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        self.finish_reason, self.stop_reason = reason, stop_reason
        self.text.finish()
        if self.text.matched is not None:  # only the last, unfinished character completed it
            self.finish_reason, self.stop_reason = FinishReason.STOP, self.text.matched

    def is_due(self) -> bool:
        """Whether the caller should hear of it now: the first and last tokens at once, others by interval."""
        if self.finish_reason is not None:
            return True
        if self.params.output_kind is OutputKind.FINAL_ONLY:
            return False
        fresh = len(self.token_ids) - self._shown_tokens
        return fresh >= (self.params.stream_interval or 1) or (self._shown_tokens == 0 and fresh > 0)

    def output(self) -> RequestOutput:
        """What the caller gets now; marks it as shown."""
        is_delta = self.params.output_kind is OutputKind.DELTA
        completion = CompletionOutput(
            index=0,
            text=self.text.text[self._shown_chars :] if is_delta else self.text.text,
            token_ids=tuple(self.token_ids[self._shown_tokens :] if is_delta else self.token_ids),
            finish_reason=None if self.finish_reason is None else self.finish_reason.value,
            stop_reason=self.stop_reason,
        )
        self._shown_tokens, self._shown_chars = len(self.token_ids), len(self.text.text)
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_ids,
            outputs=(completion,),
            finished=self.finish_reason is not None,
            num_cached_tokens=self.num_cached,
            num_generated_tokens=len(self.token_ids),
            metrics=RequestMetrics(self.arrival_s, self.first_token_s, self.finished_s),
        )


class OutputProcessor:
    """All open requests. Mutable; owned by the front end.

    Each request ends exactly once: with a finished `RequestOutput`, or with an exception handed
    to its `deliver`. What the core still sends for an ended request is ignored.
    """

    def __init__(self, tokenizer: Tokenizer, observer: Observer) -> None:
        self._tokenizer = tokenizer
        self._observer = observer
        self._open: dict[str, tuple[OpenRequest, Deliver]] = {}
        self._core_ids: dict[str, str] = {}
        self.totals = RequestTotals()

    @property
    def num_open(self) -> int:
        return len(self._open)

    def is_open(self, request_id: str) -> bool:
        return request_id in self._core_ids

    def open(self, message: AddRequest, request_id: str, prompt: str | None, deliver: Deliver) -> None:
        """`message.request_id` is the id between front end and core; `request_id` the caller's."""
        text = RequestText(self._tokenizer, message.params)
        request = OpenRequest(message, request_id, prompt, text)
        self._open[message.request_id] = (request, deliver)
        self._core_ids[request_id] = message.request_id

    def process(self, step: StepDeltas, now_s: float) -> list[str]:
        """Deliver a step's news; returns the core ids that the core must drop: it does not know they ended."""
        if step.num_scheduled_tokens:
            self._observer.step(step.num_scheduled_tokens)
        return [delta.request_id for delta in step.deltas if self._process_one(delta, now_s)]

    def abort(self, request_ids: Iterable[str], now_s: float) -> list[str]:
        """End requests by the callers' ids, unknown ones ignored; returns their core ids."""
        core_ids = [self._core_ids[request_id] for request_id in request_ids if request_id in self._core_ids]
        for core_id in core_ids:
            request, deliver = self._open[core_id]
            request.finish(FinishReason.ABORT)
            request.finish_reason = FinishReason.ABORT  # also when the flushed text held a stop string
            self._end(request, FinishReason.ABORT, now_s)
            deliver(request.output())
        return core_ids

    def abort_all(self, now_s: float) -> list[str]:
        return self.abort(list(self._core_ids), now_s)

    def fail_all(self, message: str, now_s: float) -> None:
        """The engine is dead: end every open request with `EngineDead`."""
        for core_id in list(self._open):
            self._fail(core_id, EngineDead(message), now_s)

    def _process_one(self, delta: TokenDelta, now_s: float) -> bool:
        entry = self._open.get(delta.request_id)
        if entry is None:
            return False
        if delta.error is not None:
            self._fail(delta.request_id, _exception(delta.error), now_s)
            return False
        request, deliver = entry
        try:
            num_new = request.push(delta)
        except Exception as error:  # one request's text must not take the others down
            self._fail(delta.request_id, error, now_s)
            return delta.finish_reason is None
        self._count_tokens(request, delta, num_new, now_s)
        if request.finish_reason is not None:
            self._end(request, request.finish_reason, now_s)
        if request.is_due():
            deliver(request.output())
        return request.finish_reason is not None and delta.finish_reason is None

    def _count_tokens(self, request: OpenRequest, delta: TokenDelta, num_new: int, now_s: float) -> None:
        request.scheduled_s = delta.scheduled_s
        if not num_new:
            return
        self.totals.generation_tokens += num_new
        if request.first_token_s is None:
            request.first_token_s = now_s
            request.num_cached = delta.num_cached
            self.totals.prompt_tokens += len(request.prompt_ids)
            self.totals.cached_prompt_tokens += delta.num_cached
            self._observer.first_token(now_s - request.arrival_s)
        elif request.last_token_s is not None:
            self._observer.inter_token(now_s - request.last_token_s)
        request.last_token_s = now_s

    def _fail(self, core_id: str, error: Exception, now_s: float) -> None:
        request, deliver = self._open[core_id]
        if isinstance(error, (RequestError, CapacityError)):
            self._forget(request)  # refused, never accepted: no request to count
        else:
            self._end(request, FinishReason.ERROR, now_s)
        deliver(error)

    def _end(self, request: OpenRequest, reason: FinishReason, now_s: float) -> None:
        self._forget(request)
        request.finished_s = now_s
        self.totals.finished[reason.value] += 1
        self._observer.finished(
            FinishedRequest(
                reason=reason.value,
                num_prompt_tokens=len(request.prompt_ids),
                num_generation_tokens=len(request.token_ids),
                max_tokens=request.params.max_tokens,
                arrival_s=request.arrival_s,
                scheduled_s=request.scheduled_s,
                first_token_s=request.first_token_s,
                last_token_s=request.last_token_s,
                finished_s=now_s,
            )
        )

    def _forget(self, request: OpenRequest) -> None:
        del self._open[request.core_id]
        del self._core_ids[request.request_id]


def merge_outputs(earlier: RequestOutput, later: RequestOutput, kind: OutputKind) -> RequestOutput:
    """One output in place of two that the caller has not read yet."""
    if kind is not OutputKind.DELTA:
        return later
    first, second = earlier.outputs[0], later.outputs[0]
    joined = replace(second, text=first.text + second.text, token_ids=first.token_ids + second.token_ids)
    return replace(later, outputs=(joined,))


def _exception(failure: RequestFailure) -> Exception:
    match failure.kind:
        case ErrorKind.REQUEST:
            return RequestError(failure.message, param=failure.param, code=failure.code)
        case ErrorKind.CAPACITY:
            return CapacityError(failure.message)
        case ErrorKind.DEAD:
            return EngineDead(failure.message)
