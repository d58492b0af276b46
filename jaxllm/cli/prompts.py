"""The prompts of `jaxllm run`: from flags, or from a file with one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from jaxllm.cli.flags import NOT_OFFLINE
from jaxllm.errors import ConfigError, RequestError
from jaxllm.types.sampling import SamplingParams, sampling_fields

_KEYS = ("prompt", "messages", "prompt_token_ids")


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt, where it came from, and the sampling fields beside it."""

    where: str
    kind: str  # one of _KEYS
    content: Any
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])


def jobs_from_flags(prompts: Sequence[str]) -> list[Job]:
    return [Job(f"--prompt {number}", "prompt", text) for number, text in enumerate(prompts, 1)]


def jobs_from_file(path: Path) -> list[Job]:
    """Read a file of JSON lines; empty lines are passed over.

    Raises:
        ConfigError: the file cannot be read, or a line is wrong; the message says which line and why.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {path}: cannot read it: {error}") from error
    return [_job(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]


def _job(line: str, where: str) -> Job:
    try:
        value: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: a JSON object is needed, not {type(value).__name__}")
    entry = cast("dict[str, Any]", value)
    kinds = [key for key in _KEYS if key in entry]
    if len(kinds) != 1:
        raise ConfigError(f"{where}: needs exactly one of {', '.join(_KEYS)}; it has {', '.join(kinds) or 'none'}")
    kind = kinds[0]
    _check_content(kind, entry[kind], where)
    sampling = {key: each for key, each in entry.items() if key != kind}
    accepted = [name for name in sampling_fields() if name not in NOT_OFFLINE]
    unknown = sorted(sampling.keys() - set(accepted))
    if unknown:
        raise ConfigError(f"{where}: unknown key {unknown[0]!r}; accepted: {kind} and {', '.join(accepted)}")
    return Job(where, kind, entry[kind], sampling)


def _check_content(kind: str, content: Any, where: str) -> None:
    accepted = str if kind == "prompt" else list
    if not isinstance(content, accepted):
        words = "text" if kind == "prompt" else "a list"
        raise ConfigError(f"{where}: {kind} is {type(content).__name__}; accepted: {words}")


def params_of(job: Job, *layers: Mapping[str, Any]) -> SamplingParams:
    """The sampling of a job: its own fields over `layers`, of which a later one is over an earlier one.

    Raises:
        RequestError: a field is out of range; the message says where it stands.
    """
    merged: dict[str, Any] = {}
    for layer in (*layers, job.sampling):
        merged.update(layer)
    merged.update(_with_integer_keys(merged.get("logit_bias")))
    try:
        return SamplingParams(**merged)
    except RequestError as error:
        raise RequestError(f"{job.where}: {error}", param=error.param) from None


def _with_integer_keys(bias: Any) -> dict[str, Any]:
    """JSON has no keys but text: "17" in logit_bias means the token 17. Other keys are left to be refused."""
    if not isinstance(bias, Mapping):
        return {}
    entries = cast("Mapping[Any, Any]", bias).items()
    return {"logit_bias": {int(k) if _is_decimal(k) else k: value for k, value in entries}}


def _is_decimal(key: Any) -> bool:
    return isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= 20
