"""Filters against sorts in NumPy: the kept sets must be equal, element by element."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.sampling import transforms
from tests.sampling import reference
from tests.sampling.drawing import kept

VOCAB = 97
top_k = jax.jit(transforms.top_k)
top_p = jax.jit(transforms.top_p)
min_p = jax.jit(transforms.min_p)


def random_logits(num_rows: int, seed: int = 0, *, ties: bool = False) -> np.ndarray:
    logits = np.random.default_rng(seed).normal(size=(num_rows, VOCAB)).astype(np.float32) * 4
    return np.round(logits) if ties else logits


def assert_rows_equal(result: jax.Array, logits: np.ndarray, expected: list[np.ndarray]) -> None:
    """The kept sets are the expected ones, and what is kept is as it was."""
    np.testing.assert_array_equal(kept(result), expected)
    np.testing.assert_array_equal(np.asarray(result)[kept(result)], logits[kept(result)])


@pytest.mark.parametrize("ties", [False, True])
def test_top_k_keeps_what_a_sort_keeps(ties: bool) -> None:
    k = np.array([1, 2, 3, 10, 50, VOCAB - 1, VOCAB, VOCAB + 1, 0, -1], np.int32)
    logits = random_logits(len(k), ties=ties)
    expected = [reference.top_k(row, n) for row, n in zip(logits, k, strict=True)]
    assert_rows_equal(top_k(logits, k), logits, expected)


@pytest.mark.parametrize("ties", [False, True])
def test_top_p_keeps_the_smallest_set_that_reaches_p(ties: bool) -> None:
    p = np.array([1e-6, 0.01, 0.1, 0.35, 0.5, 0.77, 0.9, 0.99, 0.9999, 1.0], np.float32)
    logits = random_logits(len(p), seed=1, ties=ties)
    expected = [reference.top_p(row, q) for row, q in zip(logits, p, strict=True)]
    assert_rows_equal(top_p(logits, p), logits, expected)


@pytest.mark.parametrize("ties", [False, True])
def test_min_p_keeps_what_is_likely_enough(ties: bool) -> None:
    p = np.array([1e-6, 0.01, 0.1, 0.3, 0.5, 0.9, 1.0, 0.0], np.float32)
    logits = random_logits(len(p), seed=2, ties=ties)
    probabilities = np.array([reference.softmax(row) for row in logits])
    expected = probabilities >= p[:, None] * probabilities.max(axis=1, keepdims=True)
    assert_rows_equal(min_p(logits, p), logits, list(expected))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=12, max_size=12), st.integers(1, 12))
def test_threshold_search_equals_sort_on_any_floats(values: list[float], k: int) -> None:
    """Zeros of both signs, subnormals, infinities and repeats among them."""
    logits = np.array(values, np.float32)
    expected = np.isfinite(logits) & reference.top_k(_flushed(logits), k)
    result = np.asarray(top_k(jnp.asarray(logits)[None], jnp.array([k], jnp.int32)))[0]
    np.testing.assert_array_equal(np.isfinite(result), expected)


def _flushed(logits: np.ndarray) -> np.ndarray:
    """Subnormals as zeros: that is what the hardware compares."""
    return np.where(np.abs(logits) < np.finfo(np.float32).tiny, np.float32(0), logits)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([-np.inf, -3.0, 0.0, 1.5, 4.0]), min_size=9, max_size=9), st.floats(0.01, 0.999))
def test_top_p_among_many_equals_keeps_the_lowest_ids(values: list[float], p: float) -> None:
    values[4] = 1.5  # one at least is finite
    logits = np.array(values, np.float32)
    rounded = float(np.float32(p))
    result = np.asarray(top_p(logits[None], np.array([rounded], np.float32)))[0]
    before = np.concatenate([[0.0], np.cumsum(reference.softmax(logits)[reference.descending(logits)])])
    if np.abs(before - rounded).min() > 1e-6:  # else rounding decides
        np.testing.assert_array_equal(kept(result), reference.top_p(logits, rounded) & kept(logits))


def test_of_equal_logits_the_lowest_ids_are_kept() -> None:
    logits = np.zeros((4, VOCAB), np.float32)
    logits[:, 60] = 1.0
    by_k = kept(top_k(logits, np.array([1, 2, 5, VOCAB], np.int32)))
    assert [np.flatnonzero(row).tolist() for row in by_k[:3]] == [[60], [0, 60], [0, 1, 2, 3, 60]]
    assert by_k[3].all()
    by_p = kept(top_p(np.zeros((3, 8), np.float32), np.array([0.125, 0.5, 0.51], np.float32)))
    assert [np.flatnonzero(row).tolist() for row in by_p] == [[0], [0, 1, 2, 3], [0, 1, 2, 3, 4]]


def test_the_token_that_crosses_p_is_kept_and_the_next_is_not() -> None:
    logits = np.log(np.array([[0.5, 0.3, 0.15, 0.05]], np.float32)).repeat(4, axis=0)
    p = jnp.array([0.49, 0.51, 0.79, 0.81], jnp.float32)
    assert kept(top_p(jnp.asarray(logits), p)).sum(axis=1).tolist() == [1, 2, 2, 3]


def test_top_p_counts_what_top_k_left() -> None:
    """Of 0.4, 0.3, 0.2, 0.1 the two highest hold 0.57 and 0.43: p = 0.5 then needs only the first."""
    logits = jnp.log(jnp.array([[0.4, 0.3, 0.2, 0.1]], jnp.float32))
    p = jnp.array([0.5], jnp.float32)
    assert kept(top_p(logits, p)).tolist() == [[True, True, False, False]]
    assert kept(top_p(top_k(logits, jnp.array([2], jnp.int32)), p)).tolist() == [[True, False, False, False]]


def test_rows_where_a_filter_is_off_come_back_bit_for_bit() -> None:
    logits = random_logits(2, seed=2)
    logits[:, :3] = [-0.0, 1e-30, -np.inf]
    off_k = top_k(jnp.asarray(logits), jnp.array([0, 5], jnp.int32))
    off_p = top_p(jnp.asarray(logits), jnp.array([1.0, 0.5], jnp.float32))
    off_min = min_p(jnp.asarray(logits), jnp.array([0.0, 0.5], jnp.float32))
    for result in (off_k, off_p, off_min):
        np.testing.assert_array_equal(np.asarray(result)[0].view(np.int32), logits[0].view(np.int32))


@pytest.mark.parametrize("value", [0.0, 1e-9, 1e-6, 0.009999])
def test_tiny_temperatures_do_not_overflow(value: float) -> None:
    logits = jnp.array([[1e30, 3e30, -1e30]], jnp.float32)
    result = np.asarray(transforms.temperature(logits, jnp.array([value], jnp.float32)))
    assert not np.isnan(result).any()
    assert result.argmax() == 1 and result.max() == 0.0


def test_temperature_keeps_the_ratios_of_logits() -> None:
    logits = random_logits(3, seed=3)
    temperatures = np.array([0.5, 1.0, 2.0], np.float32)
    result = np.asarray(transforms.temperature(jnp.asarray(logits), jnp.asarray(temperatures)))
    expected = (logits - logits.max(axis=1, keepdims=True)) / temperatures[:, None]
    np.testing.assert_allclose(result, expected, rtol=1e-6)


def test_forbid_removes_the_named_ids_of_active_rows_only() -> None:
    logits = random_logits(3, seed=4)
    ids = np.array([[0, 5, -1], [VOCAB - 1, -1, -1], [1, 2, 3]], np.int32)
    result = np.asarray(transforms.forbid(jnp.asarray(logits), jnp.asarray(ids), jnp.array([True, True, False])))
    expected = logits.copy()
    expected[0, [0, 5]] = expected[1, VOCAB - 1] = -np.inf
    np.testing.assert_array_equal(result, expected)


def test_bias_adds_to_the_named_ids_of_active_rows_only() -> None:
    logits = random_logits(3, seed=5)
    logits[0, 5] = -np.inf
    ids = np.array([[0, 5, -1], [VOCAB - 1, -1, -1], [1, 2, 3]], np.int32)
    values = np.array([[1.0, 100.0, 7.0], [-3.0, 7.0, 7.0], [7.0, 7.0, 7.0]], np.float32)
    result = np.asarray(
        transforms.bias(jnp.asarray(logits), jnp.asarray(ids), jnp.asarray(values), jnp.array([True, True, False]))
    )
    expected = logits.copy()
    expected[0, 0] += 1.0
    expected[1, VOCAB - 1] -= 3.0
    np.testing.assert_array_equal(result, expected)


def test_padding_past_the_words_is_not_allowed() -> None:
    words = jnp.full((2, 1), 0b1010, jnp.uint32)
    result = transforms.allow(jnp.zeros((2, 40)), words, jnp.array([True, False]))
    assert np.flatnonzero(kept(result)[0]).tolist() == [1, 3]
    assert kept(result)[1].all()
