"""The random numbers against jax's own generator, and their distribution."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry_2x32
from scipy import stats

from jaxllm.sampling.noise import exponential, threefry

exponential_jit = jax.jit(exponential, static_argnums=2)


def test_threefry_equals_the_generator_of_jax() -> None:
    key, counter = np.random.default_rng(0).integers(0, 2**32, (2, 2, 50), dtype=np.uint32)
    for column in range(3):
        seeds = jnp.asarray(key[:, column])
        ours = threefry((seeds[0], seeds[1]), (jnp.asarray(counter[0]), jnp.asarray(counter[1])))
        theirs = threefry_2x32(seeds, jnp.asarray(counter.reshape(-1)))
        np.testing.assert_array_equal(np.concatenate(ours), theirs)


def test_variates_are_exponential_positive_and_finite() -> None:
    seeds = jnp.tile(jnp.array([[7, 9]], jnp.uint32), (50, 1))
    values = np.asarray(exponential_jit(seeds, jnp.arange(50, dtype=jnp.int32), 4001))
    assert values.shape == (50, 4001)
    assert (values > 0).all() and np.isfinite(values).all()
    assert stats.kstest(values.reshape(-1), "expon").pvalue > 1e-3


def test_small_variates_are_resolved_finely() -> None:
    """The smallest wins the draw: were they multiples of 2^-24, rare tokens would tie."""
    seeds = jnp.tile(jnp.array([[1, 2]], jnp.uint32), (64, 1))
    values = np.asarray(exponential_jit(seeds, jnp.arange(64, dtype=jnp.int32), 50_000)).reshape(-1)
    smallest = np.sort(values)[:2000]
    assert len(np.unique(smallest)) > 1990


def test_neither_seed_nor_position_repeats_another() -> None:
    seeds = jnp.array([[0, 1], [1, 0], [0, 2], [0, 1]], jnp.uint32)
    positions = jnp.array([1, 1, 1, 2], jnp.int32)
    values = np.asarray(exponential_jit(seeds, positions, 200))
    correlation = np.corrcoef(values) - np.eye(4)
    assert np.abs(correlation).max() < 0.3


def test_a_row_is_the_same_bits_in_a_batch_of_any_size() -> None:
    """Vectors run over the rows' ends: their last columns may be computed another way."""
    seeds = np.random.default_rng(0).integers(0, 2**32, (5, 2), dtype=np.uint32)
    positions = np.arange(5, dtype=np.int32)
    together = np.asarray(exponential_jit(seeds, positions, 151))
    for row in range(5):
        alone = np.asarray(exponential_jit(seeds[row : row + 1], positions[row : row + 1], 151))[0]
        np.testing.assert_array_equal(together[row].view(np.int32), alone.view(np.int32))
