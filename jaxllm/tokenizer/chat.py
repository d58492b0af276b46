"""From chat messages to the prompt text a model was trained on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from jaxllm.errors import ConfigError, RequestError, shown

if TYPE_CHECKING:
    from jinja2 import Template

RENDER_LIMIT_S = 2.0  # a real template needs milliseconds
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
_OWN_NAMES = frozenset({"messages", "tools", "add_generation_prompt", "chat_template", "tokenize"})
_END_MARK = "\ue0f1\ue0f2"  # private use: stands right after a message that is to be continued

Message = Mapping[str, Any]


class ChatTemplate:
    """A compiled chat template (jinja2, as in Hugging Face's `chat_template`). Threads may share one.

    Attributes: source, special_tokens (variables of the template such as bos_token).

    Raises:
        ConfigError: the template does not parse.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str] | None = None, *, limit_s: float = RENDER_LIMIT_S
    ) -> None:
        from jaxllm.tokenizer.sandbox import BoundedEnvironment

        self.source = source
        self.special_tokens = dict(special_tokens or {})
        self._limit_s = limit_s
        self._environment = BoundedEnvironment()
        self._environment.start(limit_s)  # constant expressions are computed while compiling
        try:
            self._template: Template = self._environment.from_string(source)
        except Exception as error:
            raise ConfigError(f"chat template: {error}; accepted: a jinja2 template") from error
        self._globals = dict(self._template.globals)  # a chain of maps, which jinja walks for each render

    def render(
        self,
        messages: Sequence[Message],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The prompt for `messages`; further keyword arguments are variables of the template.

        With `continue_final_message` the prompt ends with the last message's own text, exactly,
        so that the model goes on with it.

        Raises:
            RequestError: the messages are not chat messages, or the template refuses them (then
                its own message is given), or it works for too long.
        """
        taken = sorted(_OWN_NAMES & kwargs.keys())
        if taken:
            raise RequestError(f"chat_template_kwargs may not set {', '.join(taken)}", param="chat_template_kwargs")
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt cannot both be true", param="continue_final_message"
            )
        if tools is not None and (not isinstance(tools, Sequence) or isinstance(tools, (str, bytes))):
            raise RequestError(f"tools={shown(tools)}; accepted: a list of tools or none", param="tools")
        clean = [_clean_message(message, index) for index, message in enumerate(_nonempty(messages))]
        if continue_final_message:
            _mark_end(clean)
        variables = {
            **self.special_tokens,
            "documents": None,
            **kwargs,
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._render_either(clean, variables)
        return _cut_at_mark(text) if continue_final_message else text

    def _render_either(self, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> str:
        """Render with a call's missing content as null; where the template cannot take that, as "".

        Some templates look for null to tell a tool call from a reply, others add the content to a text.
        """
        try:
            return self._render({**variables, "messages": messages})
        except RequestError:
            if all(message["content"] is not None for message in messages):
                raise
        filled = [{**message, "content": message["content"] or ""} for message in messages]
        return self._render({**variables, "messages": filled})

    def _render(self, variables: Mapping[str, Any]) -> str:
        from jinja2.exceptions import TemplateError

        self._environment.start(self._limit_s)
        try:
            context = self._template.new_context({**self._globals, **variables}, shared=True)
            return "".join(self._environment.bounded_text(self._template.root_render_func(context)))
        except TemplateError as error:
            raise RequestError(f"chat template: {error.message or error}", param="messages") from error
        except Exception as error:  # the template is a program: it can fail in any way
            raise RequestError(f"chat template failed: {type(error).__name__}: {error}", param="messages") from error


def _nonempty(messages: Sequence[Message]) -> Sequence[Message]:
    if not messages or not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise RequestError("messages must be a list of at least one message", param="messages")
    return messages


def _clean_message(message: Message, index: int) -> dict[str, Any]:
    """A message as templates expect it: content is text, or None for a call without words."""
    where = f"messages[{index}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"{where} must be an object with a role", param="messages")
    clean = {name: value for name, value in message.items() if value is not None}
    calls = clean.pop("tool_calls", None)
    if calls:
        if not isinstance(calls, Sequence) or isinstance(calls, (str, bytes)):
            raise RequestError(f"{where}.tool_calls={shown(calls)}; accepted: a list of calls", param="messages")
        clean["tool_calls"] = [_clean_call(call, f"{where}.tool_calls") for call in calls]
    content = _text_of(message.get("content"), f"{where}.content")
    clean["content"] = None if calls and not content else content
    return clean


def _text_of(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise RequestError(f"{where} must be a string or a list of parts", param="messages")
    return "\n".join(_part_text(part, where) for part in cast("Sequence[Any]", content))


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = cast("Mapping[str, Any]", part).get("type", "text") if isinstance(part, Mapping) else None
    text = cast("Mapping[str, Any]", part).get("text") if kind in _TEXT_PARTS else None
    if not isinstance(text, str):
        raise RequestError(f"{where}: a part of type {kind!r} is not served; accepted: type 'text'", param="messages")
    return text


def _clean_call(call: Any, where: str) -> dict[str, Any]:
    """A tool call with its arguments as an object: the API sends them as JSON text."""
    function = cast("Mapping[str, Any]", call).get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise RequestError(f"{where} must hold objects with a function", param="messages")
    arguments = cast("Mapping[str, Any]", function).get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError as error:
            raise RequestError(f"{where}: arguments are not JSON: {error}", param="messages") from error
    clean = {**cast("dict[str, Any]", function), "arguments": arguments or {}}
    return {**cast("dict[str, Any]", call), "function": clean}


def _mark_end(messages: list[dict[str, Any]]) -> None:
    last = messages[-1]
    if last["role"] != "assistant" or not last["content"]:
        raise RequestError(
            "continue_final_message needs a last message of role assistant with content", param="continue_final_message"
        )
    last["content"] += _END_MARK


def _cut_at_mark(text: str) -> str:
    prompt, mark, _ = text.rpartition(_END_MARK)
    if not mark:
        raise RequestError("the chat template does not show the last message as it is", param="continue_final_message")
    return prompt
