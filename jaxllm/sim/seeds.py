"""What runs with several seeds say together: a mean, and how far it can be trusted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and half the width of its confidence interval. Without values the mean is NaN."""

    mean: float
    half_width: float  # NaN with fewer than two values: one run says nothing about the next
    count: int

    @property
    def low(self) -> float:
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        return self.mean + self.half_width

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0  # False where there is no interval


def interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Of the mean of independent values, by Student's t; NaN among the values (nothing measured) is left out."""
    kept = [value for value in values if not math.isnan(value)]
    if not kept:
        return Interval(math.nan, math.nan, 0)
    mean = math.fsum(kept) / len(kept)
    if len(kept) == 1:
        return Interval(mean, math.nan, 1)
    variance = math.fsum((value - mean) ** 2 for value in kept) / (len(kept) - 1)
    quantile = student_quantile((1 + confidence) / 2, len(kept) - 1)
    return Interval(mean, quantile * math.sqrt(variance / len(kept)), len(kept))


def paired_difference(base: Mapping[int, float], other: Mapping[int, float]) -> Interval:
    """Of `other` less `base` in runs with the same seed: what both owe to the workload falls out."""
    return interval([other[seed] - base[seed] for seed in base if seed in other])


@lru_cache(maxsize=1024)
def student_quantile(probability: float, freedom: int) -> float:
    """The value that Student's t with so many degrees of freedom stays below with that probability.

    Raises:
        ValueError: the probability is not between 0 and 1, or there is no degree of freedom.
    """
    if not 0 < probability < 1 or freedom < 1:
        raise ValueError(f"probability {probability}, freedom {freedom}; accepted: between 0 and 1, at least 1")
    if probability < 0.5:
        return -student_quantile(1 - probability, freedom)
    within = 2 * probability - 1  # that |t| is to stay below it
    low, high = 0.0, 1.0
    while student_within(high, freedom) < within:
        low, high = high, 2 * high
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if student_within(middle, freedom) < within else (low, middle)
    return (low + high) / 2


def student_within(limit: float, freedom: int) -> float:
    """The probability that |t| stays below a limit, in closed form.

    Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4.
    """
    angle = math.atan(limit / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = freedom % 2 == 1
    term, total = (cosine, 0.0) if is_odd else (1.0, 0.0)
    for step in range(freedom // 2):
        total += term
        term *= cosine * cosine * ((2 * step + 2) / (2 * step + 3) if is_odd else (2 * step + 1) / (2 * step + 2))
    return 2 / math.pi * (angle + sine * total) if is_odd else sine * total
