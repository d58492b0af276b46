"""Prompts of exact lengths: seeded draws of whole words, the same bytes for the same arguments."""

from __future__ import annotations

import random
import re
from typing import Protocol

_WORD = re.compile(r" [a-z]{3,10}")
_MAX_WORDS = 4000
_TRIES = 20


class Encoder(Protocol):
    """The part of a tokenizer that prompts are made with."""

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str: ...


def whole_words(tokenizer: Encoder) -> list[str]:
    """Words that are one token each, a space in front, in the order of their ids.

    Raises:
        ValueError: the tokenizer has too few of them to make texts from.
    """
    words: list[str] = []
    for token_id in range(tokenizer.vocab_size):
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        if _WORD.fullmatch(text) and tokenizer.encode(text, add_special_tokens=False) == [token_id]:
            words.append(text)
        if len(words) == _MAX_WORDS:
            break
    if len(words) < 100:
        raise ValueError(f"the tokenizer has {len(words)} words that are one token; accepted: 100 or more")
    return words


class Texts:
    """Draws texts one after the other; another seed gives others, so that no prefix cache knows them."""

    def __init__(self, tokenizer: Encoder, words: list[str], seed: object) -> None:
        self._tokenizer = tokenizer
        self._words = words
        self._random = random.Random(f"texts {seed}")

    def draw(self, num_tokens: int, lead: str = "") -> str:
        """`lead` and then words, `num_tokens` tokens in all as the tokenizer counts them.

        Raises:
            ValueError: no text of that length was found.
        """
        missing = num_tokens - self._count(lead)
        for _ in range(_TRIES):
            text = lead + "".join(self._random.choices(self._words, k=missing))
            if self._count(text) == num_tokens:
                return text
        raise ValueError(f"no text of {num_tokens} tokens after {_TRIES} tries; words do not stay whole tokens here")

    def _count(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False)) if text else 0
