"""How long prompts and answers are, and how long people and tools pause."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Protocol

MAX_TOKENS = 10_000_000  # of a prompt or an answer


class Distribution(Protocol):
    """Numbers at random. Frozen."""

    def draw(self, rng: random.Random) -> float: ...


@dataclass(frozen=True, slots=True)
class Constant:
    value: float

    def draw(self, rng: random.Random) -> float:
        del rng
        return self.value


@dataclass(frozen=True, slots=True)
class Uniform:
    """Every number from `low` to `high`."""

    low: float
    high: float

    def draw(self, rng: random.Random) -> float:
        return self.low + (self.high - self.low) * rng.random()


@dataclass(frozen=True, slots=True)
class Exponential:
    mean: float

    def draw(self, rng: random.Random) -> float:
        return rng.expovariate(1.0) * self.mean


@dataclass(frozen=True, slots=True)
class Lognormal:
    """exp(`mu` + `sigma` z) of a standard normal z."""

    mu: float
    sigma: float

    @staticmethod
    def of_mean(mean: float, sigma: float) -> Lognormal:
        return Lognormal(math.log(mean) - sigma * sigma / 2, sigma)

    @staticmethod
    def of_median(median: float, sigma: float) -> Lognormal:
        return Lognormal(math.log(median), sigma)

    def draw(self, rng: random.Random) -> float:
        try:
            return math.exp(self.mu + self.sigma * rng.gauss(0.0, 1.0))
        except OverflowError:  # of a sigma beyond reason; whoever draws has an upper bound
            return math.inf


@dataclass(frozen=True, slots=True)
class Listed:
    """Each of `values` is as likely."""

    values: tuple[float, ...]

    def draw(self, rng: random.Random) -> float:
        return self.values[int(rng.random() * len(self.values))]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Whole numbers, drawn, rounded, and moved to the nearest bound where they are outside."""

    of: Distribution
    low: int = 1
    high: int = MAX_TOKENS

    def draw(self, rng: random.Random) -> int:
        return max(self.low, round(min(self.of.draw(rng), self.high)))


@dataclass(frozen=True, slots=True)
class UniformLengths:
    """Whole numbers from `low` to `high`, both included, each as likely."""

    low: int
    high: int

    def draw(self, rng: random.Random) -> int:
        return self.low + int(rng.random() * (self.high - self.low + 1))


class IntDistribution(Protocol):
    """Whole numbers at random: tokens, turns, calls. Frozen."""

    def draw(self, rng: random.Random) -> int: ...


class Pairs(Protocol):
    """Lengths of a prompt and of its answer, in tokens. Frozen."""

    def draw(self, rng: random.Random) -> tuple[int, int]: ...


@dataclass(frozen=True, slots=True)
class Independent:
    """A prompt's length says nothing about its answer's."""

    prompt: IntDistribution
    output: IntDistribution

    def draw(self, rng: random.Random) -> tuple[int, int]:
        return self.prompt.draw(rng), self.output.draw(rng)


@dataclass(frozen=True, slots=True)
class FromPairs:
    """Pairs that were seen, each as likely."""

    seen: tuple[tuple[int, int], ...]

    def __deepcopy__(self, memo: object) -> FromPairs:
        return self

    def draw(self, rng: random.Random) -> tuple[int, int]:
        return self.seen[int(rng.random() * len(self.seen))]
