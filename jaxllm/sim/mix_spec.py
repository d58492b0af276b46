"""Lengths, pauses and classes of requests in a simulation's configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

from jaxllm.errors import ConfigError, RequestError
from jaxllm.sim.lengths import (
    MAX_TOKENS,
    Constant,
    Distribution,
    Exponential,
    Independent,
    IntDistribution,
    Lengths,
    Listed,
    Lognormal,
    Uniform,
    UniformLengths,
)
from jaxllm.sim.mix import RequestClass
from jaxllm.sim.section import Section, is_number
from jaxllm.types.service import ServiceParams

_KINDS = ("constant", "uniform", "exponential", "lognormal")
_MAX_S = 1e9
_SERVICE = ("tenant", "deadline_s", "ttft_target_s", "tpot_target_s", "retention_priority", "retention_tokens")


def lengths_of(section: Section, key: str, *, low: int = 1, high: int = MAX_TOKENS) -> IntDistribution:
    """Whole numbers from `low` to `high`: one, a list of which each is as likely, or a distribution.

    Raises:
        ConfigError: the value is none of them.
    """
    accepted = f"a whole number from {low} to {high}, a list of such, or {{kind: {' | '.join(_KINDS)}, ...}}"
    value: Any = section.take(key, accepted=accepted)
    if isinstance(value, list):
        values = cast("list[Any]", value)
        if not values or not all(_is_length(each, low, high) for each in values):
            raise section.fail(key, value, accepted)
        return Lengths(Listed(tuple(float(each) for each in values)), low)
    if not isinstance(value, Mapping):
        if not _is_length(value, low, high):
            raise section.fail(key, value, accepted)
        return Lengths(Constant(float(value)), low)
    inner = section.inner(key)
    if inner.text("kind", choices=_KINDS) == "uniform":
        lowest = inner.whole("low", low=low, high=high)
        lengths: IntDistribution = UniformLengths(lowest, inner.whole("high", low=lowest, high=high))
    else:
        least = inner.whole("min", low, low=low, high=high)
        lengths = Lengths(_distribution(inner), least, inner.whole("max", high, low=least, high=high))
    inner.done()
    return lengths


def _is_length(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def duration_of(section: Section, key: str, default: Distribution) -> Distribution:
    """Seconds, at least 0: a number, a list of which each is as likely, or a distribution.

    Raises:
        ConfigError: the value is none of them.
    """
    accepted = f"seconds, at least 0, a list of such, or {{kind: {' | '.join(_KINDS)}, ...}}"
    value: Any = section.take(key, default)
    if value is default:
        return default
    if isinstance(value, Mapping):
        inner = section.inner(key)
        inner.text("kind", choices=_KINDS)
        drawn = _distribution(inner)
        inner.done()
        return drawn
    values = cast("list[Any]", value) if isinstance(value, list) else [value]
    if not values or not all(is_number(each) and 0 <= each <= _MAX_S for each in values):
        raise section.fail(key, value, accepted)
    return Constant(float(values[0])) if len(values) == 1 else Listed(tuple(float(each) for each in values))


def _distribution(inner: Section) -> Distribution:
    """Its `kind` and numbers."""
    match inner.text("kind", choices=_KINDS):
        case "constant":
            return Constant(inner.number("value", high=_MAX_S))
        case "uniform":
            low = inner.number("low", high=_MAX_S)
            return Uniform(low, inner.number("high", low=low, high=_MAX_S))
        case "exponential":
            return Exponential(inner.number("mean", above=0, high=_MAX_S))
        case _:
            return _lognormal(inner)


def _lognormal(inner: Section) -> Lognormal:
    """Of `mean` or `median`, and `sigma`, of the logarithm, or `cv`, of the numbers."""
    middle = inner.one_of("mean", "median")
    value = inner.number(middle, above=0, high=_MAX_S)
    if inner.one_of("sigma", "cv") == "sigma":
        sigma = inner.number("sigma", high=10)
    else:
        sigma = math.sqrt(math.log1p(inner.number("cv", high=100) ** 2))
    return (Lognormal.of_mean if middle == "mean" else Lognormal.of_median)(value, sigma)


def classes_of(section: Section, *, has_lengths: bool = False) -> tuple[RequestClass, ...]:
    """Of the list `classes`; one that asks for nothing where there is none.

    Raises:
        ConfigError: an entry is wrong.
    """
    entries = section.items("classes", [])
    if not entries:
        return (RequestClass(),)
    path = section.path("classes")
    classes = tuple(_class(Section(entry, f"{path}[{n}]"), has_lengths) for n, entry in enumerate(entries))
    if not any(kind.weight for kind in classes):
        raise ConfigError(f"{path}: all weights are 0; accepted: one above 0")
    return classes


def _class(inner: Section, has_lengths: bool) -> RequestClass:
    wishes = {name: inner.take(name) for name in _SERVICE if name in inner}
    for name in _SERVICE:
        inner.take(name, None)
    try:
        service = ServiceParams(**wishes)
    except RequestError as error:
        name = error.param or ""
        raise ConfigError(f"{inner.path(name)}: {error}") from None
    pairs = None
    if has_lengths and ("prompt" in inner or "output" in inner):
        pairs = Independent(lengths_of(inner, "prompt"), lengths_of(inner, "output"))
    kind = RequestClass(
        weight=inner.number("weight", 1.0, high=1e9),
        priority=inner.whole("priority", 0, low=-(2**31), high=2**31),
        service=service,
        cache_salt=inner.text("cache_salt", None),
        pairs=pairs,
    )
    inner.done()
    return kind
