"""Pure functions from logits [N, V] float32 to logits: what a row must not sample becomes -inf.

A row for which a transform is off comes back bit for bit, whatever the other rows ask for.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxllm.types.sampling import GREEDY_BELOW

_KEY_BITS = 32
_WORD_BITS = 32


def forbid(logits: jax.Array, token_ids: jax.Array, is_active: jax.Array) -> jax.Array:
    """Remove token_ids [N, M] int32 (negative: none) from the rows where is_active [N]."""
    columns = _columns(logits, token_ids, is_active)
    return logits.at[_row_indices(logits), columns].set(-jnp.inf, mode="drop")


def bias(logits: jax.Array, token_ids: jax.Array, values: jax.Array, is_active: jax.Array) -> jax.Array:
    """Add values [N, M] float32 to the logits of token_ids [N, M] int32 (negative: none), all different in a row.

    What is -inf stays so: the values are finite.
    """
    columns = _columns(logits, token_ids, is_active)
    return logits.at[_row_indices(logits), columns].add(values, mode="drop")


def _columns(logits: jax.Array, token_ids: jax.Array, is_active: jax.Array) -> jax.Array:
    # A negative index would wrap to the end of the row; V is past it, and dropped.
    return jnp.where(is_active[:, None] & (token_ids >= 0), token_ids, logits.shape[1])


def _row_indices(logits: jax.Array) -> jax.Array:
    return jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]


def allow(logits: jax.Array, words: jax.Array, is_active: jax.Array) -> jax.Array:
    """Remove what words [N, ceil(V / 32)] uint32 do not allow: bit v % 32 of word v // 32 is token v."""
    num_rows, vocab_size = logits.shape
    bits = words[:, :, None] >> jnp.arange(_WORD_BITS, dtype=jnp.uint32) & 1
    is_allowed = bits.reshape(num_rows, -1)[:, :vocab_size] == 1
    num_missing = vocab_size - is_allowed.shape[1]  # columns of padding, past the vocabulary
    is_allowed = jnp.pad(is_allowed, ((0, 0), (0, num_missing)))
    return jnp.where(is_active[:, None] & ~is_allowed, -jnp.inf, logits)


def penalise(
    logits: jax.Array,
    output_counts: jax.Array,
    is_seen: jax.Array,
    penalties: tuple[jax.Array, jax.Array, jax.Array],
    is_active: jax.Array,
) -> jax.Array:
    """Make tokens that occurred less likely.

    Args:
        output_counts: [N, V] int32, how often each token is in the output.
        is_seen: [N, V] bool, whether it is in the prompt or the output.
        penalties: presence, frequency and repetition, [N] float32 each. Repetition divides what is
            positive and multiplies what is not; the other two are subtracted, once and per occurrence.
    """
    presence, frequency, repetition = (p[:, None] for p in penalties)
    repeated = jnp.where(logits > 0.0, logits / repetition, logits * repetition)
    changed = jnp.where(is_seen, repeated, logits)
    changed = changed - frequency * output_counts.astype(jnp.float32)
    changed = changed - presence * (output_counts > 0).astype(jnp.float32)
    return jnp.where(is_active[:, None], changed, logits)


