"""The ids of text between special tokens, kept: chats repeat system prompts and turns."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

_NUM_KEPT = 512
_LONGEST_KEPT = 4096  # characters; longer texts are rarely the same, and would fill memory
_LOCAL = {"ByteLevel", "Split", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit", "BertPreTokenizer"}

Encode = Callable[[str], Sequence[int]]


class Segments:
    """Encodes text piece by piece: each added token by its id, what lies between from memory.

    The library cuts a text at its added tokens first, and never looks over such a border afterwards, as
    long as `borders_are_hard`; so the pieces' ids are those of the whole.
    """

    def __init__(self, added: dict[str, int], encode: Encode) -> None:
        self._ids = {text: (token_id,) for text, token_id in added.items()}
        # Where several begin at one place the library takes the longest, a pattern the first.
        longest_first = sorted(added, key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, longest_first))})").split
        self._encode = encode
        self._kept = lru_cache(_NUM_KEPT)(lambda text: tuple(encode(text)))

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without what the tokenizer adds around it."""
        ids: list[int] = []
        for piece in self._split(text):
            if piece:
                ids += self._ids.get(piece) or self._ids_of(piece)
        return ids

    def _ids_of(self, piece: str) -> Sequence[int]:
        return self._kept(piece) if len(piece) <= _LONGEST_KEPT else self._encode(piece)


def borders_are_hard(backend: tokenizers.Tokenizer) -> bool:
    """Whether text on one side of an added token never changes the ids on the other.

    Not so for tokens that swallow the spaces beside them or ask for the border of a word, nor for
    a tokenizer that treats the beginning of a text in its own way or rewrites the text beforehand.
    """
    added = backend.get_added_tokens_decoder().values()
    if not added or backend.normalizer is not None:
        return False
    if any(token.lstrip or token.rstrip or token.single_word or token.normalized for token in added):
        return False
    return backend.pre_tokenizer is None or all(
        map(_is_local, _parts(json.loads(backend.pre_tokenizer.__getstate__())))
    )


def _parts(state: dict[str, Any]) -> list[dict[str, Any]]:
    return list(state["pretokenizers"]) if state["type"] == "Sequence" else [state]


def _is_local(part: dict[str, Any]) -> bool:
    return part["type"] in _LOCAL and not part.get("add_prefix_space", False)
