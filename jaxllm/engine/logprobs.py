"""From columns of numbers to what callers read: log probabilities with tokens' texts beside them."""

from __future__ import annotations

from jaxllm.tokenizer.base import Tokenizer
from jaxllm.types.outputs import TokenLogprob
from jaxllm.types.step import Logprobs, PromptLogprobs

Position = tuple[TokenLogprob, ...]  # the token itself first, then the others, without repeating itself


class TokenTexts:
    """The text of single tokens, special ones too. Mutable, never larger than the vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def __getitem__(self, token_id: int) -> str:
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text


def position_of(columns: Logprobs, index: int, texts: TokenTexts | None) -> Position:
    """One position of `columns`; without `texts` tokens stay undecoded.

    Equally likely tokens share a rank, as they do where the device ranks the token itself.
    """
    own = columns.token_ids[index]
    entries = [_entry(own, columns.values[index], columns.ranks[index], texts)]
    rank, latest = 0, None
    for place, (token_id, value) in enumerate(zip(columns.top_ids[index], columns.top_values[index], strict=True), 1):
        if value != latest:
            rank, latest = place, value
        if token_id != own:
            entries.append(_entry(token_id, value, rank if columns.is_ranked else None, texts))
    return tuple(entries)


def _entry(token_id: int, value: float, rank: int | None, texts: TokenTexts | None) -> TokenLogprob:
    return TokenLogprob(token_id, value, rank, None if texts is None else texts[token_id])


class OutputLogprobs:
    """What is known of the output tokens of one sequence. Mutable; owned by its `OpenSequence`."""

    __slots__ = ("_texts", "cumulative", "positions")

    def __init__(self, texts: TokenTexts | None) -> None:
        self._texts = texts
        self.positions: list[Position] = []
        self.cumulative = 0.0

    def push(self, columns: Logprobs, count: int) -> None:
        """Take in the first `count` positions of a step."""
        for index in range(count):
            self.positions.append(position_of(columns, index, self._texts))
            self.cumulative += columns.values[index]


class PromptPositions:
    """What is known of a prompt's tokens, filled piece by piece. Mutable; owned by its `OpenRequest`."""

    __slots__ = ("_positions", "_texts")

    def __init__(self, num_prompt_tokens: int, texts: TokenTexts | None) -> None:
        self._texts = texts
        self._positions: list[Position | None] = [None] * num_prompt_tokens

    def push(self, piece: PromptLogprobs) -> None:
        """Take in a piece; what a preempted request computes again changes nothing."""
        for index in range(len(piece.columns.token_ids)):
            place = piece.start + index
            if self._positions[place] is None:
                self._positions[place] = position_of(piece.columns, index, self._texts)

    def all(self) -> tuple[Position | None, ...]:
        """One entry a prompt token; None for the first, and for those not computed when it was aborted."""
        return tuple(self._positions)
