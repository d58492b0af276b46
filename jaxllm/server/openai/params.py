"""From an OpenAI request to sampling parameters: request, then the model's own defaults, then OpenAI's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from jaxllm.errors import RequestError, shown
from jaxllm.server import limits
from jaxllm.server.generation import respelled
from jaxllm.server.openai.beam import beam_params
from jaxllm.server.openai.unserved import refuse_unserved
from jaxllm.server.schema import ChatRequest, CompletionRequest, GenerationRequest
from jaxllm.types.sampling import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROB_TOKEN_IDS,
    BeamSearchParams,
    OutputKind,
    SamplingParams,
)

COMPLETIONS_MAX_TOKENS = 16  # OpenAI's default for /v1/completions; chat may use all that fits
_REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

_MAX_KEY_DIGITS = 20  # of a token id
# Request fields that mean the same, under the same name, in SamplingParams.
_SAME = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "min_tokens",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "prompt_logprobs",
    "logprob_token_ids",
    "allowed_token_ids",
    "bad_words",
    "truncate_prompt_tokens",
    "thinking_token_budget",
    "repetition_detection",
    "stream_interval",
    "structured_outputs",
)


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asks of the engine, and how the user knows the names of its parameters."""

    params: SamplingParams | BeamSearchParams
    n: int  # choices of each prompt
    spelling: Mapping[str, str]
    num_copies: int = 1  # more than one: the engine gives a single choice, that stands for n


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What a request's parameters depend on beside the request."""

    defaults: Mapping[str, Any]  # the model's own sampling defaults
    max_logprobs: int  # -1: no limit
    max_model_len: int


def chat_params(request: ChatRequest, context: Context) -> Asked:
    """Parameters of a chat request. `max_completion_tokens` wins over `max_tokens`.

    Raises:
        RequestError: a value is out of range, or asks for something not served yet.
    """
    refuse_unserved(request)
    _check_reasoning(request)
    newer = request.max_completion_tokens is not None
    asked = request.max_completion_tokens if newer else request.max_tokens
    name = "max_completion_tokens" if newer else "max_tokens"
    if asked == 0:  # a prompt is scored by /v1/completions alone
        raise RequestError(f"{name}=0 is out of range; accepted: at least 1", param=name)
    spelling = {"max_tokens": name, "logprobs": "top_logprobs", "extra_args": "vllm_xargs", "beam_width": "n"}
    max_tokens = asked if asked is not None else context.defaults.get("max_tokens")
    return _asked(request, context, max_tokens, _chat_logprobs(request, context), spelling)


def completion_params(request: CompletionRequest, context: Context) -> Asked:
    """Parameters of a completions request.

    Raises:
        RequestError: a value is out of range, or asks for something not served yet.
    """
    refuse_unserved(request)
    if request.max_tokens == 0 and not request.echo:
        raise RequestError("max_tokens=0 is accepted only with echo=true; else at least 1", param="max_tokens")
    if request.best_of is not None and request.best_of not in (1, request.n or 1):
        accepted = "1, or the same as n" if request.n not in (None, 1) else "1"
        raise RequestError(f"best_of={shown(request.best_of)}; accepted: {accepted}", param="best_of")
    if request.logprobs is not None:
        _check_num_logprobs("logprobs", request.logprobs, context.max_logprobs)
    logprobs = _beside_ids(request, request.logprobs, asks=request.logprobs is not None)
    max_tokens = COMPLETIONS_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    asked = _asked(request, context, max_tokens, logprobs, {"extra_args": "vllm_xargs", "beam_width": "n"})
    return asked if request.max_tokens != 0 else _scoring(asked)


def _scoring(asked: Asked) -> Asked:
    """max_tokens=0: the prompt is run through the model once, whatever n is, and nothing is sampled."""
    assert isinstance(asked.params, SamplingParams)
    return replace(asked, params=replace(asked.params, n=1), num_copies=asked.n)


def _asked(
    request: GenerationRequest,
    context: Context,
    max_tokens: int | None,
    logprobs: int | None,
    spelling: Mapping[str, str],
) -> Asked:
    _check_stream(request)
    _check_control(request)
    _check_sizes(request)
    num_choices = _checked_n(request.n)
    if request.prompt_logprobs is not None:
        _check_num_logprobs("prompt_logprobs", request.prompt_logprobs, context.max_logprobs)
    try:
        if request.use_beam_search:
            longest = context.max_model_len
            limit = longest if max_tokens is None else min(max_tokens, longest)
            spelling = {name: own for name, own in spelling.items() if name != "logprobs"}  # here the field itself
            params = beam_params(request, num_choices, limit)
        else:
            params = _sampling(_values(request, context, max_tokens, logprobs))
    except RequestError as error:
        raise respelled(error, spelling) from None
    return Asked(params, num_choices, spelling)


def _sampling(values: Mapping[str, Any]) -> SamplingParams:
    """Checked parameters; the same object as before for what was asked before, as most clients do."""
    try:
        # Types beside values: to a key 1, 1.0 and True are the same.
        return _remembered(tuple(values.items()), tuple(map(type, values.values())))
    except TypeError:  # a list or a mapping among them
        return SamplingParams(**values)


@lru_cache(256)
def _remembered(items: tuple[tuple[str, Any], ...], types: tuple[type, ...]) -> SamplingParams:
    del types
    return SamplingParams(**dict(items))


