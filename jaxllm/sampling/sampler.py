"""Choose one token a row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxllm.sampling import transforms
from jaxllm.sampling.logprobs import DeviceLogprobs, LogprobsSpec, logprobs_of
from jaxllm.sampling.noise import exponential
from jaxllm.sampling.shaping import shape_logits, where_needed
from jaxllm.sampling.state import SamplingRows
from jaxllm.sampling.tables import Tables
from jaxllm.types.processors import LogitsProcessor
from jaxllm.types.sampling import GREEDY_BELOW


def sample(
    logits: jax.Array,
    rows: SamplingRows,
    tables: Tables,
    *,
    greedy: bool,
    vocab_size: int | None = None,
    logprobs: LogprobsSpec | None = None,
    processors: tuple[LogitsProcessor, ...] = (),
) -> tuple[jax.Array, DeviceLogprobs | None]:
    """logits [N, V] float32 -> token ids [N] int32, and what `logprobs` asks for.

    What a row draws depends on its logits, its parameters, its seed, the tokens before it and their
    number, and on nothing else: not on its place in the batch, its slot, its neighbours or the padding.
    A row whose masks leave no token gets token 0.

    Args:
        greedy: static. Every row is greedy, so nothing is drawn; equal logits go to the lowest id.
        vocab_size: static. Columns from here on are padding and are never chosen; None: there are none.
        logprobs: static. None: no log probabilities are computed.
        processors: static. In the order of their names in `pack_row`.

    Raises:
        ConfigError: while tracing; a processor gave something else than logits.
    """
    if vocab_size is not None and vocab_size < logits.shape[1]:
        logits = logits.at[:, vocab_size:].set(-jnp.inf)
    shaped = shape_logits(logits, rows, tables, processors)
    tokens, processed = _highest(shaped), shaped
    if not greedy:
        filtered = _filter(shaped, rows)
        tokens = jnp.where(rows.is_greedy, tokens, _draw(filtered, rows))
        if logprobs is not None and not logprobs.is_raw:
            processed = _processed(shaped, filtered, rows)
    if logprobs is None:
        return tokens, None
    scored = logits if logprobs.is_raw else processed
    return tokens, logprobs_of(scored, tokens, logprobs, tables.logprob_ids[rows.slots], vocab_size=vocab_size)


def _filter(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    """Temperature, min-p, top-k, top-p. The highest logit of each row is 0."""
    logits = transforms.temperature(logits, rows.temperature)
    is_drawn = ~rows.is_greedy
    cuts_min_p = is_drawn & transforms.is_min_p_on(rows.min_p)
    cuts_k = is_drawn & transforms.is_top_k_on(rows.top_k, logits.shape[1])
    cuts_p = is_drawn & transforms.is_top_p_on(rows.top_p)

    def cut(logits: jax.Array) -> jax.Array:
        logits = where_needed(cuts_min_p, lambda x, on: transforms.min_p(x, jnp.where(on, rows.min_p, 0.0)), logits)
        logits = where_needed(cuts_k, lambda x, on: transforms.top_k(x, jnp.where(on, rows.top_k, 0)), logits)
        return where_needed(cuts_p, lambda x, on: transforms.top_p(x, jnp.where(on, rows.top_p, 1.0)), logits)

    return lax.cond(jnp.any(cuts_min_p | cuts_k | cuts_p), cut, lambda x: x, logits)


def _draw(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    """One token a row from the filtered distribution.

    Each token runs a race with an exponential clock at the rate of its probability; the first wins.
    That is the Gumbel-max trick with one logarithm less a token.
    """

    def race() -> jax.Array:
        return jnp.exp(logits) / exponential(rows.seeds, rows.positions, logits.shape[1])

    # Some row is drawn, always. But what a condition gives is an array of its own: fused into the
    # search for the highest, exponentials would be computed one by one on CPUs, 3 times slower.
    return _highest(lax.cond(jnp.all(rows.is_greedy), lambda: logits, race))


def _processed(shaped: jax.Array, filtered: jax.Array, rows: SamplingRows) -> jax.Array:
    """The logits that were sampled from, at their own height; of greedy rows those before temperature."""
    temperatures = jnp.maximum(rows.temperature, GREEDY_BELOW)[:, None]
    at_height = filtered + transforms.centre(shaped)[1] / temperatures
    return jnp.where(rows.is_greedy[:, None], shaped, at_height)


def _highest(logits: jax.Array) -> jax.Array:
    return lax.argmax(logits, 1, jnp.int32)
