"""From the ids of one sequence to its text: safe characters, stop strings cut out."""

from __future__ import annotations

from collections.abc import Sequence

from jaxllm.tokenizer.base import Tokenizer
from jaxllm.tokenizer.detokenize import IncrementalDetokenizer
from jaxllm.tokenizer.stops import StopMatcher
from jaxllm.types.sampling import SamplingParams


class SequenceText:
    """The text of one sequence as its ids come in. Mutable; owned by its `OpenSequence`.

    Stop strings are looked for in the text of the tokens after the first `min_tokens`.
    """

    __slots__ = ("_detokenizer", "_fresh", "_matcher", "_shown", "_unchecked_tokens", "matched")

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._detokenizer: IncrementalDetokenizer | None = None
        if params.detokenize:
            self._detokenizer = IncrementalDetokenizer(
                tokenizer, params.skip_special_tokens, params.spaces_between_special_tokens
            )
        self._matcher: StopMatcher | None = None
        if params.stop:
            self._matcher = StopMatcher(params.stop, params.include_stop_str_in_output)
        self._unchecked_tokens = params.min_tokens
        self._shown: list[str] = []  # pieces, so that a long text is not copied for each token
        self._fresh: list[str] = []
        self.matched: str | None = None

    @property
    def text(self) -> str:
        """All of it, taken or not."""
        return "".join(self._shown) + "".join(self._fresh)

    def fresh(self) -> str:
        """What came since the last `take`."""
        fresh = self._fresh
        return fresh[0] if len(fresh) == 1 else "".join(fresh)

    def take(self) -> str:
        text = self.fresh()
        self._shown.append(text)
        self._fresh.clear()
        return text

    def push(self, token_ids: Sequence[int]) -> int:
        """Take the ids of a step; returns how many count: those after a stop string do not."""
        if self._detokenizer is None:
            return len(token_ids)
        if self._matcher is None:
            self._fresh.append(self._detokenizer.push(token_ids))
            return len(token_ids)
        for count, token_id in enumerate(token_ids, 1):
            text = self._detokenizer.push((token_id,))
            if self._unchecked_tokens > 0:
                self._unchecked_tokens -= 1
                self._fresh.append(text)
            else:
                self._check(self._matcher, text)
            if self.matched is not None:
                return count
        return len(token_ids)

    def finish(self) -> None:
        """No more ids: show what was held back, unless a stop string already ended the text."""
        if self._detokenizer is None or self.matched is not None:
            return
        rest = self._detokenizer.finish()
        if self._matcher is None:
            self._fresh.append(rest)
            return
        self._check(self._matcher, rest)
        if self.matched is None:
            self._fresh.append(self._matcher.finish())

    def _check(self, matcher: StopMatcher, text: str) -> None:
        safe, self.matched = matcher.push(text)
        self._fresh.append(safe)
