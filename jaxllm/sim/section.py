"""Settings of a simulation, read key by key; what nobody asks for is refused."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from jaxllm.errors import ConfigError, shown

_NOTHING = object()
_FLOAT = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+")  # with an exponent, as YAML 1.2 and people write it
_TAGS = {"mapping": "tag:yaml.org,2002:map", "sequence": "tag:yaml.org,2002:seq"}


class Lined(dict[str, Any]):
    """A mapping of a YAML file that knows the line of each of its keys."""

    def __init__(self, items: Iterable[tuple[str, Any]], lines: Mapping[str, int], text: str = "") -> None:
        """`text`: of the file, if this is the top of one."""
        super().__init__(items)
        self.text = text
        self.lines = dict(lines)


def load_lined(path: str | Path) -> Lined:
    """A YAML file whose top is a mapping.

    Raises:
        ConfigError: it cannot be read, is no YAML or no mapping, or has a key twice or one that is no text.
    """
    import yaml

    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")  # once: it may be a pipe
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        value = {} if node is None else _Nodes(path).value(node)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"{path} is not YAML: {error}") from None
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path} holds {type(value).__name__}; accepted: lines of KEY: VALUE")
    found = value if isinstance(value, Lined) else Lined((), {})
    found.text = text
    return found


class _Nodes:
    """Values of YAML nodes, each made once however often an alias names it. Mutable; of one file."""

    def __init__(self, path: Path) -> None:
        import yaml

        self._path = path
        self._loader = yaml.SafeLoader("")
        self._known: dict[int, Any] = {}

    def value(self, node: Any) -> Any:
        if id(node) not in self._known:
            self._known[id(node)] = self._made(node)
        return self._known[id(node)]

    def _made(self, node: Any) -> Any:
        if node.tag != _TAGS.get(node.id, node.tag):
            raise ConfigError(f"{self._path}, line {node.start_mark.line + 1}: tag {node.tag!r}; accepted: none")
        if node.id == "scalar" and node.style is None and _FLOAT.fullmatch(node.value):
            return float(node.value)  # YAML 1.1, which the parser follows, reads 1e-3 as text
        if node.id == "mapping":
            return self._mapping(node)
        if node.id == "sequence":
            return [self.value(item) for item in node.value]
        return self._loader.construct_object(node)

    def _mapping(self, node: Any) -> Lined:
        lines: dict[str, int] = {}
        items: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag == "tag:yaml.org,2002:merge":
                raise ConfigError(f"{self._path}, line {line}: key '<<'; accepted: keys that are written out")
            key = self.value(key_node)
            if not isinstance(key, str):
                raise ConfigError(f"{self._path}, line {line}: key {shown(key)}; accepted: text")
            if key in items:
                raise ConfigError(f"{self._path}, line {line}: key {key!r} again, after line {lines[key]}")
            lines[key], items[key] = line, self.value(value_node)
        return Lined(items.items(), lines)


class Section:
    """One mapping of settings. Mutable: it notes what was read; `done` refuses the rest.

    Every method raises `ConfigError` that names the key, its line where the mapping is a `Lined`, the
    value and what is accepted.
    """

    def __init__(self, spec: object, where: str) -> None:
        """`where`: the file and the way to this mapping, such as "sim.yaml: workload"; "sim.yaml: " for its top."""
        if not isinstance(spec, Mapping):
            raise ConfigError(f"{where}={shown(spec)}; accepted: a mapping")
        self.where = where
        self._spec = cast("Mapping[str, Any]", spec)
        self._read: set[str] = set()
        self._lines: Mapping[str, int] = spec.lines if isinstance(spec, Lined) else {}

    def __contains__(self, key: str) -> bool:
        return key in self._spec

    def fail(self, key: str, value: object, accepted: str) -> ConfigError:
        return ConfigError(f"{self.path(key)}={shown(value)}; accepted: {accepted}")

    def path(self, key: str) -> str:
        """A key for a message, with its line."""
        line = self._lines.get(key)
        return self._way(key) + ("" if line is None else f" (line {line})")

    def _way(self, key: str) -> str:
        return f"{self.where}{key}" if self.where.endswith(": ") else f"{self.where}.{key}"

    def take(self, key: str, default: Any = _NOTHING, *, accepted: str = "a value") -> Any:
        """The value as it is."""
        self._read.add(key)
        if key in self._spec:
            return self._spec[key]
        if default is _NOTHING:
            raise ConfigError(f"{self._way(key)} is missing; accepted: {accepted}")
        return default

    def whole(self, key: str, default: Any = _NOTHING, *, low: int = 0, high: int = 2**53) -> Any:
        """A whole number; `default` as it is."""
        accepted = f"a whole number from {low} to {high}" if high < 2**53 else f"a whole number, at least {low}"
        value = self.take(key, default, accepted=accepted)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.fail(key, value, accepted)
        return value

    def number(
        self, key: str, default: Any = _NOTHING, *, above: float | None = None, low: float = 0.0, high: float = 1e12
    ) -> Any:
        """A finite number from `low`, or above `above`, to `high`; `default` as it is."""
        beginning = f"above {above:g}" if above is not None else f"at least {low:g}"
        accepted = f"a number {beginning}" + ("" if high == 1e12 else f", at most {high:g}")
        value = self.take(key, default, accepted=accepted)
        if value is default:
            return value
        if not is_number(value) or not (value > above if above is not None else value >= low) or value > high:
            raise self.fail(key, value, accepted)
        return float(value)

    def text(self, key: str, default: Any = _NOTHING, *, choices: Sequence[str] = ()) -> Any:
        """Text that is not empty, or one of `choices`; `default` as it is."""
        accepted = ", ".join(choices) if choices else "text"
        value = self.take(key, default, accepted=accepted)
        if value is default:
            return value
        if not isinstance(value, str) or not value or (choices and value not in choices):
            raise self.fail(key, value, accepted)
        return value

    def switch(self, key: str, default: bool) -> bool:
        value = self.take(key, default)
        if not isinstance(value, bool):
            raise self.fail(key, value, "true or false")
        return value

    def one_of(self, *keys: str) -> str:
        """The one of these keys that is there."""
        given = [key for key in keys if key in self._spec]
        if len(given) != 1:
            said = "none of them is given" if not given else f"given: {', '.join(map(self.path, given))}"
            raise ConfigError(f"{self.where}: {said}; accepted: exactly one of {', '.join(keys)}")
        return given[0]

    def items(self, key: str, default: Any = _NOTHING) -> list[Any]:
        """A list that is not empty."""
        value = self.take(key, default, accepted="a list")
        if value is default:
            return value
        if not isinstance(value, list | tuple) or not value:
            raise self.fail(key, value, "a list, not empty")
        return list(cast("Sequence[Any]", value))

    def mapping(self, key: str, default: Any = _NOTHING) -> Any:
        """The mapping under a key, for another reader; `default` as it is."""
        value = self.take(key, default, accepted="a mapping")
        if value is not default and not isinstance(value, Mapping):
            raise self.fail(key, value, "a mapping")
        return value

    def inner(self, key: str) -> Section:
        """The mapping under a key."""
        return Section(self.take(key, accepted="a mapping"), self.path(key))

    def optional(self, key: str) -> Section | None:
        """The mapping under a key; None if it is left out."""
        return None if self.take(key, None) is None else self.inner(key)

    def done(self) -> None:
        """Refuse keys that nobody has asked for."""
        for key in self._spec:
            if key not in self._read:
                close = difflib.get_close_matches(str(key), self._read, n=1)
                accepted = f"did you mean {close[0]!r}?" if close else f"accepted: {', '.join(sorted(self._read))}"
                raise ConfigError(f"{self.path(key)}: unknown key; {accepted}")


def is_number(value: object) -> bool:
    """A finite one; neither true nor false, nor an integer that no float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False
