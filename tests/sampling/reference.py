"""What a sampler must do to one row of logits, in plain NumPy and float64, with sorts and loops."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxllm.types.sampling import SamplingParams

Processors = Mapping[str, Callable[[np.ndarray, float], np.ndarray]]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One request about to get its next token: `tokens` are all before it, the prompt first."""

    logits: np.ndarray  # [V] float32
    params: SamplingParams
    tokens: tuple[int, ...] = ()
    num_prompt_tokens: int = 0
    seed: int = 0
    eos_ids: tuple[int, ...] = ()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()

    @property
    def output(self) -> tuple[int, ...]:
        return self.tokens[self.num_prompt_tokens :]


def shaped(row: Row, processors: Processors | None = None) -> np.ndarray:
    """[V] float64: masks, bias, processors, penalties."""
    logits, params = row.logits.astype(np.float64), row.params
    if params.allowed_token_ids is not None:
        logits[[i for i in range(len(logits)) if i not in params.allowed_token_ids]] = -np.inf
    for ids in row.bad_word_ids:
        *beginning, last = ids
        if not beginning or list(row.output[-len(beginning) :]) == beginning:
            logits[last] = -np.inf
    if len(row.output) < params.min_tokens:
        logits[[*row.eos_ids, *params.stop_token_ids]] = -np.inf
    for token, value in (params.logit_bias or {}).items():
        logits[token] += value
    arguments = params.extra_args or {}
    for name, apply in (processors or {}).items():
        if name in arguments:
            logits = np.where(logits == -np.inf, -np.inf, apply(np.maximum(logits, -1e30), arguments[name]))
    for token in set(row.tokens):
        factor = params.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    for token in set(row.output):
        logits[token] -= params.frequency_penalty * row.output.count(token) + params.presence_penalty
    return logits


def filtered(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """[V] float64 after temperature, min-p, top-k and top-p; of a greedy request as they were."""
    if params.is_greedy:
        return logits
    logits = logits / params.temperature
    probabilities = softmax(logits)
    logits = np.where(probabilities >= params.min_p * probabilities.max(), logits, -np.inf)
    logits = np.where(top_k(logits, params.top_k), logits, -np.inf)
    return np.where(top_p(logits, params.top_p), logits, -np.inf)


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - logits.max())
    return weights / weights.sum()


def log_softmax(logits: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(softmax(logits))


def top_k(logits: np.ndarray, k: int) -> np.ndarray:
    """[V] bool by sorting: the k highest, of equal ones the lowest ids."""
    if not 1 <= k < len(logits):
        return np.ones(len(logits), bool)
    return _first(descending(logits), k)


def top_p(logits: np.ndarray, p: float) -> np.ndarray:
    """[V] bool by sorting: up to the token with which the sum reaches p, of equal ones the lowest ids."""
    if p >= 1:
        return np.ones(len(logits), bool)
    order = descending(logits)
    before = np.concatenate([[0.0], np.cumsum(softmax(logits)[order])[:-1]])
    return _first(order, int(np.flatnonzero(before < p)[-1]) + 1)


def descending(logits: Sequence[float] | np.ndarray) -> np.ndarray:
    return np.argsort(-np.asarray(logits), kind="stable")


def _first(order: np.ndarray, count: int) -> np.ndarray:
    is_kept = np.zeros(len(order), bool)
    is_kept[order[:count]] = True
    return is_kept
