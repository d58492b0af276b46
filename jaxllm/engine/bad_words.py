"""From words that an output may not hold to the token sequences that would spell them.

vLLM's rule. A tokenizer often has one token for a word at the start of a text and another for the
same word after a space. So each word, without spaces at its front, is tokenised twice, as it is and
behind one space; the second reading counts where it starts with another token and has as many
tokens. Spellings by other tokens (letter by letter, in capitals, inside a longer word) stay possible.
A word of spaces alone is taken as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxllm.errors import RequestError, shown
from jaxllm.types.sampling import MAX_BAD_SEQUENCE_TOKENS, MAX_BAD_SEQUENCES

Encode = Callable[[str], Sequence[int]]
TokenSequence = tuple[int, ...]


def bad_word_ids(words: Sequence[str], encode: Encode) -> tuple[TokenSequence, ...]:
    """Each sequence once, in the order of the words; `encode` adds no special tokens.

    Raises:
        RequestError: a word has no tokens or too many, or there are too many of several tokens.
    """
    found: dict[TokenSequence, None] = {}
    num_long = 0
    for word in words:
        for ids in _readings(word, encode):
            if ids not in found:
                found[ids] = None
                num_long += len(ids) > 1
    if num_long > MAX_BAD_SEQUENCES:
        accepted = f"words that make at most {MAX_BAD_SEQUENCES} sequences of several tokens"
        raise RequestError(f"bad_words makes {num_long} such sequences; accepted: {accepted}", param="bad_words")
    return tuple(found)


def _readings(word: str, encode: Encode) -> list[TokenSequence]:
    stripped = word.lstrip()
    try:
        bare: TokenSequence = tuple(encode(stripped or word))
        spaced: TokenSequence = tuple(encode(f" {stripped}" if stripped else word))
    except UnicodeEncodeError:
        raise RequestError(f"bad_words holds {shown(word)}; accepted: valid Unicode text", param="bad_words") from None
    if not 1 <= len(bare) <= MAX_BAD_SEQUENCE_TOKENS:
        accepted = f"words of 1 to {MAX_BAD_SEQUENCE_TOKENS} tokens"
        message = f"bad_words holds {shown(word)} of {len(bare)} tokens; accepted: {accepted}"
        raise RequestError(message, param="bad_words")
    return [bare, spaced] if len(spaced) == len(bare) and spaced[0] != bare[0] else [bare]