def centre(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(logits less their highest, the highest [N, 1]); a row of -inf stays one."""
    highest = jnp.max(logits, axis=-1, keepdims=True)
    highest = jnp.where(highest == -jnp.inf, 0.0, highest)
    return logits - highest, highest


def temperature(logits: jax.Array, temperatures: jax.Array) -> jax.Array:
    """Divide by temperatures [N]; those that mean greedy count as GREEDY_BELOW, so nothing overflows.

    The highest logit of a row becomes 0: the distribution is the same and no quotient is large.
    """
    return centre(logits)[0] / jnp.maximum(temperatures, GREEDY_BELOW)[:, None]


def min_p(logits: jax.Array, p: jax.Array) -> jax.Array:
    """Keep the tokens at least p [N] times as likely as the most likely one. 0: off."""
    is_kept = centre(logits)[0] >= jnp.log(p)[:, None]
    return jnp.where(is_kept | ~is_min_p_on(p)[:, None], logits, -jnp.inf)


def is_min_p_on(p: jax.Array) -> jax.Array:
    return p > 0.0


def top_k(logits: jax.Array, k: jax.Array) -> jax.Array:
    """Keep the k [N] highest of each row; of equal ones, those of lowest id. Below 1 or at least V: off."""
    is_on = is_top_k_on(k, logits.shape[-1])
    num_kept = jnp.where(is_on, k, 1).astype(jnp.float32)
    return _keep_highest(logits, jnp.ones_like(logits), num_kept, is_on)


def is_top_k_on(k: jax.Array, vocab_size: int) -> jax.Array:
    return (k >= 1) & (k < vocab_size)


def top_p(logits: jax.Array, p: jax.Array) -> jax.Array:
    """Keep the smallest set of most likely tokens whose probability reaches p [N] (Holtzman et al., 2020).

    The token that crosses p is kept; of equal ones, those of lowest id. At least 1: off.
    """
    weights = jnp.exp(centre(logits)[0])
    return _keep_highest(logits, weights, p * _row_sum(weights), is_top_p_on(p))


def is_top_p_on(p: jax.Array) -> jax.Array:
    return p < 1.0


def _row_sum(x: jax.Array) -> jax.Array:
    return jnp.sum(x, axis=-1)


def _keep_highest(logits: jax.Array, weights: jax.Array, enough: jax.Array, is_active: jax.Array) -> jax.Array:
    """Keep the fewest of the highest logits whose weights sum to `enough` [N]; equal logits have equal weights.

    The threshold is built bit by bit, from the top, over the order-preserving bits of the logits:
    32 passes that only add, where a sort of the vocabulary is slow on every accelerator.
    """
    keys = _ordered_bits(logits)

    def add_bit(index: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        threshold, above = state
        candidate = threshold | (jnp.uint32(1) << (_KEY_BITS - 1 - index).astype(jnp.uint32))
        reached = _row_sum(jnp.where(keys >= candidate[:, None], weights, 0.0))
        return jnp.where(reached >= enough, candidate, threshold), jnp.where(reached >= enough, above, reached)

    nothing = jnp.zeros(logits.shape[0], jnp.uint32)
    # The last candidate that did not reach is threshold + 1, whatever the bits: `above` is the sum past the threshold.
    state = (nothing, nothing.astype(jnp.float32))
    threshold, above = lax.fori_loop(jnp.int32(0), jnp.int32(_KEY_BITS), add_bit, state)
    is_tied = keys == threshold[:, None]
    is_kept = (keys > threshold[:, None]) | _lowest_ids(is_tied, weights, enough - above, is_active)
    return jnp.where(is_kept | ~is_active[:, None], logits, -jnp.inf)


def _lowest_ids(is_tied: jax.Array, weights: jax.Array, enough: jax.Array, is_active: jax.Array) -> jax.Array:
    """[N, V] bool: the fewest of the first columns where is_tied whose weights sum to `enough` [N]; all, if none do."""
    num_rows, vocab_size = is_tied.shape
    ids = lax.broadcasted_iota(jnp.int32, is_tied.shape, 1)

    def halve(_: jax.Array, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds  # too little lies below `low`, enough below `high`
        middle = (low + high) // 2
        is_enough = _row_sum(jnp.where(is_tied & (ids < middle[:, None]), weights, 0.0)) >= enough
        return jnp.where(is_enough, low, middle), jnp.where(is_enough, middle, high)

    # Counted as floats, which are exact up to 2 ** 24: CPUs have a fast sum for those.
    num_tied = _row_sum(is_tied.astype(jnp.float32))
    num_halvings = jnp.where(jnp.any(is_active & (num_tied > 1.0)), vocab_size.bit_length(), 0).astype(jnp.int32)
    bounds = (jnp.zeros(num_rows, jnp.int32), jnp.full(num_rows, vocab_size, jnp.int32))
    _, high = lax.fori_loop(jnp.int32(0), num_halvings, halve, bounds)
    return is_tied & (ids < high[:, None])


def _ordered_bits(x: jax.Array) -> jax.Array:
    """float32 -> uint32 that compare in the same order; both zeros give the same bits."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0.0, 0.0, x), jnp.uint32)
    is_negative = bits >> 31 == 1
    return jnp.where(is_negative, ~bits, bits | jnp.uint32(1 << 31))
