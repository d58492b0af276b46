"""Chat templates of one server: whose template a chat is rendered with, and rendering off the event loop."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from jaxllm.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from jaxllm.config.engine import ServerConfig
    from jaxllm.tokenizer.chat import ChatTemplate

MAX_TEMPLATE_CHARS = 32 * 1024  # of a request's own template; compiling takes up to a second at that length
# What is rendered in the event loop's own thread: chats as short as this, by a template that took
# no longer than this in the latest renders of such chats. Waiting for a thread costs several times as much.
_QUICK_CHARS = 8192
_QUICK_MESSAGES = 32
_QUICK_S = 0.002  # processor time
_NUM_QUICK = 3
_INLINE_LIMIT_S = 0.05  # and then a thread starts anew
_NUM_COMPILED = 16  # of them kept: a client sends the same one with each request
_NUM_THREADS = 2  # templates are Python code: more threads would only take the interpreter from the event loop
_NO_TEMPLATE = "the model has no chat template; use /v1/completions, or start the server with --chat-template"
_NOT_TRUSTED = "chat_template in a request is not allowed; accepted: null, or start with --trust-request-chat-template"


class Templates:
    """The server's chat template, and what requests may change about it. Owned by the server's state.

    Templates are programs that come with a model or, where that is allowed, with a request. They run
    in threads of their own, so that slow ones delay only each other.
    """

    def __init__(self, default: ChatTemplate | None, config: ServerConfig) -> None:
        self._default = default
        self._trusts_requests = config.trust_request_chat_template
        self._kwargs: dict[str, Any] = json.loads(config.default_chat_template_kwargs or "{}")
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "jaxllm-template")
        self._compiled = lru_cache(_NUM_COMPILED)(self._compile)
        self._quick = None if default is None else QuickTemplate(default)

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        template: str | None = None,
        kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """The prompt of a chat. `template` is the request's own; its `kwargs` win over the server's.

        Raises:
            RequestError: there is no template, the request may not bring its own, or the template
                refuses the messages, fails, or runs for too long.
        """

        def render_with(chosen: ChatTemplate) -> str:
            return chosen.render(
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **{**self._kwargs, **(kwargs or {})},
            )

        quick = self._quick if template is None and not kwargs and _is_short(messages) else None
        if quick is not None and (text := quick.render_now(render_with)) is not None:
            return text

        def work() -> str:
            chosen = self._chosen(template)
            return render_with(chosen) if quick is None else quick.timed(lambda: render_with(chosen))

        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        """Let the threads end; does not wait for a template that still runs."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _chosen(self, source: str | None) -> ChatTemplate:
        if source is None:
            if self._default is None:
                raise RequestError(_NO_TEMPLATE, param="messages")
            return self._default
        if not self._trusts_requests:
            raise RequestError(_NOT_TRUSTED, param="chat_template")
        if len(source) > MAX_TEMPLATE_CHARS:
            message = f"chat_template has {len(source)} characters; accepted: at most {MAX_TEMPLATE_CHARS}"
            raise RequestError(message, param="chat_template")
        return self._compiled(source)

    def _compile(self, source: str) -> ChatTemplate:
        from jaxllm.tokenizer.chat import ChatTemplate

        try:
            return ChatTemplate(source, self._default.special_tokens if self._default else None)
        except ConfigError as error:
            raise RequestError(str(error), param="chat_template") from None


class QuickTemplate:
    """The server's own template, once it has shown that it takes no time. Mutable; owned by `Templates`.

    Chats differ, so one that takes long all the same is given up on soon, and ends the trust.
    """

    def __init__(self, template: ChatTemplate) -> None:
        from jaxllm.tokenizer.chat import ChatTemplate

        self._template = ChatTemplate(template.source, template.special_tokens, limit_s=_INLINE_LIMIT_S)
        self._num_quick = 0  # renders in a row

    def render_now(self, render_with: Callable[[ChatTemplate], str]) -> str | None:
        """The prompt; None where the template is not known to be quick, or there is an error to be told of."""
        if self._num_quick < _NUM_QUICK:
            return None
        try:
            return self.timed(lambda: render_with(self._template))
        except RequestError:
            return None

    def timed(self, render: Callable[[], str]) -> str:
        """Render, here or in a thread, and learn from how long it takes; an error counts as its time."""
        started_s = time.thread_time()
        try:
            return render()
        finally:
            self._num_quick = self._num_quick + 1 if time.thread_time() - started_s < _QUICK_S else 0


def _is_short(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether these are few texts, and nothing that would have to be looked through to know its size."""
    if len(messages) > _QUICK_MESSAGES:
        return False
    values = [value for message in messages for value in message.values()]
    return all(value is None or isinstance(value, str) for value in values) and (
        sum(len(value) for value in values if value is not None) <= _QUICK_CHARS
    )
