"""Known request fields that are not served yet: refused, unless their value asks for nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxllm.errors import RequestError, shown
from jaxllm.server.schema import ChatRequest, GenerationRequest

# Field: the values beside null that ask for nothing.
_UNSERVED: dict[str, tuple[Any, ...]] = {
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "kv_transfer_params": ({},),
    "ec_transfer_params": ({},),
}
_UNSERVED_CHAT: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "audio": (),
    "modalities": (["text"],),
    "web_search_options": (),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
}
_UNSERVED_COMPLETION: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "prompt_embeds": (),
}


def refuse_unserved(request: GenerationRequest) -> None:
    """Raises: RequestError: a field asks for something that this version does not do."""
    _refuse(request, _UNSERVED)
    _check_response_format(request.response_format)
    if isinstance(request, ChatRequest):
        _refuse(request, _UNSERVED_CHAT)
        _check_tools(request)
    else:
        _refuse(request, _UNSERVED_COMPLETION)


def _refuse(request: GenerationRequest, table: Mapping[str, tuple[Any, ...]]) -> None:
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
