"""Reads descriptions that people write: a wrong one is refused with its file, line, field and value."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from jaxllm.errors import ConfigError, shown
from jaxllm.sim.section import Lined, is_number

_MAX_BYTES = 64 * 2**20
_MAX_NUMBER = 1e30  # what is multiplied with it stays a number
_MAX_WHOLE = 2**53


class Fields:
    """The fields of one JSON object or YAML section, each to be taken once. Mutable; read by one loader.

    `where` begins each message. `text` is the file's text, if there is one: messages then give the line, as they
    do where `values` is `Lined`.
    """

    def __init__(self, values: Mapping[str, Any], where: str, *, text: str = "", path: str = "") -> None:
        self.where = where
        self._left = dict(values)
        self._lines = values.lines if isinstance(values, Lined) else {}
        self._text = text
        self._path = path  # of this object in the file: "experts."

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def names(self) -> tuple[str, ...]:
        """Of the fields that were not taken yet."""
        return tuple(str(name) for name in self._left)

    def number(
        self, name: str, *, above: float | None = None, at_least: float = 0.0, default: float | None = None
    ) -> float:
        """A finite number, at least `at_least`, or above `above`."""
        value = self._take(name, default)
        accepted = f"a number above {above:g}" if above is not None else f"a number of at least {at_least:g}"
        if not _is_number(value) or value < at_least or (above is not None and value <= above):
            raise self.error(name, value, f"{accepted}, and at most {_MAX_NUMBER:g}")
        return float(value)

    def integer(self, name: str, *, at_least: int = 1, default: int | None = None) -> int:
        value = self._take(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not at_least <= value <= _MAX_WHOLE:
            raise self.error(name, value, f"an integer of at least {at_least}, and at most {_MAX_WHOLE}")
        return value

    def text(self, name: str, *, default: str | None = None) -> str:
        value = self._take(name, default)
        if not isinstance(value, str) or not value:
            raise self.error(name, value, "a text")
        return value

    def flag(self, name: str, *, default: bool | None = None) -> bool:
        value = self._take(name, default)
        if not isinstance(value, bool):
            raise self.error(name, value, "true or false")
        return value

    def choice(self, name: str, accepted: Iterable[str], *, default: str | None = None) -> str:
        value = self._take(name, default)
        accepted = tuple(accepted)
        if value not in accepted:
            raise self.error(name, value, ", ".join(accepted))
        return str(value)

    def section(self, name: str) -> Fields:
        """An object in this one."""
        value = self._take(name, None)
        if not isinstance(value, dict):
            raise self.error(name, value, "an object with named fields")
        return Fields(value, self.where, text=self._text, path=f"{self._path}{name}.")  # pyright: ignore

    def rows(self, name: str, num_columns: int) -> list[list[float]]:
        """A list of lists of `num_columns` finite numbers."""
        value = self._take(name, None)
        if not isinstance(value, list):
            raise self.error(name, value, f"a list of rows of {num_columns} numbers")
        for number, row in enumerate(value):  # pyright: ignore
            if not isinstance(row, list) or len(row) != num_columns or not all(_is_number(cell) for cell in row):  # pyright: ignore
                raise self.error(f"{name}[{number}]", row, f"{num_columns} numbers")
        return value  # pyright: ignore

    def texts(self, name: str) -> tuple[str, ...]:
        value = self._take(name, None)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):  # pyright: ignore
            raise self.error(name, value, "a list of texts")
        return tuple(value)  # pyright: ignore

    def done(self) -> None:
        """Refuse what was not taken."""
        for name, value in self._left.items():
            raise self.error(str(name), value, "no such field", is_unknown=True)

    def error(self, name: str, value: object, accepted: str, *, is_unknown: bool = False) -> ConfigError:
        """What a field that is refused is answered with."""
        at = f"{self.where}{self._line(name)}: {self._path}{name}"
        if is_unknown:
            return ConfigError(f"{at}={shown(value)} is not known; accepted: leave it out")
        return ConfigError(f"{at}={shown(value)}; accepted: {accepted}")

    def place(self, name: str) -> str:
        """The section, and the line of one of its fields, for a message."""
        return f"{self.where}{self._line(name)}"

    def _take(self, name: str, default: object) -> Any:
        if name in self._left:
            return self._left.pop(name)
        if default is None:
            raise ConfigError(f"{self.where}: {self._path}{name} is missing")
        return default

    def _line(self, name: str) -> str:
        if name in self._lines:
            return f", line {self._lines[name]}"
        begin = 0
        for key in f"{self._path}{name}".split("[")[0].split("."):
            found = re.compile(rf'"{re.escape(key)}"\s*:').search(self._text, begin)
            if found is None:
                return ""
            begin = found.start()
        return f", line {self._text.count(chr(10), 0, begin) + 1}"


def read_json(path: Path) -> Fields:
    """The object that a file holds.

    Raises:
        ConfigError: it cannot be read, or holds no JSON object.
    """
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ConfigError(f"{path} has over {_MAX_BYTES} bytes; accepted: a description of less")
        text = path.read_text(encoding="utf-8")
        value = json.loads(text, object_pairs_hook=_once)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; accepted: a JSON file") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}, line {error.lineno}: not JSON: {error.msg}") from None
    except (UnicodeDecodeError, RecursionError, ValueError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds {type(value).__name__}; accepted: a JSON object")
    return Fields(value, str(path), text=text)  # pyright: ignore


def described(folder: str, name: str) -> Fields:
    """A description by the name of a file of `configs/cost/<folder>`, or by its own path if it ends in .json.

    Raises:
        ConfigError: there is none of that name, or it cannot be read.
    """
    if name.endswith(".json"):
        return read_json(Path(name).expanduser())
    known = names_of(folder)
    if name not in known:
        raise ConfigError(f"{folder[:-1]}={shown(name)} is not known; accepted: {', '.join(known)}, or a .json file")
    return read_json(_root() / folder / f"{name}.json")


def names_of(folder: str) -> tuple[str, ...]:
    """What `configs/cost/<folder>` describes."""
    return tuple(sorted(path.stem for path in (_root() / folder).glob("*.json")))


def _root() -> Path:
    """Where a wheel carries `configs/cost`, or the repository has it."""
    package = Path(str(resources.files("jaxllm")))
    installed = package / "configs" / "cost"
    return installed if installed.is_dir() else package.parent / "configs" / "cost"


def _is_number(value: Any) -> bool:
    return is_number(value) and abs(value) <= _MAX_NUMBER


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"field {shown(next(name for name in found if names.count(name) > 1))} twice")
    return found
