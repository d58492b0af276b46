"""From what a caller asks to a request the core can take: tokens checked, limits clamped."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxllm.engine.messages import AddRequest
from jaxllm.errors import RequestError
from jaxllm.tokenizer.base import Tokenizer
from jaxllm.types.sampling import MAX_FORBIDDEN, SamplingParams, check_served, sampling_fields

_log = logging.getLogger("jaxllm.engine")


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text to tokenise. Rendered chat templates bring their special tokens: pass False for them."""

    text: str
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class TokensPrompt:
    """Ids that go to the model as they are; `text` is only repeated in the output."""

    token_ids: Sequence[int]
    text: str | None = None


Prompt = str | TextPrompt | TokensPrompt


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    text: str | None
    token_ids: tuple[int, ...]


class InputProcessor:
    """Turns prompts and parameters into `AddRequest`. `tokenize` may run in any thread."""

    def __init__(
        self, tokenizer: Tokenizer, *, max_model_len: int, vocab_size: int, eos_ids: frozenset[int], seed: int
    ) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._seeds = random.Random(seed)

    def tokenize(self, prompt: Prompt) -> PreparedPrompt:
        """Raises: RequestError: empty, too long, or not ids of this model's vocabulary."""
        if isinstance(prompt, str):
            prompt = TextPrompt(prompt)
        if isinstance(prompt, TextPrompt):
            prepared = PreparedPrompt(prompt.text, self._encode(prompt))
        else:
            prepared = PreparedPrompt(prompt.text, self._checked_ids(prompt.token_ids))
        self._check_length(len(prepared.token_ids))
        return prepared

    def request(
        self,
        prompt: PreparedPrompt,
        params: SamplingParams,
        *,
        request_id: str,
        arrival_s: float,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AddRequest:
        """Raises: RequestError: a parameter is not served, or means nothing for this model."""
        check_served(params)
        self._check_stops(params)
        _check_salt(cache_salt)
        if not _is_int(priority):
            raise RequestError(f"priority={priority!r} is not an integer", param="priority")
        return AddRequest(
            request_id=request_id,
            prompt_ids=prompt.token_ids,
            params=self._clamped(params, len(prompt.token_ids)),
            arrival_s=arrival_s,
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
            priority=priority,
            cache_salt=cache_salt,
        )

    def _encode(self, prompt: TextPrompt) -> tuple[int, ...]:
        text: Any = prompt.text
        if not isinstance(text, str):
            raise RequestError(f"prompt is a {type(text).__name__}; accepted: text or token ids", param="prompt")
        if not text:
            raise RequestError("prompt is empty; accepted: text of at least one character", param="prompt")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"prompt has half a surrogate pair at character {error.start}; accepted: valid Unicode text",
                param="prompt",
            ) from None
        ids = tuple(self._tokenizer.encode(text, add_special_tokens=prompt.add_special_tokens))
        if not ids:
            raise RequestError("prompt has no tokens; accepted: text of at least one token", param="prompt")
        return ids

    def _checked_ids(self, token_ids: Sequence[Any]) -> tuple[int, ...]:
        ids = tuple(token_ids)
        if not ids:
            raise RequestError("prompt token ids are empty; accepted: at least one id", param="prompt")
        for position, token_id in enumerate(ids):
            if not _is_int(token_id) or not 0 <= token_id < self._vocab_size:
                raise RequestError(
                    f"prompt token id {token_id!r} at position {position} is not in the vocabulary; "
                    f"accepted: integers from 0 to {self._vocab_size - 1}",
                    param="prompt",
                )
        return ids

    def _check_length(self, num_tokens: int) -> None:
        if num_tokens >= self._max_model_len:
            raise RequestError(
                f"the prompt has {num_tokens} tokens and this model's maximum context length is "
                f"{self._max_model_len} tokens, prompt and output together; accepted: prompts of at most "
                f"{self._max_model_len - 1} tokens",
                param="prompt",
                code="context_length_exceeded",
            )

    def _check_stops(self, params: SamplingParams) -> None:
        for token_id in params.stop_token_ids:
            if token_id >= self._vocab_size:
                raise RequestError(
                    f"stop_token_ids holds {token_id}, which is not in the vocabulary; "
                    f"accepted: integers from 0 to {self._vocab_size - 1}",
                    param="stop_token_ids",
                )
        forbidden = self._eos_ids.union(params.stop_token_ids)
        if params.min_tokens and len(forbidden) > MAX_FORBIDDEN:
            raise RequestError(
                f"min_tokens={params.min_tokens} has to hold back {len(forbidden)} stop and end-of-sequence ids; "
                f"accepted: at most {MAX_FORBIDDEN} such ids",
                param="min_tokens",
            )

    def _clamped(self, params: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        """`max_tokens` (None: all that fits) and `min_tokens` cut to the room after the prompt."""
        room = self._max_model_len - num_prompt_tokens
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        return replace(params, max_tokens=max_tokens, min_tokens=min(params.min_tokens, max_tokens))


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_salt(cache_salt: object) -> None:
    if cache_salt is not None and (not isinstance(cache_salt, str) or not cache_salt):
        raise RequestError(f"cache_salt={cache_salt!r}; accepted: a non-empty string", param="cache_salt")


def served_defaults(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The model's generation defaults that this version honours; others are named in the log."""
    kept: dict[str, Any] = {}
    for name, value in defaults.items():
        if name not in sampling_fields():
            continue
        try:
            check_served(SamplingParams(**{name: value}))
        except RequestError as error:
            _log.warning("the model's generation default is left out: %s", error)
        else:
            kept[name] = value
    return kept
