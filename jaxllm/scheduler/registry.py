"""Policies by name, by import path, or from other packages."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, cast

from jaxllm.errors import ConfigError
from jaxllm.scheduler.guard import GuardedPolicy
from jaxllm.scheduler.policy import SchedulingPolicy

ENTRY_POINT_GROUP = "jaxllm.policies"
BUILT_IN = {
    "fcfs": "jaxllm.scheduler.policies.fcfs:FirstComeFirstServed",
    "priority": "jaxllm.scheduler.policies.priority:Priority",
    "shortest_first": "jaxllm.scheduler.policies.shortest_first:ShortestFirst",
    "cache_aware": "jaxllm.scheduler.policies.cache_aware:CacheAware",
    "fair": "jaxllm.scheduler.policies.fair:Fair",
    "slo": "jaxllm.scheduler.policies.slo:LeastSlack",
}

FOREIGN_LIMIT_S = 1.0  # longest work on one question
_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_QUESTIONS = ("order", "admit", "token_budget", "victim")


def create_policy(name: str, options: Mapping[str, Any] | None = None) -> SchedulingPolicy:
    """Make a policy: a built-in name, `package.module:Class`, or a name in group `jaxllm.policies`.

    `options` are keyword arguments of its class. One that does not come with this package is watched:
    a question that it works on for longer than a second is taken from it (`GuardedPolicy`).

    Raises:
        ConfigError: no such policy, what was found is not one, or it takes no such options; a built-in
            name cannot be replaced.
    """
    if name in BUILT_IN:
        return _load(name, EntryPoint(name, BUILT_IN[name], ENTRY_POINT_GROUP), options or {})
    return GuardedPolicy(_foreign(name, options or {}), limit_s=FOREIGN_LIMIT_S)


def _foreign(name: str, options: Mapping[str, Any]) -> SchedulingPolicy:
    if ":" in name:
        if not _DOTTED.fullmatch(name):
            raise ConfigError(f"policy={name!r}; accepted: package.module:Class, or the name of a policy")
        return _load(name, EntryPoint(name, name, ENTRY_POINT_GROUP), options)
    installed = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    if name not in installed:
        known = ", ".join(sorted({*BUILT_IN, *installed}))
        raise ConfigError(f"policy={name!r} is unknown; accepted: {known}, or package.module:Class")
    return _load(name, installed[name], options)


def _load(name: str, point: EntryPoint, options: Mapping[str, Any]) -> SchedulingPolicy:
    try:
        kind: Any = point.load()
    except Exception as error:
        raise ConfigError(f"policy={name!r} cannot be made from {point.value!r}: {error}") from error
    try:
        _check_options(name, kind, options)
        made: Any = kind(**options)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"policy={name!r} cannot be made from {point.value!r}: {error}") from error
    missing = [question for question in _QUESTIONS if not callable(getattr(made, question, None))]
    if missing:
        raise ConfigError(f"policy={name!r} lacks {', '.join(missing)}; accepted: a class with {', '.join(_QUESTIONS)}")
    return cast(SchedulingPolicy, made)


def _check_options(name: str, kind: Any, options: Mapping[str, Any]) -> None:
    """Raise ConfigError for an option that the class has no argument for."""
    try:
        arguments = inspect.signature(kind).parameters
    except (TypeError, ValueError):  # not a class, or one that tells nothing
        return
    if any(argument.kind is argument.VAR_KEYWORD for argument in arguments.values()):
        return
    unknown = [option for option in options if option not in arguments]
    if unknown:
        known = ", ".join(arguments) or "none"
        raise ConfigError(f"policy={name!r} has no option {', '.join(unknown)}; accepted: {known}")
