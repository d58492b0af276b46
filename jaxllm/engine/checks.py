"""Whether sampling parameters mean something for this model: vocabulary, counts, declared processors."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, cast

from jaxllm.errors import RequestError, shown
from jaxllm.types.sampling import MAX_FORBIDDEN, SamplingParams

_MAX_FLOAT32 = 3.4028234e38


def check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Raises: RequestError: a token id is not one of the model's; the message names it."""
    for name in ("stop_token_ids", "logprob_token_ids", "allowed_token_ids", "logit_bias"):
        ids: Collection[int] | None = getattr(params, name)
        if ids and max(ids) >= vocab_size:
            wrong = next(token_id for token_id in ids if token_id >= vocab_size)
            raise RequestError(
                f"{name} holds {shown(wrong)}, which is not in the vocabulary; "
                f"accepted: integers from 0 to {vocab_size - 1}",
                param=name,
            )


def check_held_back(params: SamplingParams, eos_ids: frozenset[int]) -> None:
    """Raises: RequestError: min_tokens holds back more ids than a device row has room for."""
    forbidden = eos_ids.union(params.stop_token_ids)
    if params.min_tokens and len(forbidden) > MAX_FORBIDDEN:
        raise RequestError(
            f"min_tokens={params.min_tokens} has to hold back {len(forbidden)} stop and end-of-sequence ids; "
            f"accepted: at most {MAX_FORBIDDEN} such ids",
            param="min_tokens",
        )


def check_allowed(params: SamplingParams, eos_ids: frozenset[int], bad_words: Iterable[tuple[int, ...]]) -> None:
    """Raises: RequestError: other parameters forbid every one of allowed_token_ids."""
    if params.allowed_token_ids is None:
        return
    forbidden = {ids[0] for ids in bad_words if len(ids) == 1}
    if params.min_tokens:
        forbidden |= eos_ids.union(params.stop_token_ids)
    if forbidden.issuperset(params.allowed_token_ids):
        raise RequestError(
            "allowed_token_ids leaves no token that bad_words, and min_tokens with its stop and end-of-sequence ids, "
            "do not forbid; accepted: at least one such token",
            param="allowed_token_ids",
        )


def check_num_logprobs(params: SamplingParams, max_logprobs: int) -> None:
    """Raises: RequestError: more log probabilities than the engine was started for; -1 in `max_logprobs`: any."""
    if max_logprobs == -1:
        return
    for name in ("logprobs", "prompt_logprobs"):
        value: int | None = getattr(params, name)
        if value is None or (name == "logprobs" and params.logprob_token_ids is not None):
            continue  # with token ids of its own, `logprobs` is their number
        if not 0 <= value <= max_logprobs:
            accepted = f"0 to max_logprobs={max_logprobs}, a setting of the engine"
            raise RequestError(f"{name}={shown(value)} is out of range; accepted: {accepted}", param=name)


def check_num_sequences(params: SamplingParams) -> None:
    """Raises: RequestError: several sequences of no tokens."""
    if params.max_tokens == 0 and params.n > 1:
        raise RequestError(
            f"n={params.n} with max_tokens=0; accepted: n=1, as the prompt is scored once and nothing is sampled",
            param="n",
        )


def check_extra_args(params: SamplingParams, processor_names: Collection[str]) -> None:
    """Raises: RequestError: an argument names no declared logits processor, or is no finite float32."""
    given: Any = params.extra_args
    if given is None:
        return
    if not isinstance(given, Mapping):
        accepted = "an object of logits processors' names and numbers"
        raise RequestError(f"extra_args={shown(given)}; accepted: {accepted}", param="extra_args")
    for name, value in cast("Mapping[Any, Any]", given).items():
        if name not in processor_names:
            known = ", ".join(processor_names) or "none: no logits processor was declared at start"
            raise RequestError(f"extra_args names {shown(name)}; accepted: {known}", param="extra_args")
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not abs(value) <= _MAX_FLOAT32:  # NaN compares false too
            message = f"extra_args[{name!r}]={shown(value)}; accepted: a finite number"
            raise RequestError(message, param="extra_args")
