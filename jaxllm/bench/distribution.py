"""Many values as a few: mean, median, spread and percentiles."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxllm.errors import ConfigError, shown


@dataclass(frozen=True, slots=True)
class Distribution:
    """Without values every figure is 0."""

    count: int
    mean: float
    median: float
    std: float  # of the values themselves, not an estimate from a sample
    smallest: float
    largest: float
    percentiles: tuple[tuple[float, float], ...]  # (per cent, value)

    @staticmethod
    def of(values: Iterable[float], percentiles: Sequence[float] = ()) -> Distribution:
        ordered = sorted(values)
        if not ordered:
            return Distribution(0, 0.0, 0.0, 0.0, 0.0, 0.0, tuple((p, 0.0) for p in percentiles))
        mean = math.fsum(ordered) / len(ordered)
        return Distribution(
            count=len(ordered),
            mean=mean,
            median=percentile(ordered, 50),
            std=math.sqrt(math.fsum((value - mean) ** 2 for value in ordered) / len(ordered)),
            smallest=ordered[0],
            largest=ordered[-1],
            percentiles=tuple((p, percentile(ordered, p)) for p in percentiles),
        )

    def scaled(self, factor: float) -> Distribution:
        """The same in another unit."""
        return Distribution(
            self.count,
            self.mean * factor,
            self.median * factor,
            self.std * factor,
            self.smallest * factor,
            self.largest * factor,
            tuple((p, value * factor) for p, value in self.percentiles),
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            "mean": self.mean,
            "median": self.median,
            "std": self.std,
            "min": self.smallest,
            "max": self.largest,
            "percentiles": {percent_name(p): value for p, value in self.percentiles},
        }


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Between the two closest values, in proportion, as numpy's default; `ordered` ascends and is not empty."""
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def percent_name(percent: float) -> str:
    """99.0 as "99", 99.9 as "99.9"."""
    return f"{percent:g}"


def parse_percentiles(text: str) -> tuple[float, ...]:
    """Numbers between commas.

    Raises:
        ConfigError: one is no number from 0 to 100.
    """
    values: list[float] = []
    for word in text.split(","):
        try:
            value = float(word)
        except ValueError:
            value = math.nan
        if not 0 <= value <= 100:
            raise ConfigError(f"metric_percentiles holds {shown(word)}; accepted: numbers from 0 to 100 between commas")
        values.append(value)
    return tuple(values)
