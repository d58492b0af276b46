"""Which implementation of an op serves a call, and why not the others."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

from pallas_kernels._core.errors import UnknownImplementation, Unsupported
from pallas_kernels._core.platform import default_platform


@dataclass(frozen=True, slots=True)
class Implementation:
    """One way to compute an op.

    `module` is imported on first use. It has ``why_not(problem) -> str | None`` (the reason it cannot serve a
    problem, or None) and the functions that the op's `api` calls.
    """

    name: str
    module: str
    platforms: tuple[str, ...] = ()  # (): all of them

    def load(self) -> ModuleType:
        return import_module(self.module)


@dataclass(frozen=True, slots=True)
class Choice:
    """What dispatch decided: the implementation chosen, and one reason for each of the others."""

    op: str
    chosen: Implementation
    why_not: Mapping[str, str]


def choose(
    op: str,
    implementations: Sequence[Implementation],
    problem: Hashable,
    *,
    implementation: str | None = None,
    platform: str | None = None,
) -> Choice:
    """Take the one that is asked for, else the first in the op's order that serves `problem` on `platform`.

    Raises UnknownImplementation for a name the op does not have, and Unsupported, with one reason for each that
    was tried, if none serves.
    """
    if implementation is not None:
        return _explicit(op, implementations, problem, implementation)
    platform = platform or default_platform()
    reasons: dict[str, str] = {}
    chosen: Implementation | None = None
    for candidate in implementations:
        if chosen is not None:
            reasons[candidate.name] = f"comes after {chosen.name}, which serves"
            continue
        reason = _platform_reason(candidate, platform) or _reason(candidate, problem)
        if reason is None:
            chosen = candidate
        else:
            reasons[candidate.name] = reason
    if chosen is None:
        raise Unsupported(op, reasons)
    return Choice(op, chosen, reasons)


def _explicit(op: str, implementations: Sequence[Implementation], problem: Hashable, name: str) -> Choice:
    found = next((i for i in implementations if i.name == name), None)
    if found is None:
        raise UnknownImplementation(op, name, tuple(i.name for i in implementations))
    reason = _reason(found, problem)
    if reason is not None:
        raise Unsupported(op, {name: reason})
    return Choice(op, found, {i.name: f"{name} was asked for" for i in implementations if i is not found})


def _platform_reason(candidate: Implementation, platform: str) -> str | None:
    if candidate.platforms and platform not in candidate.platforms:
        return f"runs on {' and '.join(candidate.platforms)}, not on {platform}"
    return None


def _reason(candidate: Implementation, problem: Hashable) -> str | None:
    try:
        return candidate.load().why_not(problem)
    except ImportError as error:
        return f"cannot be imported with this jax: {error}"
