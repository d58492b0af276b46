"""Random text of an exact number of tokens, by any tokenizer. Same seed, same text."""

from __future__ import annotations

import random

from jaxllm.tokenizer.base import Tokenizer

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_ENOUGH_WORDS = 64
_MAX_WORD = 12  # characters
_MAX_TRIES = 16
_SPACES = ("Ġ", "▁")  # how vocabularies spell a space before a word


class TextMaker:
    """Makes prompts of words that are one token each. Mutable (it counts its draws); owned by a dataset.

    `random.Random` gives the same numbers in every version of Python; numpy promises that of no
    generator's distributions.
    """

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._tokenizer = tokenizer
        self._random = random.Random(seed)
        words = _single_token_words(tokenizer)
        self._words, self._space = (words, " ") if len(words) >= _ENOUGH_WORDS else (list(_LETTERS), "")

    def draw(self, num_tokens: int, lead: str = "") -> str:
        """Text of `num_tokens` tokens, those that the tokenizer adds and those of `lead` included.

        `lead` comes first, unchanged. Where no text of the wanted length is found (a tokenizer that
        adds more tokens than were asked for, say), the text is the closest that was met.
        """
        words: list[str] = []
        best, best_distance = lead, abs(self.num_tokens(lead) - num_tokens)
        missing = num_tokens - self.num_tokens(lead)
        for _ in range(_MAX_TRIES):
            words = words[: len(words) + missing] if missing < 0 else words + self._draw_words(missing)
            text = self._joined(lead, words)
            missing = num_tokens - self.num_tokens(text)
            if abs(missing) < best_distance:
                best, best_distance = text, abs(missing)
            if missing == 0 or (missing < 0 and not words):
                break
        return best

    def num_tokens(self, text: str) -> int:
        """As a server counts the tokens of a prompt, special tokens included."""
        return len(self._tokenizer.encode(text))

    def _draw_words(self, count: int) -> list[str]:
        return [self._words[int(self._random.random() * len(self._words))] for _ in range(count)]

    def _joined(self, lead: str, words: list[str]) -> str:
        return self._space.join([lead, *words] if lead else words)


def _single_token_words(tokenizer: Tokenizer) -> list[str]:
    """Lower-case words that the vocabulary holds with a space before them, shortest id first."""
    words: dict[str, None] = {}
    for token_id in range(tokenizer.vocab_size):
        token = tokenizer.token(token_id) or ""
        word = token[1:]
        is_word = 2 <= len(word) <= _MAX_WORD and word.isascii() and word.isalpha() and word.islower()
        if is_word and token.startswith(_SPACES):
            words[word] = None
    return list(words)
