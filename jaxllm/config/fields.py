"""A setting as a dataclass field: its help, its other spellings, and whether a value has its type."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Union, cast, get_args, get_origin

from jaxllm.errors import ConfigError

_COUNT = re.compile(r"(\d{1,30}(?:\.\d{1,30})?)([kKmMgG]?)")
_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


def setting(default: Any, help: str, *aliases: str, human: bool = False, served: bool = True) -> Any:
    """A dataclass field that is also a flag.

    Args:
        aliases: other spellings of the flag, with dashes and without the leading ones.
        human: text such as "8k" is accepted where an integer is meant (`parse_count`).
        served: False for a flag that is known, but takes only its default in this version.
    """
    metadata = {"help": help, "aliases": aliases, "human": human, "served": served}
    return field(default=default, metadata=metadata)


def parse_count(text: str) -> int:
    """An integer with an optional suffix, as vLLM reads them: 1k = 1000, 1K = 1024 (m/M, g/G alike).

    Decimals go with the decimal suffixes alone: "1.5k" is 1500.

    Raises:
        ConfigError: any other text.
    """
    match = _COUNT.fullmatch(text.strip())
    if match:
        digits, suffix = match.groups()
        if "." not in digits:
            return int(digits) * _SUFFIXES[suffix]
        scaled = float(digits) * _SUFFIXES[suffix]
        if suffix.islower() and scaled.is_integer():
            return int(scaled)
    raise ConfigError(f"{text!r:.80} is not a count; accepted: an integer such as 4096, 4k (4000) or 4K (4096)")


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of a configuration dataclass, with its type resolved."""

    name: str
    hint: Any
    default: Any
    help: str
    aliases: tuple[str, ...]
    human: bool
    served: bool

    def check(self, value: Any) -> Any:
        """`value` as the field's type: lists become tuples, "8k" becomes 8000.

        Raises:
            ConfigError: naming the field, the value and what is accepted.
        """
        if self.human and isinstance(value, str):
            value = self._count(value)
        for option in _options(self.hint):
            accepted, converted = _fit(value, option)
            if accepted:
                return self._refuse_unserved(converted)
        raise ConfigError(f"{self.name}={value!r} has the wrong type; accepted: {describe(self.hint)}")

    def _count(self, text: str) -> int:
        try:
            return parse_count(text)
        except ConfigError as error:
            raise ConfigError(f"{self.name}: {error}") from None

    def _refuse_unserved(self, value: Any) -> Any:
        if not self.served and value != self.default:
            raise ConfigError(f"{self.name}={value!r} is not served yet; accepted: {self.default!r}")
        return value


def settings_of(schema: type[Any]) -> Iterator[Setting]:
    """The fields of a configuration dataclass, in order."""
    hints = typing.get_type_hints(schema)
    for f in fields(schema):
        about: Mapping[str, Any] = f.metadata
        default = None if f.default is MISSING else f.default
        yield Setting(
            f.name,
            hints[f.name],
            default,
            about.get("help", ""),
            tuple(about.get("aliases", ())),
            bool(about.get("human", False)),
            bool(about.get("served", True)),
        )


def check_settings(instance: Any) -> None:
    """Check the type of each field of a frozen dataclass, in place.

    Raises:
        ConfigError: a value has another type, or asks for what is not served yet.
    """
    for item in settings_of(cast("type[Any]", type(instance))):
        object.__setattr__(instance, item.name, item.check(getattr(instance, item.name)))


def _options(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _fit(value: Any, option: Any) -> tuple[bool, Any]:
    """Whether `value` is of the type `option`, and the value to keep."""
    if option is types.NoneType:
        return value is None, None
    if get_origin(option) is Literal:
        return value in get_args(option), value
    if option == tuple[str, ...]:
        return _fit_strings(value)
    if option in (int, float):
        return _fit_number(value, option)
    if option is str and isinstance(value, Path):
        return True, str(value)
    return isinstance(value, option), value


def _fit_number(value: Any, option: Any) -> tuple[bool, Any]:
    """A boolean is no number, and an integer will do for a float."""
    if isinstance(value, bool):
        return False, value
    if option is float and isinstance(value, int):
        return True, float(value)
    return isinstance(value, option), value


def _fit_strings(value: Any) -> tuple[bool, Any]:
    if isinstance(value, str):
        return True, (value,)
    if not isinstance(value, (list, tuple)):
        return False, value
    items: tuple[Any, ...] = tuple(cast("list[Any]", value))
    return all(isinstance(item, str) for item in items), items


_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "text", types.NoneType: "none"}


def describe(hint: Any) -> str:
    """A type in words, for messages."""
    words: list[str] = []
    for option in _options(hint):
        if get_origin(option) is Literal:
            words.append(", ".join(repr(choice) for choice in get_args(option)))
        else:
            words.append(_NAMES.get(option, "a list of texts"))
    return " or ".join(words)
