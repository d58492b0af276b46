"""Typed reads from a checkpoint's description, where a missing or mistyped key is named."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

from jaxllm.errors import ConfigError, JaxLLMError

_MAX_INTEGER = 2**31 - 1


class Keys:
    """A mapping read from a file. Null counts as missing, as transformers writes it for "not set".

    Args:
        source: the file, for messages.
        values: its content.
        error: what is raised for a bad key.
    """

    def __init__(self, source: str, values: Mapping[str, Any], error: type[JaxLLMError] = ConfigError) -> None:
        self.source = source
        self.values = values
        self.error = error

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1, maximum: int = _MAX_INTEGER) -> int:
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
            raise self._wrong(key, value, f"an integer from {minimum} to {maximum}")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value <= 0:
            raise self._wrong(key, value, "a number above 0")
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "text")
        return value

    def section(self, key: str) -> Keys | None:
        """A nested mapping, or None where there is none."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._wrong(key, value, "an object")
        return Keys(f"{self.source}: {key}", cast("dict[str, Any]", value), self.error)

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One token id or a list of them; none where the key is missing."""
        value = self.values.get(key)
        if value is None:
            return ()
        items = cast("list[Any]", value) if isinstance(value, list) else [value]
        for item in items:
            if not isinstance(item, int) or isinstance(item, bool) or not 0 <= item <= _MAX_INTEGER:
                raise self._wrong(key, cast("object", value), "a token id, or a list of them")
        return tuple(items)

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(f"{self.source}: key {key!r} is missing")
        return value

    def _wrong(self, key: str, value: object, accepted: str) -> JaxLLMError:
        shown = repr(value)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        return self.error(f"{self.source}: key {key!r} is {shown}; accepted: {accepted}")
