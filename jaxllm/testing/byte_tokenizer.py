"""A tokenizer without files: one token a byte of UTF-8, and a few special tokens."""

from __future__ import annotations

from collections.abc import Sequence

_SPECIALS = ("<bos>", "<eos>", "<|user|>", "<|assistant|>")
_FIRST_SPECIAL = 256


class ByteLevelTokenizer:
    """Ids 0 to 255 are bytes; 256 is BOS, 257 EOS, 258 and 259 mark chat turns."""

    vocab_size = _FIRST_SPECIAL + len(_SPECIALS)
    bos_id = 256
    eos_id = 257
    special_ids = frozenset(range(_FIRST_SPECIAL, vocab_size))
    is_byte_level = True

    def __init__(self, adds_bos: bool = False) -> None:
        self.adds_bos = adds_bos

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The spelling of a special token in `text` becomes that token."""
        ids = [self.bos_id] if add_special_tokens and self.adds_bos else []
        while text:
            start, special = min(((text.find(s), s) for s in _SPECIALS if s in text), default=(len(text), ""))
            ids += text[:start].encode()
            if special:
                ids.append(_FIRST_SPECIAL + _SPECIALS.index(special))
            text = text[start + len(special) :]
        return ids

    def decode(
        self, ids: Sequence[int], skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str:
        del spaces_between_special_tokens  # bytes have no such rule
        kept = (i for i in ids if not (skip_special_tokens and i in self.special_ids))
        return b"".join(self.token_bytes(i) for i in kept).decode(errors="replace")

    def token(self, token_id: int) -> str | None:
        if 0 <= token_id < _FIRST_SPECIAL:
            return bytes([token_id]).decode("latin-1")
        return _SPECIALS[token_id - _FIRST_SPECIAL] if token_id in self.special_ids else None

    def token_id(self, token: str) -> int | None:
        if token in _SPECIALS:
            return _FIRST_SPECIAL + _SPECIALS.index(token)
        return ord(token) if len(token) == 1 and ord(token) < _FIRST_SPECIAL else None

    def token_bytes(self, token_id: int) -> bytes:
        if 0 <= token_id < _FIRST_SPECIAL:
            return bytes([token_id])
        return _SPECIALS[token_id - _FIRST_SPECIAL].encode() if token_id in self.special_ids else b""
