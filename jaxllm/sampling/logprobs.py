"""Log probabilities of chosen, top and asked-for tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxllm.config.engine import LogprobsMode


@dataclass(frozen=True, slots=True)
class LogprobsSpec:
    """What a program gives beside tokens. Static: part of the program."""

    num_top: int  # K, at most V
    mode: LogprobsMode = "raw_logprobs"

    @property
    def is_raw(self) -> bool:
        """Of the model's own logits, before anything changes them."""
        return self.mode in ("raw_logprobs", "raw_logits")

    @property
    def is_normalised(self) -> bool:
        """Logarithms of probabilities rather than logits."""
        return self.mode in ("raw_logprobs", "processed_logprobs")


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["values", "ranks", "top_ids", "top_values", "chosen_values"],
    meta_fields=[],
)
@dataclass(frozen=True, slots=True)
class DeviceLogprobs:
    """On the device, of N rows. A token that cannot be sampled has -inf; nothing is NaN."""

    values: jax.Array  # [N] float32, of the token
    ranks: jax.Array  # [N] int32, 1 + number of tokens more likely than it
    top_ids: jax.Array  # [N, K] int32, most likely first; equal ones by id
    top_values: jax.Array  # [N, K] float32
    chosen_values: jax.Array  # [N, C] float32, of the chosen ids; -inf where the id is negative


def logprobs_of(
    logits: jax.Array,
    tokens: jax.Array,
    spec: LogprobsSpec,
    chosen_ids: jax.Array,
    *,
    vocab_size: int | None = None,
) -> DeviceLogprobs:
    """logits [N, V] float32, tokens [N] int32, chosen_ids [N, C] int32 (negative: none).

    Args:
        vocab_size: static. Columns from here on are padding and do not count; None: there are none.
    """
    logits = logits[:, :vocab_size]
    offset = _log_normaliser(logits) if spec.is_normalised else jnp.zeros_like(logits[:, :1])
    token_logits = jnp.take_along_axis(logits, tokens[:, None], axis=1, mode="clip")
    # Some backends order -0.0 below 0.0; here they are equal, as everywhere else.
    top_logits, top_ids = lax.top_k(jnp.where(logits == 0.0, 0.0, logits), spec.num_top)
    chosen = jnp.take_along_axis(logits, jnp.maximum(chosen_ids, 0), axis=1, mode="clip")
    return DeviceLogprobs(
        values=(token_logits - offset)[:, 0],
        ranks=1 + jnp.sum(logits > token_logits, axis=1, dtype=jnp.int32),
        top_ids=top_ids,
        top_values=top_logits - offset,
        chosen_values=jnp.where(chosen_ids >= 0, chosen - offset, -jnp.inf),
    )


def _log_normaliser(logits: jax.Array) -> jax.Array:
    """[N, 1]: what to subtract from logits for log probabilities; finite, also for a row of -inf."""
    highest = jnp.max(logits, axis=1, keepdims=True)
    highest = jnp.where(jnp.isfinite(highest), highest, 0.0)
    total = jnp.sum(jnp.exp(logits - highest), axis=1, keepdims=True)
    return highest + jnp.log(jnp.where(total > 0.0, total, 1.0))
