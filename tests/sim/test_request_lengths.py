"""Lengths and pauses against the closed forms of their distributions."""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter

import pytest

from jaxllm.sim.lengths import (
    Constant,
    Exponential,
    FromPairs,
    Independent,
    Lengths,
    Listed,
    Lognormal,
    Uniform,
    UniformLengths,
)

DRAWS = 20_000


def drawn(distribution, seed=0):
    rng = random.Random(seed)
    return [distribution.draw(rng) for _ in range(DRAWS)]


def assert_mean(values, mean, deviation):
    """Within four standard errors."""
    assert abs(statistics.fmean(values) - mean) < 4 * deviation / math.sqrt(len(values))


@pytest.mark.parametrize(
    ("distribution", "mean", "deviation"),
    [
        (Uniform(2, 10), 6, 8 / math.sqrt(12)),
        (Exponential(7), 7, 7),
        (Lognormal.of_mean(500, 0.5), 500, 500 * math.sqrt(math.exp(0.25) - 1)),
        (UniformLengths(1, 6), 3.5, math.sqrt(35 / 12)),
        (Listed((1, 2, 9)), 4, math.sqrt(38 / 3)),
    ],
)
def test_mean_and_deviation_are_those_of_the_distribution(distribution, mean, deviation):
    values = drawn(distribution)
    assert_mean(values, mean, deviation)
    assert statistics.pstdev(values) == pytest.approx(deviation, rel=0.06)


def test_half_of_a_lognormal_is_below_its_median():
    below = sum(value < 300 for value in drawn(Lognormal.of_median(300, 1.2)))
    assert abs(below / DRAWS - 0.5) < 4 * 0.5 / math.sqrt(DRAWS)


def test_a_die_shows_every_face_as_often():
    counts = Counter(drawn(UniformLengths(1, 6)))
    assert sorted(counts) == [1, 2, 3, 4, 5, 6]
    expected = DRAWS / 6
    assert sum((n - expected) ** 2 / expected for n in counts.values()) < 20.5  # chi square of 5 degrees, 0.1 %


def test_lengths_are_whole_and_within_their_bounds():
    values = drawn(Lengths(Lognormal.of_median(100, 2.0), 16, 1024))
    assert all(type(value) is int and 16 <= value <= 1024 for value in values)
    assert {16, 1024} <= set(values)
    assert drawn(Lengths(Constant(2.6)))[:2] == [3, 3]
    assert drawn(Lengths(Lognormal(1000.0, 10.0), 1, 50))[:2] == [50, 50]  # more than a float holds


def test_pairs_that_were_seen_stay_together():
    seen = ((10, 1), (20, 2), (30, 3))
    assert set(drawn(FromPairs(seen))) == set(seen)


def test_independent_pairs_do_not_correlate():
    prompts, outputs = zip(*drawn(Independent(UniformLengths(1, 100), UniformLengths(1, 100))), strict=True)
    assert abs(statistics.correlation(prompts, outputs)) < 4 / math.sqrt(DRAWS)
