"""What requests look like: every field that OpenAI's clients and vLLM's users send, each may be null.

Decoding is two steps, JSON to plain data and plain data to the struct, so that a wrong type can be
answered with the value that was sent, and so that unknown field names can be logged.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec

from jaxllm.errors import RequestError

logger = logging.getLogger("jaxllm.server")

_MAX_REMEMBERED_NAMES = 1000
# Of the search for a number that is out of range, which every level reads once more.
_MAX_SEARCHED_BYTES = 65536  # below the field itself
_MAX_SEARCHED_LEVELS = 4
_MAX_SHOWN_CHARS = 77
_BROKEN = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)  # what follows the number is wrong as well


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class GenerationRequest(msgspec.Struct, kw_only=True):
    """The fields that chat and completions share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None

    max_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    logit_bias: dict[str, float] | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    length_penalty: float | None = None
    use_beam_search: bool | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    echo: bool | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    thinking_token_budget: int | None = None
    repetition_detection: dict[str, Any] | None = None
    stream_interval: int | None = None

    response_format: Any = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    priority: int | None = None
    tenant: str | None = None
    deadline_s: float | None = None
    retention_priority: int | None = None
    retention_tokens: int | None = None
    ttft_target_s: float | None = None
    tpot_target_s: float | None = None
    predicted_tokens: int | None = None
    request_id: str | None = None
    session_id: str | None = None
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    vllm_xargs: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_prompt_text: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    store: bool | None = None


class ChatRequest(GenerationRequest, kw_only=True):
    messages: list[dict[str, Any]] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None
    function_call: str | dict[str, Any] | None = None

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None

    audio: dict[str, Any] | None = None
    modalities: list[str] | None = None
    moderation: Any = None
    prediction: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    verbosity: str | None = None
    web_search_options: dict[str, Any] | None = None


class CompletionRequest(GenerationRequest, kw_only=True):
    prompt: str | list[Any] | None = None
    prompt_embeds: Any = None
    best_of: int | None = None
    suffix: str | None = None
    logprobs: int | None = None


RequestT = TypeVar("RequestT", bound=GenerationRequest)


class UnknownFields:
    """Logs each unknown field name once, at debug level. Owned by the server's state."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def note(self, names: set[str]) -> None:
        for name in names - self._seen:
            if len(self._seen) >= _MAX_REMEMBERED_NAMES:
                return
            self._seen.add(name)
            logger.debug("request field %r is unknown here and was ignored", name[:100])


def decode_request(body: bytes, schema: type[RequestT], unknown: UnknownFields) -> RequestT:
    """JSON bytes to a request.

    Raises:
        RequestError: the body is not a JSON object, or a field has the wrong type (`param` names it).
    """
    data = _decode_object(body)
    try:
        request = msgspec.convert(data, schema)
    except msgspec.ValidationError as error:
        raise _wrong_type(data, str(error)) from None
    unknown.note(data.keys() - _field_names(schema))
    return request


def _decode_object(body: bytes) -> dict[str, Any]:
    if not body.strip():
        raise RequestError("the body is empty; send a JSON object")
    try:
        data = msgspec.json.decode(body)
    except RecursionError:
        raise RequestError("the body is not valid JSON: it is nested too deep") from None
    except msgspec.ValidationError:  # raised here for one thing alone: a float that no double holds
        raise _too_large(body) from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise RequestError(f"the body is a JSON {_json_type(data)}; send an object")
    return data


def _too_large(body: bytes) -> RequestError:
    """A number such as 1e400, or one of thousands of digits: the message shows it and its field."""
    accepted = "accepted: numbers up to 1.8e308"
    path, found = _path_of_too_large(body)
    if not path:  # no object, or a field is given twice and the one that counts is sound
        return RequestError(f"the body holds a number that is out of range; {accepted}")
    number = found[:_MAX_SHOWN_CHARS].decode(errors="replace") + ("..." if len(found) > _MAX_SHOWN_CHARS else "")
    return RequestError(f"{''.join(path)}={number} is out of range; {accepted}", param=path[0])


def _path_of_too_large(body: bytes) -> tuple[list[str], bytes]:
    """Where in an object that does not decode the first such number stands, and the text there."""
    path: list[str] = []
    while len(path) < _MAX_SEARCHED_LEVELS and (not path or len(body) <= _MAX_SEARCHED_BYTES):
        member = _undecodable_member(body.strip())
        if member is None or not (path or isinstance(member[0], str)):
            break
        name, body = member
        name = name[:_MAX_SHOWN_CHARS] if isinstance(name, str) else name
        path.append(f"[{name!r}]" if path else str(name))
    return path, body


def _undecodable_member(container: bytes) -> tuple[str | int, bytes] | None:
    """The first entry of an object or a list that holds such a number; None where none can be found."""
    for name, entry in _members(container):
        try:
            msgspec.json.decode(entry)
        except msgspec.ValidationError:
            return name, bytes(entry)
        except _BROKEN:
            break
    return None


def _members(container: bytes) -> Iterable[tuple[str | int, msgspec.Raw]]:
    try:
        if container.startswith(b"{"):
            return msgspec.json.decode(container, type=dict[str, msgspec.Raw]).items()
        if container.startswith(b"["):
            return enumerate(msgspec.json.decode(container, type=list[msgspec.Raw]))
    except _BROKEN:
        pass
    return ()


def _field_names(schema: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(schema.__struct_fields__)


_PATH = re.compile(r"^(?P<reason>.*) - at `\$\.?(?P<path>.*)`$", re.DOTALL)


def _wrong_type(data: dict[str, Any], text: str) -> RequestError:
    """msgspec says where and what it expected; add the value that was there."""
    found = _PATH.match(text)
    if found is None or not found["path"]:
        return RequestError(text)
    path = found["path"].split("[...]")[0]
    reason = found["reason"].replace("`", "")
    value = _shown(_value_at(data, path))
    if reason == "Number out of range":
        return RequestError(f"{path}={value} is out of range; accepted: numbers up to 1.8e308", param=path)
    return RequestError(f"{path}={value} has the wrong type: {reason}", param=path)


def _value_at(data: Any, path: str) -> Any:
    for name, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path):
        data = data[int(index)] if index else data[name]
    return data


def _shown(value: Any) -> str:
    try:
        text = msgspec.json.encode(value).decode()
    except RecursionError:
        return "(nested too deep to show)"
    return text if len(text) <= 80 else text[:77] + "..."


def _json_type(value: Any) -> str:
    if value is None:
        return "null"
    return {list: "array", str: "string", bool: "boolean"}.get(type(value), "number")
