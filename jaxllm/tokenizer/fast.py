"""The `tokenizers` library behind the `Tokenizer` protocol."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxllm.errors import ConfigError, UnsupportedModel
from jaxllm.tokenizer.segments import Segments, borders_are_hard

if TYPE_CHECKING:
    import tokenizers

_PROBE = "a"  # text that any vocabulary encodes, to see which special tokens come before it


class FastTokenizer:
    """A `tokenizers.Tokenizer`, with the ids of BOS and EOS beside it."""

    def __init__(self, backend: tokenizers.Tokenizer, *, bos_id: int | None = None, eos_id: int | None = None) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._bos_id = bos_id
        self._eos_id = eos_id
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        decoders = _decoder_kinds(backend)
        self._is_byte_level = decoders == ["ByteLevel"]
        self._has_byte_fallback = "ByteFallback" in decoders
        self._bytes: dict[int, bytes] = {}  # filled as ids are met
        ids = {token.content: token_id for token_id, token in added.items()}
        self._segments = Segments(ids, self._plain) if borders_are_hard(backend) else None

    @classmethod
    def from_file(cls, path: Path, tokenizer_config: Mapping[str, Any]) -> FastTokenizer:
        """Read a tokenizer.json; `tokenizer_config` is the parsed tokenizer_config.json beside it.

        Raises:
            UnsupportedModel: the file is not a tokenizer that the library reads.
        """
        import tokenizers

        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise UnsupportedModel(f"{path}: not a readable tokenizer.json: {error}") from error
        bos, eos = (special_token(tokenizer_config, name) for name in ("bos_token", "eos_token"))
        _apply_add_flags(backend, tokenizer_config, bos, eos)
        return cls(backend, bos_id=_id_of(backend, bos), eos_id=_id_of(backend, eos))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> FastTokenizer:
        """Build the tokenizer that a GGUF file's metadata describes.

        Raises:
            UnsupportedModel: a tokenizer model or a pre-tokenizer that is not known here. Splitting
                text by a guess would quietly give other ids than the model was trained on.
            WeightsError: the metadata contradicts itself.
        """
        from jaxllm.tokenizer.gguf import build_backend

        built = build_backend(metadata)
        return cls(built.backend, bos_id=built.bos_id, eos_id=built.eos_id)

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def bos_id(self) -> int | None:
        return self._bos_id

    @property
    def eos_id(self) -> int | None:
        return self._eos_id

    @property
    def special_ids(self) -> frozenset[int]:
        return self._special_ids

    @property
    def adds_bos(self) -> bool:
        return self._bos_id is not None and self.encode(_PROBE)[:1] == [self._bos_id]

    @property
    def is_byte_level(self) -> bool:
        return self._is_byte_level

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if self._segments is not None and not add_special_tokens:
            return self._segments.encode(text)
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(
        self, ids: Sequence[int], skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str:
        """Text of `ids`. `spaces_between_special_tokens` is for slow tokenizers: this one adds none."""
        del spaces_between_special_tokens
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def token(self, token_id: int) -> str | None:
        return self._backend.id_to_token(token_id)

    def token_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def token_bytes(self, token_id: int) -> bytes:
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = spelled_bytes(self.token(token_id) or "")
        return found

    def _plain(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids

    def is_byte_token(self, token_id: int) -> bool:
        token = self.token(token_id) if self._has_byte_fallback else None
        return token is not None and len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def special_token(tokenizer_config: Mapping[str, Any], name: str) -> str | None:
    """The text of a special token in a tokenizer_config.json, where it is a string or an object."""
    value = tokenizer_config.get(name)
    if isinstance(value, Mapping):
        value = value.get("content")  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return value if isinstance(value, str) else None


def byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes as printable characters (Radford et al. 2019, `bytes_to_unicode`).

    Printable Latin-1 bytes stand for themselves; the others, in order, for U+0100 and on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet


_ALPHABET = byte_alphabet()


def spelled_bytes(token: str) -> bytes:
    """Bytes of a byte-level token. One with a character outside the alphabet is plain text."""
    try:
        return bytes([_ALPHABET[char] for char in token])
    except KeyError:
        return token.encode()


def _id_of(backend: tokenizers.Tokenizer, token: str | None) -> int | None:
    return None if token is None else backend.token_to_id(token)


def _decoder_kinds(backend: tokenizers.Tokenizer) -> list[str]:
    """Names of the decoders that turn tokens into text, in order."""
    if backend.decoder is None:
        return []
    state = json.loads(backend.decoder.__getstate__())
    parts = state["decoders"] if state["type"] == "Sequence" else [state]
    return [part["type"] for part in parts]


def _apply_add_flags(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], bos: str | None, eos: str | None
) -> None:
    """Let `add_bos_token` / `add_eos_token` in tokenizer_config.json overrule the post-processor.

    Raises:
        ConfigError: a flag asks for a token that the vocabulary lacks.
    """
    from tokenizers import processors

    wanted = {"bos": config.get("add_bos_token"), "eos": config.get("add_eos_token")}
    if not any(isinstance(flag, bool) for flag in wanted.values()):
        return
    encoded = backend.encode(_PROBE, add_special_tokens=True).ids
    ids = {"bos": _id_of(backend, bos), "eos": _id_of(backend, eos)}
    present = {"bos": encoded[:1] == [ids["bos"]], "eos": encoded[-1:] == [ids["eos"]]}
    if all(flag is None or bool(flag) == present[name] for name, flag in wanted.items()):
        return
    tokens = {"bos": bos, "eos": eos}
    add = [name for name, flag in wanted.items() if (present[name] if flag is None else flag)]
    for name in add:
        if ids[name] is None:
            raise ConfigError(f"tokenizer_config.json: add_{name}_token is true, but {name}_token is {tokens[name]!r}")
    single = ["$A"]
    if "bos" in add:
        single.insert(0, str(bos))
    if "eos" in add:
        single.append(str(eos))
    backend.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[(str(tokens[name]), ids[name]) for name in add]
    )


__all__ = ["FastTokenizer", "byte_alphabet", "special_token", "spelled_bytes"]
