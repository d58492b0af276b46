"""Student's t beside printed tables, and intervals beside what they promise."""

from __future__ import annotations

import math

import numpy as np
import pytest

from jaxllm.sim.seeds import interval, paired_difference, student_quantile, student_within

# Two-sided 95 % and 99 %, as in every printed table.
TABLE = {
    1: (12.706, 63.657),
    2: (4.303, 9.925),
    3: (3.182, 5.841),
    4: (2.776, 4.604),
    5: (2.571, 4.032),
    7: (2.365, 3.499),
    10: (2.228, 3.169),
    15: (2.131, 2.947),
    30: (2.042, 2.750),
    60: (2.000, 2.660),
    120: (1.980, 2.617),
}


@pytest.mark.parametrize("freedom", TABLE)
def test_quantiles_are_those_of_the_table(freedom: int) -> None:
    found = (student_quantile(0.975, freedom), student_quantile(0.995, freedom))
    assert found == pytest.approx(TABLE[freedom], abs=6e-4)


def test_one_degree_is_cauchys_distribution_and_many_are_the_normal_one() -> None:
    for probability in (0.6, 0.9, 0.999):
        assert student_quantile(probability, 1) == pytest.approx(math.tan(math.pi * (probability - 0.5)))
        assert student_quantile(probability, 2) == pytest.approx(
            (2 * probability - 1) * math.sqrt(2 / (1 - (2 * probability - 1) ** 2))
        )
    assert student_quantile(0.975, 20_000) == pytest.approx(1.959964, abs=2e-4)
    assert student_quantile(0.025, 9) == -student_quantile(0.975, 9)
    assert student_quantile(0.5, 9) == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("freedom", [3, 6, 11])
def test_probabilities_are_integrals_of_the_density(freedom: int) -> None:
    t = np.linspace(-1.7, 1.7, 20_001)
    log_scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - math.log(freedom * math.pi) / 2
    density = np.exp(log_scale - (freedom + 1) / 2 * np.log1p(t * t / freedom))
    assert student_within(1.7, freedom) == pytest.approx(float(np.trapezoid(density, t)), abs=1e-8)


@pytest.mark.parametrize(("probability", "freedom"), [(0.0, 3), (1.0, 3), (0.9, 0)])
def test_what_has_no_quantile_is_refused(probability: float, freedom: int) -> None:
    with pytest.raises(ValueError, match="accepted"):
        student_quantile(probability, freedom)


def test_an_interval_holds_the_true_mean_as_often_as_it_says() -> None:
    draw = np.random.default_rng(5)
    found = [interval(row) for row in (3 + 2 * draw.standard_normal((4000, 4))).tolist()]
    share = sum(each.low <= 3 <= each.high for each in found) / len(found)
    assert share == pytest.approx(0.95, abs=0.012)  # over three standard deviations


def test_one_value_has_no_interval_and_none_no_mean() -> None:
    assert interval([2.0]).mean == 2.0
    assert math.isnan(interval([2.0]).half_width)
    assert not interval([2.0]).excludes_zero
    assert interval([]).count == interval([math.nan]).count == 0
    assert interval([1.0, math.nan, 3.0]) == interval([1.0, 3.0])
    assert interval([1.0, 3.0]).half_width == pytest.approx(12.706, abs=1e-3)


def test_pairs_see_what_seeds_hide() -> None:
    base = {seed: 10.0 * seed for seed in range(6)}
    other = {seed: value + 1 + 0.1 * (seed % 2) for seed, value in base.items()}
    found = paired_difference(base, {**other, 99: -1e9})  # a seed that the first never ran
    assert found.excludes_zero
    assert found.count == 6
    assert found.mean == pytest.approx(1.05)
    spread = interval(list(base.values()))
    assert spread.low < interval(list(other.values())).mean < spread.high
