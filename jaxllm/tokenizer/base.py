"""What the engine needs of a tokenizer, whatever library stands behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable


class Tokenizer(Protocol):
    """Text to ids and back. Implementations are read-only after construction: threads may share one."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        ...

    @property
    def bos_id(self) -> int | None: ...

    @property
    def eos_id(self) -> int | None: ...

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that `skip_special_tokens` leaves out of text."""
        ...

    @property
    def adds_bos(self) -> bool:
        """Whether `encode` with special tokens starts with BOS."""
        ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(
        self, ids: Sequence[int], skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str:
        """Text of `ids` as a whole. Ids that no token has give no text."""
        ...

    def token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of an id, None where the id has no token."""
        ...

    def token_id(self, token: str) -> int | None: ...


@runtime_checkable
class ByteTokenizer(Protocol):
    """A tokenizer whose text is the UTF-8 reading of its tokens' bytes, joined.

    With it text can be streamed exactly, in constant time a token, without asking the tokenizer
    to decode anything again.
    """

    @property
    def is_byte_level(self) -> bool: ...

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes an id adds to the text; empty where the id has no token."""
        ...


@runtime_checkable
class ByteFallbackTokenizer(Protocol):
    """A tokenizer that spells out-of-vocabulary characters as one token a byte (``<0x41>``)."""

    def is_byte_token(self, token_id: int) -> bool: ...
