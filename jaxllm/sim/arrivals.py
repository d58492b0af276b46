"""When requests come, by a process that knows nothing of the engine."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass
from typing import Protocol


class Process(Protocol):
    """Moments at random, one after the other. Frozen."""

    def next_s(self, now_s: float, rng: random.Random) -> float:
        """The moment that follows one at `now_s`; the first follows 0."""
        ...


@dataclass(frozen=True, slots=True)
class Rate:
    """Requests a second over time: steps of (seconds, rate), from the first again after the last.

    At least one rate is above 0.
    """

    steps: tuple[tuple[float, float], ...]

    @staticmethod
    def constant(per_s: float) -> Rate:
        return Rate(((math.inf, per_s),))

    def after(self, now_s: float, expected: float) -> float:
        """The moment by which so many requests more are expected than at `now_s`."""
        period_s = sum(seconds for seconds, _ in self.steps)
        if math.isinf(period_s) and len(self.steps) == 1:
            return now_s + expected / self.steps[0][1]
        started_s = now_s - math.fmod(now_s, period_s)
        for seconds, per_s in itertools.cycle(self.steps):
            ends_s = started_s + seconds
            if ends_s > now_s:
                area = (ends_s - now_s) * per_s
                if per_s > 0 and area >= expected:
                    return now_s + expected / per_s
                expected -= area
                now_s = ends_s
            started_s = ends_s
        raise AssertionError("a cycle has no end")


@dataclass(frozen=True, slots=True)
class Gamma:
    """Gaps of a gamma distribution. `shape` 1 is a Poisson process, below it bursts, above it evenness.

    The coefficient of variation of the gaps is 1 / sqrt(shape). Where the rate changes, gaps are
    stretched so that each second has its share of requests.
    """

    rate: Rate
    shape: float = 1.0

    def next_s(self, now_s: float, rng: random.Random) -> float:
        gap = rng.expovariate(1.0) if self.shape == 1 else rng.gammavariate(self.shape, 1 / self.shape)
        return self.rate.after(now_s, gap)


@dataclass(frozen=True, slots=True)
class AtOnce:
    """All at the beginning."""

    def next_s(self, now_s: float, rng: random.Random) -> float:
        del rng
        return now_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Until:
    """How far a workload goes: whichever comes first; at least one of the two is given."""

    count: int | None = None  # requests, or conversations
    duration_s: float | None = None  # the last one begins before it

    def is_over(self, number: int, at_s: float) -> bool:
        """Whether the one with this number, from 0, does not come any more at that moment."""
        if self.count is not None and number >= self.count:
            return True
        return self.duration_s is not None and at_s >= self.duration_s
