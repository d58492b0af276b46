"""Flags made from configuration dataclasses: their names, help, other spellings and types."""

from __future__ import annotations

import itertools
import json
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, make_dataclass
from typing import Any, Literal, Union, cast, get_args, get_origin

from jaxllm.config.fields import parse_count, settings_of
from jaxllm.config.load import load_config_file
from jaxllm.errors import ConfigError
from jaxllm.types.sampling import SamplingParams

# What a field becomes on the command line, chosen by its type.
Kind = Literal["switch", "count", "int", "float", "text", "json", "texts", "ints"]
_KINDS: dict[Any, Kind] = {bool: "switch", int: "int", float: "float", str: "text", tuple[str, ...]: "texts"}
_KINDS[tuple[int, ...]] = "ints"
_METAVARS: dict[Kind, str] = {"count": "N", "int": "N", "float": "X", "text": "TEXT", "json": "JSON"}
NOT_OFFLINE = frozenset({"output_kind", "stream_interval"})  # of SamplingParams: they shape streams, not text


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag. `default` stands for "not given"; what a missing flag means is the schema's business."""

    name: str
    kind: Kind
    help: str
    default: Any = None
    aliases: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    repeats: bool = False  # each --flag VALUE adds one
    positional: bool = False


def schema_flags(schema: type[Any], *, leave_out: Sequence[str] = ()) -> list[Flag]:
    """The fields of a configuration dataclass made with `setting`."""
    flags: list[Flag] = []
    for item in settings_of(schema):
        if item.name not in leave_out:
            kind, choices = _kind_of(item.hint)
            kind = "count" if item.human else kind
            help = item.help if item.served else f"{item.help} (not served yet)"
            flags.append(Flag(item.name, kind, help, item.default, item.aliases, choices))
    return flags


def sampling_flags() -> list[Flag]:
    """The fields of `SamplingParams`. Except for switches, None means not given."""
    hints = typing.get_type_hints(SamplingParams)
    flags: list[Flag] = []
    for item in fields(SamplingParams):
        if item.name in NOT_OFFLINE:
            continue
        kind, _ = _kind_of(hints[item.name])
        default = () if kind == "texts" else item.default if kind == "switch" else None
        shown = "" if item.default is MISSING or kind == "switch" else f"default {item.default!r}"
        flags.append(Flag(item.name, kind, shown, default, repeats=kind == "texts"))
    return flags


def given_sampling(values: Mapping[str, Any]) -> dict[str, Any]:
    """Of parsed flags, the sampling fields that were given, as arguments of `SamplingParams`.

    Raises:
        ConfigError: a JSON flag holds no JSON.
    """
    given: dict[str, Any] = {}
    for flag in sampling_flags():
        value = values[flag.name]
        if value != flag.default:
            given[flag.name] = _from_json(flag.name, value) if flag.kind == "json" else value
    return given


def parse(
    command: str, about: str, flags: Sequence[Flag], argv: Sequence[str], *, schemas: Sequence[type[Any]] = ()
) -> dict[str, Any]:
    """Values by flag name: the command line over `--config FILE` (checked against `schemas`) over defaults.

    Raises:
        ConfigError: the configuration file is wrong.
        SystemExit: help was asked for (0), or the command line is wrong (2, with a message on stderr).
    """
    import tyro

    file = _config_path(argv) if schemas else None
    defaults = load_config_file(file, *schemas) if file is not None else {}
    if schemas:
        flags = [*flags, Flag("config", "text", "YAML or TOML file with the same names")]
    unique = {flag.name: flag for flag in reversed(flags)}
    form = make_dataclass(
        "Flags",
        [(flag.name, _annotation(flag), _field(flag, defaults)) for flag in reversed(unique.values())],
        kw_only=True,
    )
    parsed = tyro.cli(form, args=[*argv], prog=f"jaxllm {command}", description=about)
    return {name: _value(flag, getattr(parsed, name), defaults) for name, flag in unique.items()}


def _value(flag: Flag, parsed: Any, defaults: Mapping[str, Any]) -> Any:
    """Lists come as one tuple for each time the flag was given: all of them count, over those of the file."""
    if not _is_list(flag):
        return parsed
    return tuple(itertools.chain(*parsed)) if parsed else defaults.get(flag.name, flag.default)


def _is_list(flag: Flag) -> bool:
    """Whether each --flag takes several words; with `repeats` it takes one."""
    return flag.kind == "texts" and not flag.repeats


def _config_path(argv: Sequence[str]) -> str | None:
    """The value of --config, which must be known before the flags that it gives defaults to."""
    for index, arg in enumerate(argv):
        if arg == "--config" and index + 1 < len(argv):
            return argv[index + 1]
        if arg.startswith("--config="):
            return arg.partition("=")[2]
    return None


def _kind_of(hint: Any) -> tuple[Kind, tuple[str, ...]]:
    """How a field is written on the command line, and its choices."""
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    option = next(o for o in options if o is not types.NoneType)
    if get_origin(option) is Literal:
        return "text", cast("tuple[str, ...]", get_args(option))
    return _KINDS.get(option, "json"), ()


def _field(flag: Flag, defaults: Mapping[str, Any]) -> Any:
    if _is_list(flag):
        return field(default=())
    return field(default=defaults.get(flag.name, flag.default))


def _annotation(flag: Flag) -> Any:
    import tyro

    base: Any = _base_type(flag)
    if flag.repeats or _is_list(flag):
        base = tyro.conf.UseAppendAction[base]
    if flag.positional:
        base = tyro.conf.Positional[base]
    dashed = tuple(("-" if len(alias) < 3 else "--") + alias for alias in flag.aliases)
    about = tyro.conf.arg(help=flag.help, aliases=dashed or None)
    return typing.Annotated[(base, about)]


def _base_type(flag: Flag) -> Any:
    if flag.kind == "switch":
        return bool
    if flag.kind == "texts":
        return tuple[tuple[str, ...], ...] if _is_list(flag) else tuple[str, ...]
    if flag.kind == "ints":
        return tuple[int, ...] | None
    if flag.choices:
        choice: Any = Literal[flag.choices]
        return choice if flag.default is not None else choice | None
    return typing.Annotated[(Any, _constructor(flag))]


def _constructor(flag: Flag) -> Any:
    """One value from one word; a default of None is shown as it is."""
    import tyro

    def from_words(words: list[str]) -> Any:
        return _from_word(flag, words[0])

    def to_words(value: Any) -> list[str]:
        return [str(value)]

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=flag.name.upper() if flag.positional else _METAVARS[flag.kind],
        instance_from_str=from_words,
        is_instance=lambda value: True,
        str_from_instance=to_words,
    )


def _from_word(flag: Flag, word: str) -> Any:
    if flag.kind == "count":
        try:
            return parse_count(word)
        except ConfigError as error:
            raise ValueError(str(error)) from None
    if flag.kind == "int":
        return int(word)
    return float(word) if flag.kind == "float" else word


def _from_json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--{name.replace('_', '-')} {text!r} is not JSON: {error}") from None
