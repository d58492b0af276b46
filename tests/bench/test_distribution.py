"""Percentiles and moments beside numpy's."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.bench.distribution import Distribution, parse_percentiles, percent_name
from jaxllm.errors import ConfigError

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60)
PERCENTILES = (0.0, 1.0, 25.0, 50.0, 90.0, 99.0, 99.9, 100.0)


@given(VALUES)
def test_figures_are_numpys(values: list[float]) -> None:
    found = Distribution.of(values, PERCENTILES)
    assert found.count == len(values)
    ours = [found.mean, found.median, found.std, found.smallest, found.largest]
    theirs = [np.mean(values), np.median(values), np.std(values), np.min(values), np.max(values)]
    np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-6)
    assert [percent for percent, _ in found.percentiles] == list(PERCENTILES)
    np.testing.assert_allclose(
        [value for _, value in found.percentiles], np.percentile(values, PERCENTILES), rtol=1e-9, atol=1e-6
    )


def test_without_values_all_is_zero() -> None:
    found = Distribution.of([], (50,))
    assert (found.count, found.mean, found.median, found.std, found.percentiles) == (0, 0, 0, 0, ((50, 0),))


def test_another_unit_scales_every_figure() -> None:
    seconds = Distribution.of([0.001, 0.002, 0.006], (50, 90))
    scaled, expected = seconds.scaled(1e3).as_dict(), Distribution.of([1, 2, 6], (50, 90)).as_dict()
    assert scaled.pop("percentiles") == pytest.approx(expected.pop("percentiles"))
    assert scaled == pytest.approx(expected)


def test_percentiles_are_read_between_commas() -> None:
    assert parse_percentiles("50, 99,99.9") == (50, 99, 99.9)
    assert [percent_name(p) for p in (50.0, 99.9)] == ["50", "99.9"]
    for text in ("", "x", "101", "-1", "50,,60", "nan"):
        with pytest.raises(ConfigError, match="accepted: numbers from 0 to 100"):
            parse_percentiles(text)


def test_std_of_equal_values_is_no_rounding_error() -> None:
    assert math.isclose(Distribution.of([0.1] * 7).std, 0.0, abs_tol=1e-15)
