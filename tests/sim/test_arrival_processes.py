"""Moments of arrival against what a Poisson and a gamma process are."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from jaxllm.sim.arrivals import AtOnce, Gamma, Rate, Until


def moments(process, count, seed=0):
    rng, now_s, found = random.Random(seed), 0.0, []
    for _ in range(count):
        now_s = process.next_s(now_s, rng)
        found.append(now_s)
    return found


def gaps(times):
    return [after - before for before, after in zip([0.0, *times], times, strict=False)]


def test_gaps_of_a_poisson_process_are_exponential():
    values = sorted(gaps(moments(Gamma(Rate.constant(4.0)), 10_000)))
    distance = max(abs((i + 0.5) / 10_000 - (1 - math.exp(-4 * gap))) for i, gap in enumerate(values))
    assert distance < 1.95 / math.sqrt(10_000)  # Kolmogorov, 0.1 %


def test_counts_a_second_of_a_poisson_process_vary_as_much_as_their_mean():
    times = moments(Gamma(Rate.constant(10.0)), 20_000)
    seconds = int(times[-1])
    counts = [0] * seconds
    for at_s in times:
        if at_s < seconds:
            counts[int(at_s)] += 1
    assert statistics.fmean(counts) == pytest.approx(10, rel=0.05)
    assert statistics.variance(counts) / statistics.fmean(counts) == pytest.approx(1, abs=0.12)


@pytest.mark.parametrize("shape", [0.25, 1.0, 4.0])
def test_gaps_of_a_gamma_process_vary_as_their_shape_says(shape):
    values = gaps(moments(Gamma(Rate.constant(2.0), shape), 20_000, seed=3))
    assert statistics.fmean(values) == pytest.approx(0.5, rel=0.05)
    assert statistics.pstdev(values) / statistics.fmean(values) == pytest.approx(1 / math.sqrt(shape), rel=0.05)


def test_each_step_of_a_rate_has_its_share_and_the_steps_repeat():
    steps = ((10.0, 1.0), (5.0, 20.0), (5.0, 0.0))
    times = moments(Gamma(Rate(steps)), 22_000)
    in_step = [0, 0, 0]
    for at_s in times:
        place = math.fmod(at_s, 20)
        in_step[0 if place < 10 else 1 if place < 15 else 2] += 1
    assert in_step[2] == 0
    assert in_step[0] / in_step[1] == pytest.approx(10 / 100, rel=0.08)
    assert times[-1] / 20 == pytest.approx(22_000 / 110, rel=0.05)


def test_a_moment_is_where_the_area_under_the_rate_says():
    rate = Rate(((2.0, 3.0), (1.0, 0.0), (4.0, 0.5)))  # 8 requests in 7 seconds
    rng = random.Random(5)
    for _ in range(300):
        now_s, expected = rng.uniform(0, 30), rng.uniform(0.01, 30)
        then_s = rate.after(now_s, expected)
        step_s = (then_s - now_s) / 20_000
        area = sum(per_s(rate, now_s + (i + 0.5) * step_s) for i in range(0, 20_000, 20)) * step_s * 20
        assert area == pytest.approx(expected, rel=0.02, abs=0.02)


def per_s(rate, at_s):
    place = math.fmod(at_s, 7)
    return rate.steps[0 if place < 2 else 1 if place < 3 else 2][1]


def test_time_goes_forward_and_all_at_once_stays_at_the_beginning():
    times = moments(Gamma(Rate(((0.5, 0.0), (0.1, 7.0))), 0.1), 2000)
    assert times == sorted(times)
    assert moments(AtOnce(), 3) == [0.0, 0.0, 0.0]


def test_a_workload_ends_by_what_comes_first():
    both = Until(count=3, duration_s=10.0)
    assert [both.is_over(2, 9.9), both.is_over(3, 0.0), both.is_over(0, 10.0)] == [False, True, True]
    assert not Until(count=3).is_over(2, math.inf)
