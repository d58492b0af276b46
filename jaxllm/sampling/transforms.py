"""Pure functions from logits [N, V] float32 to logits: what a row must not sample becomes -inf.

A row for which a transform is off comes back bit for bit, whatever the other rows ask for.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxllm.types.sampling import GREEDY_BELOW

_KEY_BITS = 32


def forbid(logits: jax.Array, token_ids: jax.Array, is_active: jax.Array) -> jax.Array:
    """Remove token_ids [N, M] int32 (negative: none) from the rows where is_active [N]."""
    num_rows, vocab_size = logits.shape
    # A negative index would wrap to the end of the row; V is past it, and dropped.
    columns = jnp.where(is_active[:, None] & (token_ids >= 0), token_ids, vocab_size)
    return logits.at[jnp.arange(num_rows)[:, None], columns].set(-jnp.inf, mode="drop")


def temperature(logits: jax.Array, temperatures: jax.Array) -> jax.Array:
    """Divide by temperatures [N]; those that mean greedy count as GREEDY_BELOW, so nothing overflows.

    The highest logit of a row becomes 0: the distribution is the same and no quotient is large.
    """
    centred = logits - jnp.max(logits, axis=-1, keepdims=True)
    return centred / jnp.maximum(temperatures, GREEDY_BELOW)[:, None]


def top_k(logits: jax.Array, k: jax.Array) -> jax.Array:
    """Keep the k [N] highest of each row, and all that tie with the last of them. Below 1 or at least V: off."""
    vocab_size = logits.shape[-1]
    num_kept = jnp.where(is_top_k_on(k, vocab_size), k, vocab_size).astype(jnp.float32)
    return _keep_highest(logits, jnp.ones_like(logits), num_kept)


def is_top_k_on(k: jax.Array, vocab_size: int) -> jax.Array:
    return (k >= 1) & (k < vocab_size)


def top_p(logits: jax.Array, p: jax.Array) -> jax.Array:
    """Keep the smallest set of most likely tokens whose probability reaches p [N] (Holtzman et al., 2020).

    The token that crosses p is kept, and all that tie with it. At least 1: off.
    """
    weights = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
    kept = _keep_highest(logits, weights, p * jnp.sum(weights, axis=-1))
    return jnp.where(is_top_p_on(p)[:, None], kept, logits)


def is_top_p_on(p: jax.Array) -> jax.Array:
    return p < 1.0


def _keep_highest(logits: jax.Array, weights: jax.Array, enough: jax.Array) -> jax.Array:
    """Keep the logits at or above the highest threshold where their weights sum to `enough` [N].

    The threshold is built bit by bit, from the top, over the order-preserving bits of the logits:
    32 passes that only add, where a sort of the vocabulary is slow on every accelerator.
    """
    keys = _ordered_bits(logits)

    def add_bit(index: jax.Array, threshold: jax.Array) -> jax.Array:
        candidate = threshold | (jnp.uint32(1) << (_KEY_BITS - 1 - index).astype(jnp.uint32))
        reached = jnp.sum(jnp.where(keys >= candidate[:, None], weights, 0.0), axis=-1)
        return jnp.where(reached >= enough, candidate, threshold)

    threshold = lax.fori_loop(jnp.int32(0), jnp.int32(_KEY_BITS), add_bit, jnp.zeros(logits.shape[0], jnp.uint32))
    return jnp.where(keys >= threshold[:, None], logits, -jnp.inf)


def _ordered_bits(x: jax.Array) -> jax.Array:
    """float32 -> uint32 that compare in the same order; both zeros give the same bits."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0.0, 0.0, x), jnp.uint32)
    is_negative = bits >> 31 == 1
    return jnp.where(is_negative, ~bits, bits | jnp.uint32(1 << 31))
