"""Tokenizers that only `transformers` reads: folders without a tokenizer.json."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxllm.errors import UnsupportedModel


class HFTokenizer:
    """A `transformers` tokenizer. Slower than `FastTokenizer`; used only where there is no other way."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._special_ids = frozenset(int(token_id) for token_id in backend.all_special_ids)

    @classmethod
    def from_folder(cls, folder: Path) -> HFTokenizer:
        """Load the tokenizer of a folder; no code from the folder is run, and nothing is fetched.

        Raises:
            UnsupportedModel: transformers cannot read a tokenizer there.
        """
        from transformers import AutoTokenizer

        try:
            backend = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # whatever the tokenizer class raises
            raise UnsupportedModel(f"{folder}: no tokenizer that transformers reads: {error}") from error
        return cls(backend)

    @property
    def vocab_size(self) -> int:
        return len(self._backend)

    @property
    def bos_id(self) -> int | None:
        return self._backend.bos_token_id

    @property
    def eos_id(self) -> int | None:
        return self._backend.eos_token_id

    @property
    def special_ids(self) -> frozenset[int]:
        return self._special_ids

    @property
    def adds_bos(self) -> bool:
        return self.bos_id is not None and self.encode("a")[:1] == [self.bos_id]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens))

    def decode(
        self, ids: Sequence[int], skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str:
        options: dict[str, bool] = {"clean_up_tokenization_spaces": False}
        if not getattr(self._backend, "is_fast", False):
            options["spaces_between_special_tokens"] = spaces_between_special_tokens
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens, **options))

    def token(self, token_id: int) -> str | None:
        if not 0 <= token_id < self.vocab_size:
            return None
        return self._backend.convert_ids_to_tokens(token_id)

    def token_id(self, token: str) -> int | None:
        token_id = self._backend.convert_tokens_to_ids(token)
        if token_id is None or self._backend.convert_ids_to_tokens(token_id) != token:
            return None
        return int(token_id)
