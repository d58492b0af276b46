"""From the ids of one sequence to its text: safe characters, stop strings cut out."""

from __future__ import annotations

from jaxllm.tokenizer.base import Tokenizer
from jaxllm.tokenizer.detokenize import IncrementalDetokenizer
from jaxllm.tokenizer.stops import StopMatcher
from jaxllm.types.sampling import SamplingParams


class SequenceText:
    """The text of one sequence as its ids come in. Mutable; owned by its `OpenSequence`.

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
