"""Ids to text as they come, without ever showing half a character."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import cast

from jaxllm.tokenizer.base import ByteFallbackTokenizer, ByteTokenizer, Tokenizer

REPLACEMENT = "\ufffd"
_new_decoder = codecs.getincrementaldecoder("utf-8")
_EAGER_TRIES = 8  # held tokens after which decoding is tried again only at each doubling


class IncrementalDetokenizer:
    """The text of ids that arrive in pieces.

    The joined returns of all `push` calls and of `finish` equal `tokenizer.decode(all ids)`, for
    any cutting into pieces; U+FFFD appears only where that text has it. Ids whose bytes do not
    end a character yet add no text until they do. Cost is linear in the number of ids.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self._stream: _ByteStream | _WindowStream
        # Asked for every request, so by its mark alone: isinstance looks at every member of the protocol.
        if getattr(tokenizer, "is_byte_level", False):
            hidden_ids = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
            self._stream = _ByteStream(cast("ByteTokenizer", tokenizer), hidden_ids)
        else:
            self._stream = _WindowStream(tokenizer, skip_special_tokens, spaces_between_special_tokens)

    def push(self, ids: Sequence[int]) -> str:
        """Take the next ids; return the text that they complete."""
        if len(ids) == 1:  # as a decoding step brings them
            return self._stream.push(ids[0])
        return "".join([self._stream.push(token_id) for token_id in ids])

    def finish(self) -> str:
        """The rest of the text, once no more ids will come: an unfinished character is U+FFFD."""
        return self._stream.finish()


class _ByteStream:
    """Byte-level vocabularies: a token is bytes, so the text is one incremental UTF-8 reading.

    Python replaces invalid bytes as the tokenizers library does: one U+FFFD for each maximal
    beginning of a character (Unicode standard, chapter 3.9).
    """

    def __init__(self, tokenizer: ByteTokenizer, hidden_ids: frozenset[int]) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._hidden_ids = hidden_ids
        self._utf8: codecs.IncrementalDecoder | None = None  # while what came ends within a character

    def push(self, token_id: int) -> str:
        if token_id in self._hidden_ids:
            return ""
        data = self._token_bytes(token_id)
        if self._utf8 is None:
            if data.isascii():  # by far the most, and a third of the cost
                return data.decode("ascii")
            self._utf8 = _new_decoder(errors="replace")
        text = self._utf8.decode(data)
        if not self._utf8.getstate()[0]:
            self._utf8 = None
        return text

    def finish(self) -> str:
        utf8, self._utf8 = self._utf8, None
        return "" if utf8 is None else utf8.decode(b"", final=True)


class _WindowStream:
    """Any other vocabulary: decode a short window with and without the new ids.

    The window starts with ids whose text was shown already, so that rules about the start of a
    text (a leading space that is dropped) act on both readings alike; the difference is new text.
    For that the shown part must hold some text, and it grows until it does.

    Byte-fallback vocabularies turn a whole run of byte tokens into U+FFFD if any part of it is
    wrong, so a run is shown only when it is over.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, spaces_between_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._flags = (skip_special_tokens, spaces_between_special_tokens)
        self._is_byte = tokenizer.is_byte_token if isinstance(tokenizer, ByteFallbackTokenizer) else _never
        self._hidden_ids = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._shown: list[int] = []
        self._held: list[int] = []
        self._next_try = 1

    def push(self, token_id: int) -> str:
        if token_id in self._hidden_ids or self._tokenizer.token(token_id) is None:
            return ""
        self._held.append(token_id)
        if self._is_byte(token_id) or len(self._held) < self._next_try:
            return ""
        before = self._decode(self._shown)
        after = self._decode(self._shown + self._held)
        if after.endswith(REPLACEMENT):
            self._wait_for_more()
            return ""
        return self._take(before, after)

    def finish(self) -> str:
        if not self._held:
            return ""
        return self._take(self._decode(self._shown), self._decode(self._shown + self._held))

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, *self._flags)

    def _take(self, before: str, after: str) -> str:
        new_text = after[len(before) :]
        # A window without text of its own would be read as the start of the text: keep the old one too.
        self._shown = self._held if new_text else self._shown + self._held
        self._held = []
        self._next_try = 1
        return new_text

    def _wait_for_more(self) -> None:
        """A character needs at most four bytes; past that, try rarely so that the cost stays linear."""
        held = len(self._held)
        self._next_try = held + 1 if held < _EAGER_TRIES else 2 * held


def _never(token_id: int) -> bool:
    del token_id
    return False
