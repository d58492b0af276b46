"""The arrival process, by its mean, its spread and what is known of gamma gaps."""

from __future__ import annotations

import math

import numpy as np
import pytest

from jaxllm.bench.arrivals import Arrivals, RampUp

NUM = 40_000


def gaps(arrivals: Arrivals, seed: int = 0) -> np.ndarray:
    return np.diff(arrivals.times(NUM, seed))


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_of_the_rate_and_the_spread_of_the_burstiness(burstiness: float) -> None:
    found = gaps(Arrivals(rate=20.0, burstiness=burstiness))
    cv = 1 / math.sqrt(burstiness)  # standard deviation over mean of a gamma distribution of that shape
    assert found.mean() == pytest.approx(1 / 20, rel=5 * cv / math.sqrt(NUM))
    assert found.std() / found.mean() == pytest.approx(cv, rel=0.04)


def test_burstiness_one_is_a_poisson_process() -> None:
    """Counts in windows have the mean of their variance; gaps are memoryless."""
    times = np.asarray(Arrivals(rate=10.0).times(NUM, 3))
    counts = np.bincount(times.astype(int))[:-1]
    assert counts.var() / counts.mean() == pytest.approx(1.0, abs=0.08)
    found = np.diff(times)
    assert np.mean(found > 0.1) == pytest.approx(math.exp(-1), abs=0.01)
    assert np.mean(found[found > 0.1] > 0.2) == pytest.approx(math.exp(-1), abs=0.02)


def test_the_first_leaves_at_once_and_nobody_waits_at_an_infinite_rate() -> None:
    assert Arrivals().times(5, 0) == [0.0] * 5
    assert Arrivals(rate=1.0).times(3, 0)[0] == 0.0
    assert Arrivals(rate=1.0).times(0, 0) == []


def test_a_seed_gives_the_same_times_and_a_longer_run_begins_like_a_shorter_one() -> None:
    process = Arrivals(rate=2.0, burstiness=0.5)
    assert process.times(100, 7) == process.times(100, 7)
    assert process.times(100, 7)[:40] == process.times(40, 7)
    assert process.times(100, 7) != process.times(100, 8)


@pytest.mark.parametrize(
    ("strategy", "rates"),
    [("linear", (11.8, 55.0, 98.2)), ("exponential", (10**1.02, 10**1.5, 10**1.98))],
)
def test_a_ramp_rises_from_its_start_to_its_end(strategy: RampUp, rates: tuple[float, ...]) -> None:
    """From 10 to 100 requests a second, seen at 2 %, half and 98 % of the requests."""
    found = gaps(Arrivals(rate=100.0, ramp_up=strategy, start_rate=10.0))
    for place, rate in zip((0.02, 0.5, 0.98), rates, strict=True):
        at = int(place * NUM)
        assert 1 / found[at - 600 : at + 600].mean() == pytest.approx(rate, rel=0.1), place
