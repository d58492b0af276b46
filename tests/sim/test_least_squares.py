"""Least squares without negative coefficients: the conditions of an optimum, and outliers."""

from __future__ import annotations

import numpy as np
import pytest

from jaxllm.sim.least_squares import non_negative, robust


def test_the_optimum_satisfies_its_conditions() -> None:
    """Karush-Kuhn-Tucker: no gradient where x > 0, and where x = 0 none that a larger x would follow down."""
    rng = np.random.default_rng(0)
    num_bound = 0
    for _ in range(50):
        features, weights = rng.normal(size=(40, 5)), rng.uniform(0.1, 3, 40)
        values = features @ rng.normal(size=5) + rng.normal(size=40)
        x = non_negative(features, values, weights)
        gradient = features.T @ (weights * (features @ x - values))
        assert (x >= 0).all()
        assert np.abs(gradient[x > 0]).max(initial=0) < 1e-8
        assert (gradient[x == 0] > -1e-8).all()
        num_bound += int((x == 0).sum())
    assert num_bound > 50


def test_columns_that_say_the_same_or_nothing_do_no_harm() -> None:
    base = np.random.default_rng(1).uniform(1, 9, 30)
    features = np.column_stack([np.ones(30), base, base, np.zeros(30)])
    x = non_negative(features, 2 + 3 * base, np.ones(30))
    assert features @ x == pytest.approx(2 + 3 * base)


def test_a_few_slow_steps_do_not_bend_the_fit() -> None:
    rng = np.random.default_rng(2)
    features = np.column_stack([np.ones(400), rng.uniform(1, 500, 400)])
    values = features @ [0.02, 1e-4] * rng.normal(1, 0.02, 400)
    values[::40] *= 20  # a garbage collection, a neighbour
    assert robust(features, values) == pytest.approx([0.02, 1e-4], rel=0.02)
    assert non_negative(features, values, np.ones(400)) != pytest.approx([0.02, 1e-4], rel=0.1)


def test_exact_values_are_met() -> None:
    features = np.column_stack([np.ones(30), np.arange(30.0)])
    assert robust(features, features @ [1.0, 2.0]) == pytest.approx([1, 2])
