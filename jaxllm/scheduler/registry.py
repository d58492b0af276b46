"""Policies by name, by import path, or from other packages."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any, cast

from jaxllm.errors import ConfigError
from jaxllm.scheduler.policy import SchedulingPolicy

ENTRY_POINT_GROUP = "jaxllm.policies"
BUILT_IN = {"fcfs": "jaxllm.scheduler.policies.fcfs:FirstComeFirstServed"}

_QUESTIONS = ("order", "admit", "token_budget", "victim")


def create_policy(name: str) -> SchedulingPolicy:
    """Make a policy: a built-in name, `package.module:Class`, or a name in group `jaxllm.policies`.

    Raises:
        ConfigError: no such policy, or what was found is not one; a built-in name cannot be replaced.
    """
    if name in BUILT_IN:
        return _load(name, EntryPoint(name, BUILT_IN[name], ENTRY_POINT_GROUP))
    if ":" in name:
        return _load(name, EntryPoint(name, name, ENTRY_POINT_GROUP))
    installed = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    if name not in installed:
        known = ", ".join(sorted({*BUILT_IN, *installed}))
        raise ConfigError(f"policy={name!r} is unknown; accepted: {known}, or package.module:Class")
    return _load(name, installed[name])


def _load(name: str, point: EntryPoint) -> SchedulingPolicy:
    try:
        made: Any = point.load()()
    except Exception as error:
        raise ConfigError(f"policy={name!r} cannot be made from {point.value!r}: {error}") from error
    missing = [question for question in _QUESTIONS if not callable(getattr(made, question, None))]
    if missing:
        raise ConfigError(f"policy={name!r} lacks {', '.join(missing)}; accepted: a class with {', '.join(_QUESTIONS)}")
    return cast(SchedulingPolicy, made)
