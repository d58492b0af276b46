"""Chat templates of one server: whose template a chat is rendered with, and rendering off the event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from jaxllm.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from jaxllm.config.engine import ServerConfig
    from jaxllm.tokenizer.chat import ChatTemplate

MAX_TEMPLATE_CHARS = 32 * 1024  # of a request's own template; compiling takes up to a second at that length
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

        def work() -> str:
            return self._chosen(template).render(
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **{**self._kwargs, **(kwargs or {})},
            )

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
