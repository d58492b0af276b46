"""Chat messages: checked, brought to the plain form that chat templates know, and rendered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxllm.errors import RequestError, shown
from jaxllm.server import limits
from jaxllm.server.schema import ChatRequest
from jaxllm.server.state import ServerState

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_RESERVED_KWARGS = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize"}
)


async def render_chat(state: ServerState, request: ChatRequest) -> str:
    """The prompt text of a chat.

    Raises:
        RequestError: a message is malformed, or the template refuses the conversation.
    """
    return await state.templates.render(
        checked_messages(request.messages),
        template=request.chat_template,
        kwargs=_template_kwargs(request),
        add_generation_prompt=_adds_generation_prompt(request),
        continue_final_message=bool(request.continue_final_message),
    )


def echoed_message(request: ChatRequest) -> str:
    """What `echo` puts before the answer: the text of a last message that the assistant has begun."""
    message = (request.messages or [{}])[-1]
    return (_text_of(message.get("content"), "") or "") if message.get("role") == "assistant" else ""


def checked_messages(messages: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """Messages whose content is text or null, `developer` as `system`, extra keys kept for the template.

    Raises:
        RequestError: `param` is the path of the offending part, such as ``messages[0].role``.
    """
    if not messages:
        raise RequestError("messages is empty; send at least one message", param="messages")
    limits.check_count("messages", messages, limits.MAX_MESSAGES)
    return [_checked(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _checked(message: Mapping[str, Any], path: str) -> dict[str, Any]:
    role = message.get("role")
    if role not in _ROLES:
        raise _wrong(f"{path}.role", role, "one of " + ", ".join(_ROLES))
    if "content" not in message and not message.get("tool_calls"):
        path = f"{path}.content"
        raise RequestError(f"{path} is missing; accepted: a string, text parts or null", param=path)
    if not isinstance(message.get("tool_calls"), (list, type(None))):
        raise _wrong(f"{path}.tool_calls", message["tool_calls"], "a list of calls or null")
    for key in ("name", "tool_call_id"):
        value = message.get(key)
        if value is not None and not isinstance(value, str):
            raise _wrong(f"{path}.{key}", value, "a string")
    content = _text_of(message.get("content"), f"{path}.content")
    return {**message, "role": "system" if role == "developer" else role, "content": content}


def _text_of(content: Any, path: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(path, content, "a string, a list of text parts or null")
    return "\n".join(_part_text(part, f"{path}[{index}]") for index, part in enumerate(content))


def _part_text(part: Any, path: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("text", "input_text", "output_text", "refusal"):
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise _wrong(f"{path}.text", text, "a string")
        return text
    if isinstance(kind, str):
        raise RequestError(f"{path}.type={kind[:80]!r} is not served yet; accepted: 'text'", param=f"{path}.type")
    raise _wrong(path, part, "an object such as {'type': 'text', 'text': '…'}")


def _wrong(path: str, value: Any, accepted: str) -> RequestError:
    return RequestError(f"{path}={shown(value)}; accepted: {accepted}", param=path)


def _adds_generation_prompt(request: ChatRequest) -> bool:
    if not request.continue_final_message:
        return request.add_generation_prompt is not False
    if request.add_generation_prompt:
        message = "continue_final_message and add_generation_prompt cannot both be true"
        raise RequestError(message, param="continue_final_message")
    return False


def _template_kwargs(request: ChatRequest) -> dict[str, Any]:
    kwargs: dict[str, Any] = {}
    if request.documents:
        kwargs["documents"] = request.documents
    if request.reasoning_effort is not None:
        kwargs["reasoning_effort"] = request.reasoning_effort
        kwargs["enable_thinking"] = request.reasoning_effort != "none"
    kwargs |= request.chat_template_kwargs or {}
    for name in kwargs.keys() & _RESERVED_KWARGS:
        param = f"chat_template_kwargs.{name}"
        raise RequestError(f"{param} is not allowed; the server sets it", param=param)
    return kwargs
