"""Batches for the sampler, built as the runner builds them, and NumPy references to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxllm.sampling.sampler import sample
from jaxllm.sampling.state import pack_row, set_step, unpack
from jaxllm.types.sampling import SamplingParams
from jaxllm.types.step import Int32Array

_PADDED_SIZES = (8, 512, 20_480)  # few shapes, so that few programs are compiled


@partial(jax.jit, static_argnames=("greedy", "vocab_size"))
def _sample(logits: jax.Array, packed: jax.Array, *, greedy: bool, vocab_size: int | None) -> jax.Array:
    return sample(logits, unpack(packed), greedy=greedy, vocab_size=vocab_size)


def rows_of(
    params: Sequence[SamplingParams],
    *,
    seeds: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
    eos_ids: tuple[int, ...] = (),
    num_prompt_tokens: int = 0,
) -> Int32Array:
    """Packed rows, one for each of `params`, with slots 0, 1, …"""
    seeds = range(len(params)) if seeds is None else seeds
    packed = np.stack([pack_row(p, seed, num_prompt_tokens, eos_ids) for p, seed in zip(params, seeds, strict=True)])
    places = np.zeros(len(params), np.int32) if positions is None else np.asarray(positions, np.int32)
    set_step(packed, places, np.arange(len(params), dtype=np.int32))
    return packed


def draw(
    logits: np.ndarray, packed: Int32Array, *, greedy: bool = False, vocab_size: int | None = None, padded: bool = True
) -> np.ndarray:
    """Token ids of logits [N, V]; `padded` False keeps the program at N rows exactly."""
    num_rows = len(packed)
    size = next(n for n in _PADDED_SIZES if n >= num_rows) if padded else num_rows
    logits, packed = (np.pad(a, ((0, size - num_rows), (0, 0))) for a in (logits, packed))
    return np.asarray(_sample(logits, packed, greedy=greedy, vocab_size=vocab_size))[:num_rows]


def draw_many(logits: np.ndarray, params: SamplingParams, num_draws: int, seed: int = 0) -> np.ndarray:
    """One request's draws at positions 0, 1, …: logits [V] -> ids [num_draws]."""
    rows = rows_of([params] * num_draws, seeds=[seed] * num_draws, positions=range(num_draws))
    return draw(np.broadcast_to(logits, (num_draws, len(logits))), rows)


def kept(filtered: Any) -> np.ndarray:
    return np.isfinite(np.asarray(filtered))


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - logits.max())
    return weights / weights.sum()


def reference_top_k(logits: np.ndarray, k: int) -> np.ndarray:
    """[V] bool by sorting; everything that ties with the k-th stays."""
    if not 1 <= k < len(logits):
        return np.ones(len(logits), bool)
    return logits >= np.sort(logits)[-k]


def reference_top_p(logits: np.ndarray, p: float) -> np.ndarray:
    """[V] bool by sorting, in float64; everything that ties with the crossing token stays."""
    if p >= 1:
        return np.ones(len(logits), bool)
    order = np.argsort(-logits, kind="stable")
    before = np.concatenate([[0.0], np.cumsum(softmax(logits)[order])[:-1]])
    last = order[np.flatnonzero(before < p)[-1]]
    return logits >= logits[last]