def _values(
    request: GenerationRequest, context: Context, max_tokens: int | None, logprobs: int | None
) -> dict[str, Any]:
    values = {name: value for name, value in context.defaults.items() if name != "max_tokens"}
    values |= {name: value for name in _SAME if (value := getattr(request, name)) is not None}
    if request.logit_bias:
        values["logit_bias"] = {_token_key(key): value for key, value in request.logit_bias.items()}
    if values.get("thinking_token_budget") == -1:
        del values["thinking_token_budget"]
    values |= {"n": request.n or 1, "logprobs": logprobs}
    if isinstance(request, CompletionRequest) and request.echo and (request.logprobs is not None or max_tokens == 0):
        values["prompt_logprobs"] = _more(request.logprobs or 0, request.prompt_logprobs or 0)
    if request.vllm_xargs:
        values["extra_args"] = request.vllm_xargs
    # Counts larger than any model can use mean "as many as fit"; they must still fit an int32.
    values["max_tokens"] = None if max_tokens is None else min(max_tokens, limits.INT32_MAX)
    values["top_k"] = min(values.get("top_k", 0), limits.INT32_MAX)
    values["output_kind"] = OutputKind.DELTA if request.stream else OutputKind.FINAL_ONLY
    return values


def _more(first: int, second: int) -> int:
    """The larger of two numbers of log probabilities, of which -1 means all."""
    return -1 if -1 in (first, second) else max(first, second)


def _chat_logprobs(request: ChatRequest, context: Context) -> int | None:
    """`SamplingParams.logprobs` of a chat request."""
    top = request.top_logprobs
    if not request.logprobs and top not in (None, 0):
        message = f"top_logprobs={shown(top)} needs logprobs=true; accepted without: 0 or null"
        raise RequestError(message, param="top_logprobs")
    if top is not None:
        _check_num_logprobs("top_logprobs", top, context.max_logprobs)
    return _beside_ids(request, (top or 0) if request.logprobs else None, asks=bool(request.logprobs))


def _beside_ids(request: GenerationRequest, count: int | None, *, asks: bool) -> int | None:
    """How many of the most likely tokens to ask for, where single tokens may be asked for in their place."""
    if request.logprob_token_ids is None:
        return count
    limits.check_count("logprob_token_ids", request.logprob_token_ids, MAX_LOGPROB_TOKEN_IDS)
    if not asks:
        message = "logprob_token_ids needs logprobs; accepted with it: 0, or as many as there are ids"
        raise RequestError(message, param="logprob_token_ids")
    return count or None


def _check_num_logprobs(name: str, value: int, most: int) -> None:
    if value < -1 or (most >= 0 and not 0 <= value <= most):
        accepted = f"0 to {most} (max_logprobs)" if most >= 0 else "at least 0, or -1 for all"
        raise RequestError(f"{name}={shown(value)} is out of range; accepted: {accepted}", param=name)


def _checked_n(n: int | None) -> int:
    if n is not None and not 1 <= n <= limits.MAX_N:
        raise RequestError(f"n={shown(n)} is out of range; accepted: 1 to {limits.MAX_N}", param="n")
    return n or 1


def _token_key(key: str) -> int:
    is_plain = key.isascii() and key.isdecimal() and (key == "0" or not key.startswith("0"))
    if not is_plain or len(key) > _MAX_KEY_DIGITS:
        raise RequestError(f"logit_bias has the key {key[:40]!r}; accepted: token ids as strings", param="logit_bias")
    return int(key)


def _check_reasoning(request: ChatRequest) -> None:
    effort = request.reasoning_effort
    if effort is not None and effort not in _REASONING_EFFORTS:
        accepted = ", ".join(_REASONING_EFFORTS)
        raise RequestError(f"reasoning_effort={effort[:80]!r}; accepted: {accepted}", param="reasoning_effort")


def _check_stream(request: GenerationRequest) -> None:
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options needs stream=true; accepted here: null", param="stream_options")
    if request.stream and request.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs needs stream=false; accepted here: null", param="prompt_logprobs")


def _check_control(request: GenerationRequest) -> None:
    salt = request.cache_salt
    if salt is not None and not 1 <= len(salt) <= limits.MAX_CACHE_SALT_CHARS:
        accepted = f"1 to {limits.MAX_CACHE_SALT_CHARS} characters"
        raise RequestError(f"cache_salt has {len(salt)} characters; accepted: {accepted}", param="cache_salt")
    if request.priority is not None and not -(2**63) <= request.priority < 2**63:
        raise RequestError(f"priority={shown(request.priority)}; accepted: a 64-bit integer", param="priority")
    side = request.truncation_side
    if side not in (None, "left", "right"):
        raise RequestError(f"truncation_side={shown(side)}; accepted: left, right", param="truncation_side")


def _check_sizes(request: GenerationRequest) -> None:
    stop = request.stop
    limits.check_stop_strings([stop] if isinstance(stop, str) else stop or [])
    limits.check_count("stop_token_ids", request.stop_token_ids or [], limits.MAX_STOP_TOKEN_IDS)
    limits.check_count("bad_words", request.bad_words or [], limits.MAX_BAD_WORDS)
    limits.check_count("allowed_token_ids", request.allowed_token_ids or [], limits.MAX_ALLOWED_TOKEN_IDS)
    limits.check_count("logit_bias", request.logit_bias or {}, MAX_LOGIT_BIAS)
    if request.min_tokens is not None and request.min_tokens > limits.INT32_MAX:
        message = f"min_tokens={shown(request.min_tokens)} is out of range; accepted: at most {limits.INT32_MAX}"
        raise RequestError(message, param="min_tokens")
