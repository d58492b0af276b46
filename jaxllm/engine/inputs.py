"""From what a caller asks to a request the core can take: tokens checked, limits clamped."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxllm.engine import checks
from jaxllm.engine.bad_words import bad_word_ids
from jaxllm.engine.messages import AddRequest
from jaxllm.errors import RequestError, shown
from jaxllm.tokenizer.base import Tokenizer
from jaxllm.types.sampling import SamplingParams, sampling_fields
from jaxllm.types.service import DEFAULT_SERVICE, ServiceParams

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
    bad_word_ids: tuple[tuple[int, ...], ...] = ()


class InputProcessor:
    """Turns prompts and parameters into `AddRequest`. `tokenize` may run in any thread."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_model_len: int,
        vocab_size: int,
        eos_ids: frozenset[int],
        seed: int,
        max_logprobs: int = 20,
        processor_names: Sequence[str] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._seeds = random.Random(seed)
        self._max_logprobs = max_logprobs
        self._processor_names = tuple(processor_names)

    def tokenize(self, prompt: Prompt, params: SamplingParams | None = None) -> PreparedPrompt:
        """The ids of a prompt, cut as `params` say, and of the words that they ban.

        Raises:
            RequestError: the prompt is empty, too long, or not ids of this model's vocabulary; or a
                bad word is no good.
        """
        if isinstance(prompt, str):
            prompt = TextPrompt(prompt)
        ids = self._encode(prompt) if isinstance(prompt, TextPrompt) else self._checked_ids(prompt.token_ids)
        if params is not None and params.truncate_prompt_tokens is not None:
            ids = ids[-self._num_kept(params) :]
        self._check_length(len(ids), params)
        bad_words = self._bad_words(params) if params is not None and params.bad_words else ()
        return PreparedPrompt(prompt.text, ids, bad_words)

    def check(self, params: SamplingParams, bad_words: Sequence[tuple[int, ...]] = ()) -> None:
        """Raises: RequestError: a parameter means nothing for this model."""
        checks.check_vocabulary(params, self._vocab_size)
        checks.check_held_back(params, self._eos_ids)
        checks.check_allowed(params, self._eos_ids, bad_words)
        checks.check_num_logprobs(params, self._max_logprobs)
        checks.check_num_sequences(params)
        checks.check_extra_args(params, self._processor_names)

    def request(
        self,
        prompt: PreparedPrompt,
        params: SamplingParams,
        *,
        request_id: str,
        arrival_s: float,
        priority: int = 0,
        cache_salt: str | None = None,
        service: ServiceParams = DEFAULT_SERVICE,
    ) -> AddRequest:
        """`prompt` is what `tokenize` made with the same `params`.

        Raises:
            RequestError: a parameter means nothing for this model.
        """
        self.check(params, prompt.bad_word_ids)
        check_terms(priority, cache_salt, service)
        return AddRequest(
            request_id=request_id,
            prompt_ids=prompt.token_ids,
            params=self._clamped(params, len(prompt.token_ids)),
            arrival_s=arrival_s,
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
            priority=priority,
            cache_salt=cache_salt,
            bad_word_ids=prompt.bad_word_ids,
            service=service,
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
        if max(ids) >= self._vocab_size:  # a tokenizer with more tokens than its model
            raise RequestError(
                f"prompt holds the token {self._tokenizer.token(max(ids))!r}, which this model does not know; "
                f"accepted: text of tokens 0 to {self._vocab_size - 1}",
                param="prompt",
            )
        return ids

    def _encode_word(self, text: str) -> list[int]:
        text.encode()  # half a surrogate pair is an error, whatever the tokenizer thinks of it
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        found = bad_word_ids(params.bad_words, self._encode_word)
        return tuple(ids for ids in found if max(ids) < self._vocab_size)  # others cannot come out anyway

    def _checked_ids(self, token_ids: Sequence[Any]) -> tuple[int, ...]:
        ids = tuple(token_ids)
        if not ids:
            raise RequestError("prompt token ids are empty; accepted: at least one id", param="prompt")
        for position, token_id in enumerate(ids):
            if not _is_int(token_id) or not 0 <= token_id < self._vocab_size:
                raise RequestError(
                    f"prompt token id {shown(token_id)} at position {position} is not in the vocabulary; "
                    f"accepted: integers from 0 to {self._vocab_size - 1}",
                    param="prompt",
                )
        return ids

    def _num_kept(self, params: SamplingParams) -> int:
        """Tokens that truncate_prompt_tokens keeps of a prompt, counted from its end."""
        asked = params.truncate_prompt_tokens or 0
        room = self._max_model_len - max(1, params.max_tokens or 1)
        count = room if asked == -1 else asked
        if count >= 1:
            return count
        if asked == -1:
            raise RequestError(
                f"truncate_prompt_tokens=-1 leaves no room for a prompt beside max_tokens={shown(params.max_tokens)}; "
                f"accepted: max_tokens of at most {self._max_model_len - 1}",
                param="max_tokens",
            )
        message = "truncate_prompt_tokens=0 leaves no prompt; accepted: at least 1, or -1: as much as leaves room"
        raise RequestError(message, param="truncate_prompt_tokens")

    def _check_length(self, num_tokens: int, params: SamplingParams | None) -> None:
        scores_only = params is not None and params.max_tokens == 0
        most = self._max_model_len if scores_only else self._max_model_len - 1
        if num_tokens > most:
            raise RequestError(
                f"the prompt has {num_tokens} tokens and this model's maximum context length is "
                f"{self._max_model_len} tokens, prompt and output together; accepted: prompts of at most "
                f"{most} tokens",
                param="prompt",
                code="context_length_exceeded",
            )

    def _clamped(self, params: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        """`max_tokens` (None: all that fits) and `min_tokens` cut to the room after the prompt, counts to V."""
        room = self._max_model_len - num_prompt_tokens
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        wanted: dict[str, int | None] = {
            "max_tokens": max_tokens,
            "min_tokens": min(params.min_tokens, max_tokens),
            "logprobs": self._at_most_vocabulary(params.logprobs),
            "prompt_logprobs": self._at_most_vocabulary(params.prompt_logprobs),
        }
        changed = {name: value for name, value in wanted.items() if value != getattr(params, name)}
        return replace(params, **changed) if changed else params

    def _at_most_vocabulary(self, count: int | None) -> int | None:
        return None if count is None else min(count, self._vocab_size)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check_terms(priority: object, cache_salt: object, service: object) -> None:
    """Raises: RequestError: one of what goes with a request beside its parameters is wrong."""
    if not isinstance(priority, int) or isinstance(priority, bool) or not -(2**63) <= priority < 2**63:
        raise RequestError(f"priority={shown(priority)}; accepted: a 64-bit integer", param="priority")
    if cache_salt is not None and (not isinstance(cache_salt, str) or not cache_salt):
        raise RequestError(f"cache_salt={shown(cache_salt)}; accepted: a non-empty string", param="cache_salt")
    if not isinstance(service, ServiceParams):
        raise RequestError(f"service={shown(service)}; accepted: ServiceParams", param="service")


def served_defaults(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The model's generation defaults that this version honours; others are named in the log."""
    kept: dict[str, Any] = {}
    for name, value in defaults.items():
        if name not in sampling_fields():
            continue
        try:
            SamplingParams(**{name: value})
        except RequestError as error:
            _log.warning("the model's generation default is left out: %s", error)
        else:
            kept[name] = value
    return kept
