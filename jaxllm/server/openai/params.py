"""From an OpenAI request to SamplingParams: request, then the model's own defaults, then OpenAI's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxllm.errors import RequestError, shown
from jaxllm.server import limits
from jaxllm.server.schema import ChatRequest, CompletionRequest, GenerationRequest
from jaxllm.types.sampling import OutputKind, SamplingParams, check_served

COMPLETIONS_MAX_TOKENS = 16  # OpenAI's default for /v1/completions; chat may use all that fits
_REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

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

# Known fields outside SamplingParams that are not served yet, with the values that ask for nothing.
_UNSERVED: dict[str, tuple[Any, ...]] = {
    "use_beam_search": (False,),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "kv_transfer_params": ({},),
    "ec_transfer_params": ({},),
    "vllm_xargs": ({},),
    "return_prompt_text": (False,),
}
_UNSERVED_CHAT: dict[str, tuple[Any, ...]] = {
    "logprobs": (False,),
    "top_logprobs": (0,),
    "echo": (False,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "documents": ([],),
    "audio": (),
    "modalities": (["text"],),
    "web_search_options": (),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
}
_UNSERVED_COMPLETION: dict[str, tuple[Any, ...]] = {
    "logprobs": (),
    "best_of": (1,),
    "suffix": ("",),
    "prompt_embeds": (),
}


def chat_params(request: ChatRequest, defaults: Mapping[str, Any]) -> SamplingParams:
    """Sampling parameters of a chat request. `max_completion_tokens` wins over `max_tokens`.

    Raises:
        RequestError: a value is out of range, or asks for something not served yet.
    """
    _refuse_unserved(request, _UNSERVED_CHAT)
    _check_tools(request)
    _check_reasoning(request)
    newer = request.max_completion_tokens is not None
    asked = request.max_completion_tokens if newer else request.max_tokens
    name = "max_completion_tokens" if newer else "max_tokens"
    return _params(request, defaults, name, asked if asked is not None else defaults.get("max_tokens"))


def completion_params(request: CompletionRequest, defaults: Mapping[str, Any]) -> SamplingParams:
    """Sampling parameters of a completions request whose max_tokens is not 0.

    Raises:
        RequestError: a value is out of range, or asks for something not served yet.
    """
    _refuse_unserved(request, _UNSERVED_COMPLETION)
    asked = request.max_tokens
    return _params(request, defaults, "max_tokens", COMPLETIONS_MAX_TOKENS if asked is None else asked)


def _params(
    request: GenerationRequest, defaults: Mapping[str, Any], max_tokens_field: str, max_tokens: int | None
) -> SamplingParams:
    _refuse_unserved(request, _UNSERVED)
    _check_response_format(request.response_format)
    _check_stream(request)
    _check_control(request)
    _check_sizes(request)
    values = {name: value for name, value in defaults.items() if name != "max_tokens"}
    values |= {name: value for name in _SAME if (value := getattr(request, name)) is not None}
    if request.logit_bias:
        values["logit_bias"] = {_token_key(key): value for key, value in request.logit_bias.items()}
    if values.get("thinking_token_budget") == -1:
        del values["thinking_token_budget"]
    # Counts larger than any model can use mean "as many as fit"; they must still fit an int32.
    values["max_tokens"] = None if max_tokens is None else min(max_tokens, limits.INT32_MAX)
    values["top_k"] = min(values.get("top_k", 0), limits.INT32_MAX)
    values["output_kind"] = OutputKind.DELTA if request.stream else OutputKind.FINAL_ONLY
    try:
        params = SamplingParams(**values)
    except RequestError as error:
        raise _respelled(error, max_tokens_field) from None
    check_served(params)
    return params


def _respelled(error: RequestError, max_tokens_field: str) -> RequestError:
    """Name the field as the user spelled it."""
    if error.param != "max_tokens":
        return error
    return RequestError(str(error).replace("max_tokens", max_tokens_field, 1), param=max_tokens_field)


def _token_key(key: str) -> int:
    if not key.isascii() or not key.isdecimal():
        raise RequestError(f"logit_bias has the key {key[:40]!r}; accepted: token ids as strings", param="logit_bias")
    return int(key[:20])


def _refuse_unserved(request: GenerationRequest, table: Mapping[str, tuple[Any, ...]]) -> None:
    for name, neutral in table.items():
        value = getattr(request, name)
        if value is not None and value not in neutral:
            accepted = " or ".join(repr(item) for item in (*neutral, None))
            raise RequestError(f"{name}={shown(value)} is not served yet; accepted: {accepted}", param=name)


def _check_tools(request: ChatRequest) -> None:
    choice = request.tool_choice
    if choice == "none":
        return
    if request.tools:
        raise RequestError("tools are not served yet; accepted: [] or null, or tool_choice='none'", param="tools")
    if choice not in (None, "auto"):
        raise RequestError(f"tool_choice={shown(choice)} needs tools; accepted: 'none' or 'auto'", param="tool_choice")


def _check_reasoning(request: ChatRequest) -> None:
    effort = request.reasoning_effort
    if effort is not None and effort not in _REASONING_EFFORTS:
        accepted = ", ".join(_REASONING_EFFORTS)
        raise RequestError(f"reasoning_effort={effort[:80]!r}; accepted: {accepted}", param="reasoning_effort")


def _check_response_format(value: Any) -> None:
    if value is None:
        return
    kind: Any = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return
    if kind in ("json_object", "json_schema", "structural_tag"):
        message = f"response_format type {kind!r} is not served yet; accepted: {{'type': 'text'}} or null"
    else:
        message = f"response_format={shown(value)}; accepted: an object with a type, such as {{'type': 'text'}}"
    raise RequestError(message, param="response_format")


def _check_stream(request: GenerationRequest) -> None:
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options needs stream=true; accepted here: null", param="stream_options")


def _check_control(request: GenerationRequest) -> None:
    salt = request.cache_salt
    if salt is not None and not 1 <= len(salt) <= limits.MAX_CACHE_SALT_CHARS:
        accepted = f"1 to {limits.MAX_CACHE_SALT_CHARS} characters"
        raise RequestError(f"cache_salt has {len(salt)} characters; accepted: {accepted}", param="cache_salt")
    if request.priority is not None and not -(2**63) <= request.priority < 2**63:
        raise RequestError(f"priority={request.priority}; accepted: a 64-bit integer", param="priority")


def _check_sizes(request: GenerationRequest) -> None:
    stop = request.stop
    limits.check_stop_strings([stop] if isinstance(stop, str) else stop or [])
    limits.check_count("stop_token_ids", request.stop_token_ids or [], limits.MAX_STOP_TOKEN_IDS)
    limits.check_count("bad_words", request.bad_words or [], limits.MAX_BAD_WORDS)
    if request.min_tokens is not None and request.min_tokens > limits.INT32_MAX:
        raise RequestError(f"min_tokens is out of range; accepted: at most {limits.INT32_MAX}", param="min_tokens")
