"""A request between acceptance and its end: its sequences, and what its caller has been shown of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from jaxllm.engine.logprobs import OutputLogprobs, Position, PromptPositions, TokenTexts
from jaxllm.engine.messages import AddRequest, TokenDelta
from jaxllm.engine.text import SequenceText
from jaxllm.types.outputs import CompletionOutput, RequestMetrics, RequestOutput
from jaxllm.types.request import FinishReason
from jaxllm.types.sampling import OutputKind

if TYPE_CHECKING:
    from jaxllm.tokenizer.base import Tokenizer

Deliver = Callable[[RequestOutput | Exception], None]
PushText = Callable[[str], bool]  # whether it took the text


class OpenSequence:
    """One sequence of an open request. Mutable; owned by its `OpenRequest`."""

    __slots__ = (
        "_interval",
        "_logprobs",
        "_shown_end",
        "_shown_tokens",
        "core_id",
        "finish_reason",
        "index",
        "last_token_s",
        "request",
        "stop_reason",
        "text",
        "token_ids",
    )

    def __init__(
        self, request: OpenRequest, index: int, core_id: str, text: SequenceText, logprobs: OutputLogprobs | None
    ) -> None:
        self.request = request
        self.index = index
        self.core_id = core_id
        self.text = text
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.last_token_s: float | None = None
        self._logprobs = logprobs
        self._interval = request.params.stream_interval or 1
        self._shown_tokens = 0
        self._shown_end = False

    def push(self, delta: TokenDelta) -> int:
        """Take in the ids of a step; returns how many count (those after a stop string do not)."""
        num_new = self.text.push(delta.token_ids)
        self.token_ids += delta.token_ids if num_new == len(delta.token_ids) else delta.token_ids[:num_new]
        if self._logprobs is not None and delta.logprobs is not None:
            self._logprobs.push(delta.logprobs, num_new)
        if self.text.matched is not None:
            self.finish(FinishReason.STOP, self.text.matched)
        elif delta.finish_reason is not None:
            self.finish(delta.finish_reason, delta.stop_reason)
        return num_new

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        self.finish_reason, self.stop_reason = reason, stop_reason
        self.text.finish()
        if self.text.matched is not None:  # only the last, unfinished character completed it
            self.finish_reason, self.stop_reason = FinishReason.STOP, self.text.matched

    def abort(self) -> None:
        self.finish(FinishReason.ABORT)
        self.finish_reason = FinishReason.ABORT  # also when the flushed text held a stop string

    def is_due(self) -> bool:
        """Whether there is news worth showing: the first and last tokens at once, others by interval."""
        if self.finish_reason is not None:
            return not self._shown_end
        fresh = len(self.token_ids) - self._shown_tokens
        return fresh >= self._interval or (self._shown_tokens == 0 and fresh > 0)

    def can_be_text(self) -> bool:
        """Whether its news is text alone: the first output tells of the prompt, the last of the end."""
        return self._shown_tokens > 0 and self.finish_reason is None and self._logprobs is None

    def pass_over(self) -> None:
        """What is new has been shown as text."""
        self._shown_tokens = len(self.token_ids)
        self.text.take()

    def completion(self, is_delta: bool) -> CompletionOutput:
        """What the caller gets of it now; marks it as shown."""
        first_token = self._shown_tokens if is_delta else 0
        logprobs = self._logprobs
        completion = CompletionOutput(
            index=self.index,
            text=self.text.take() if is_delta else self.text.text,
            token_ids=tuple(self.token_ids[first_token:]),
            cumulative_logprob=None if logprobs is None else logprobs.cumulative,
            logprobs=None if logprobs is None else tuple(logprobs.positions[first_token:]),
            finish_reason=None if self.finish_reason is None else self.finish_reason.value,
            stop_reason=self.stop_reason,
        )
        self._shown_tokens = len(self.token_ids)
        self._shown_end = self.finish_reason is not None
        return completion


class OpenRequest:
    """A request of one or more sequences. Mutable; owned by the `OutputProcessor`."""

    def __init__(
        self,
        message: AddRequest,
        core_ids: Sequence[str],
        prompt: str | None,
        deliver: Deliver,
        tokenizer: Tokenizer,
        texts: TokenTexts,
    ) -> None:
        """`message` is the whole request, under the caller's own id; `core_ids` are those of its sequences."""
        params = self.params = message.params
        self.request_id = message.request_id
        self.prompt = prompt
        self.prompt_ids = message.prompt_ids
        self.arrival_s = message.arrival_s
        self.deliver = deliver
        self.core = 0  # which of the engine's cores runs it
        self.is_counted = True  # in the totals
        self.num_cached = 0
        self.scheduled_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.finished_s: float | None = None
        self.has_counted_prompt = False
        self.num_running = len(core_ids)
        decoded = texts if params.detokenize else None
        asks = params.logprobs is not None or params.logprob_token_ids is not None
        self.sequences = [
            OpenSequence(
                self, index, core_id, SequenceText(tokenizer, params), OutputLogprobs(decoded) if asks else None
            )
            for index, core_id in enumerate(core_ids)
        ]
        self._only = self.sequences[0] if len(core_ids) == 1 else None
        self.prompt_positions: PromptPositions | None = None
        if params.prompt_logprobs is not None:
            self.prompt_positions = PromptPositions(len(message.prompt_ids), decoded)
        self._has_shown_prompt = False
        self.push_text: PushText | None = None  # of callers who take news that is text alone as that

    @property
    def has_ended(self) -> bool:
        return self.num_running == 0

    @property
    def num_generated(self) -> int:
        return sum(len(sequence.token_ids) for sequence in self.sequences)

    def is_due(self) -> bool:
        """Whether the caller should hear of it now."""
        if self.num_running == 0:
            return True
        if self.params.output_kind is OutputKind.FINAL_ONLY:
            return False
        if self._only is not None:  # by far the most requests, and asked once a token
            return self._only.is_due()
        return any(sequence.is_due() for sequence in self.sequences)

    def show(self) -> None:
        """Deliver what the caller gets now, if anything is due."""
        only, push_text = self._only, self.push_text
        if push_text is None or only is None or not only.can_be_text():
            if self.is_due():
                self.deliver(self.output())
        elif only.is_due():
            text = only.text.fresh()
            if not text or push_text(text):
                only.pass_over()
            else:
                self.deliver(self.output())

    def output(self) -> RequestOutput:
        """What the caller gets now; marks it as shown."""
        is_delta = self.params.output_kind is OutputKind.DELTA
        only = self._only
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_ids,
            outputs=self._completions(is_delta) if only is None else (only.completion(is_delta),),
            finished=self.num_running == 0,
            num_cached_tokens=self.num_cached,
            num_generated_tokens=self.num_generated if only is None else len(only.token_ids),
            prompt_logprobs=None if self.prompt_positions is None else self._shown_prompt(is_delta),
            metrics=RequestMetrics(self.arrival_s, self.first_token_s, self.finished_s),
        )

    def _completions(self, is_delta: bool) -> tuple[CompletionOutput, ...]:
        return tuple(s.completion(is_delta) for s in self.sequences if not is_delta or s.is_due())

    def _shown_prompt(self, is_delta: bool) -> tuple[Position | None, ...] | None:
        """The prompt's log probabilities: all of them before the first token, with DELTA in that output alone."""
        if self.prompt_positions is None or (is_delta and self._has_shown_prompt):
            return None
        self._has_shown_prompt = True
        return self.prompt_positions.all()
