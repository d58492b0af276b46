"""A configuration file: YAML or TOML, the same names as the flags, with dashes or underscores."""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Any

from jaxllm.config.engine import EngineArgs
from jaxllm.config.fields import Setting, settings_of
from jaxllm.errors import ConfigError

_MAX_BYTES = 2**20


def load_config_file(path: str | Path, *schemas: type[Any]) -> dict[str, Any]:
    """Settings of a file under their field names, checked against `schemas` (default: `EngineArgs`).

    Where two schemas share a name, the first one's type holds.

    Raises:
        ConfigError: the file cannot be read, or a key is unknown, given twice, or has the wrong type.
    """
    path = Path(path)
    known = _spellings(schemas or (EngineArgs,))
    settings: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for key, value in _parse(path).items():
        item = known.get(_plain(key))
        if item is None:
            raise ConfigError(f"{path}: unknown key {key!r}{_closest(_plain(key), known)}")
        if item.name in settings:
            raise ConfigError(f"{path}: {key!r} and {spelled[item.name]!r} set the same thing; give one")
        settings[item.name] = _checked(path, key, item, value)
        spelled[item.name] = key
    return settings


def _spellings(schemas: tuple[type[Any], ...]) -> dict[str, Setting]:
    known: dict[str, Setting] = {}
    for schema in schemas:
        for item in settings_of(schema):
            for name in (item.name, *item.aliases):
                known.setdefault(_plain(name), item)
    return known


def _plain(key: Any) -> str:
    return str(key).strip().lstrip("-").replace("-", "_")


def _closest(key: str, known: dict[str, Setting]) -> str:
    matches = difflib.get_close_matches(key, known, n=1)
    return f"; did you mean {matches[0].replace('_', '-')!r}?" if matches else f"; accepted: {', '.join(sorted(known))}"


def _checked(path: Path, key: Any, item: Setting, value: Any) -> Any:
    try:
        return item.check(value)
    except ConfigError as error:
        raise ConfigError(f"{path}: key {key!r}: {error}") from None


def _parse(path: Path) -> dict[Any, Any]:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ConfigError(f"{path} has over {_MAX_BYTES} bytes; a configuration file is small")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot read the configuration file: {error}") from error
    content = _parse_toml(path, text) if path.suffix == ".toml" else _parse_yaml(path, text)
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds {type(content).__name__}; accepted: lines of KEY: VALUE")
    return content  # pyright: ignore[reportUnknownVariableType]


def _parse_toml(path: Path, text: str) -> object:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error


def _parse_yaml(path: Path, text: str) -> object:
    import yaml

    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
