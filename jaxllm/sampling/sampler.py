"""Choose one token a row."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxllm.sampling import transforms
from jaxllm.sampling.noise import exponential
from jaxllm.sampling.state import SamplingRows


def sample(logits: jax.Array, rows: SamplingRows, *, greedy: bool, vocab_size: int | None = None) -> jax.Array:
    """logits [N, V] float32 -> token ids [N] int32.

    What a row draws depends on its logits, its parameters, its seed and the position of the token,
    and on nothing else: not on its place in the batch, its slot, its neighbours or the padding.

    Args:
        greedy: static. Every row is greedy, so nothing is drawn; equal logits go to the lowest id.
        vocab_size: static. Columns from here on are padding and are never chosen; None: there are none.
    """
    if vocab_size is not None and vocab_size < logits.shape[1]:
        logits = logits.at[:, vocab_size:].set(-jnp.inf)
    holds_back = rows.positions < rows.min_positions
    logits = _where_needed(holds_back, lambda x: transforms.forbid(x, rows.forbidden, holds_back), logits)
    best = _highest(logits)
    if greedy:
        return best
    return jnp.where(rows.is_greedy, best, _draw(logits, rows))


def _draw(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    """One token a row from the filtered distribution.

    Each token runs a race with an exponential clock at the rate of its probability; the first wins.
    That is the Gumbel-max trick with one logarithm less a token.
    """
    logits = transforms.temperature(logits, rows.temperature)
    cuts_k = ~rows.is_greedy & transforms.is_top_k_on(rows.top_k, logits.shape[1])
    logits = _where_needed(cuts_k, lambda x: transforms.top_k(x, rows.top_k), logits)
    cuts_p = ~rows.is_greedy & transforms.is_top_p_on(rows.top_p)
    logits = _where_needed(cuts_p, lambda x: transforms.top_p(x, rows.top_p), logits)
    return _highest(jnp.exp(logits) / exponential(rows.seeds, rows.positions, logits.shape[1]))


def _where_needed(is_needed: jax.Array, transform: Callable[[jax.Array], jax.Array], logits: jax.Array) -> jax.Array:
    """Apply a transform if any row is_needed [N]: most steps have none, and pay for none."""
    return lax.cond(jnp.any(is_needed), transform, lambda x: x, logits)


def _highest(logits: jax.Array) -> jax.Array:
    return lax.argmax(logits, 1, jnp.int32)
