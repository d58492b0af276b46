"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from jaxllm.engine.inputs import TextPrompt
from jaxllm.server.openai import replies
from jaxllm.server.openai.body import read_request
from jaxllm.server.openai.call import Call, context_of, open_call, respond
from jaxllm.server.openai.logprobs import chat_logprobs, prompt_logprobs
from jaxllm.server.openai.messages import echoed_message, render_chat
from jaxllm.server.openai.params import chat_params
from jaxllm.server.openai.prompts import cut_from_the_right
from jaxllm.server.schema import ChatRequest
from jaxllm.server.state import ServerState, state_of
from jaxllm.tokenizer.base import Tokenizer
from jaxllm.types.outputs import CompletionOutput, RequestOutput


async def create(request: Request) -> Response:
    state = state_of(request)
    body = await read_request(state, request, ChatRequest)
    call = await _checked(state, request, body)
    answer = ChatAnswer(call, state.engine.tokenizer, echo=echoed_message(body) if body.echo else "")
    return await respond(state, request, call, answer, stream=bool(body.stream))


async def _checked(state: ServerState, request: Request, body: ChatRequest) -> Call:
    state.resolve_model(body.model)
    asked = chat_params(body, context_of(state))
    text = await render_chat(state, body)
    # The template writes the special tokens itself, so the tokenizer must not add them again.
    prompts = [TextPrompt(text, add_special_tokens=bool(body.add_special_tokens))]
    if body.truncation_side == "right":
        prompts, asked = await asyncio.to_thread(cut_from_the_right, state.engine, prompts, asked)
    return open_call(state, request, body, prompts, asked, prefix="chatcmpl")


class ChatAnswer:
    """Chat completions and their chunks. `echo` comes before each choice's text."""

    def __init__(self, call: Call, tokenizer: Tokenizer, *, echo: str = "") -> None:
        self._call = call
        self._tokenizer = tokenizer
        self._echo = echo

    def whole(self, outputs: Mapping[int, RequestOutput]) -> replies.ChatCompletion:
        call, output = self._call, outputs[0]
        table = UNSET
        if call.prompt_logprobs is not None and output.prompt_logprobs is not None:
            table = prompt_logprobs(self._tokenizer, output.prompt_logprobs, call.prompt_logprobs)
        return replies.ChatCompletion(
            **call.head,
            choices=tuple(self._choice(completion) for completion in output.outputs),
            usage=replies.usage_of([output]),
            prompt_token_ids=call.prompt_ids(output),
            prompt_logprobs=table,
            prompt_text=call.returned_text(output, self._tokenizer),
        )

    def opening(self, index: int, output: RequestOutput) -> Iterator[replies.ChatChunk]:
        """The role of every choice, then the echo."""
        del index  # a chat has one prompt
        for i in range(self._call.n):
            chunk = self._chunk(replies.ChunkChoice(index=i, delta=replies.Delta("assistant", "")))
            chunk.prompt_token_ids = self._call.prompt_ids(output)
            chunk.prompt_text = self._call.returned_text(output, self._tokenizer)
            yield chunk
        if self._echo:
            for i in range(self._call.n):
                yield self._chunk(replies.ChunkChoice(index=i, delta=replies.Delta(content=self._echo)))

    def progress(self, index: int, output: RequestOutput) -> Iterator[replies.ChatChunk]:
        del index
        for completion in output.outputs:
            ids = completion.token_ids if self._call.returns_token_ids and completion.token_ids else UNSET
            logprobs = self._logprobs(completion)
            if completion.text or logprobs is not None or ids is not UNSET:
                delta = replies.Delta(content=completion.text)
                yield self._chunk(
                    replies.ChunkChoice(index=completion.index, delta=delta, logprobs=logprobs, token_ids=ids)
                )
            if completion.finish_reason is not None:
                yield self._chunk(_finish(completion))

    def text_chunk(self, text: str) -> tuple[replies.ChatChunk, str]:
        return self._chunk(replies.ChunkChoice(index=0, delta=replies.Delta(content=text))), "content"

    def last(self, usage: replies.Usage) -> replies.ChatChunk:
        return replies.ChatChunk(**self._call.head, choices=(), usage=usage)

    def _choice(self, completion: CompletionOutput) -> replies.ChatChoice:
        return replies.ChatChoice(
            index=completion.index,
            message=replies.Message(self._echo + completion.text),
            logprobs=self._logprobs(completion),
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
            token_ids=completion.token_ids if self._call.returns_token_ids else UNSET,
        )

    def _chunk(self, choice: replies.ChunkChoice) -> replies.ChatChunk:
        return replies.ChatChunk(**self._call.head, choices=(choice,))

    def _logprobs(self, completion: CompletionOutput) -> replies.ChatLogprobs | None:
        if self._call.logprobs is None or not completion.logprobs:
            return None
        return chat_logprobs(self._call.logprobs, completion.logprobs)


def _finish(completion: CompletionOutput) -> replies.ChunkChoice:
    return replies.ChunkChoice(
        index=completion.index,
        delta=replies.Delta(),
        finish_reason=completion.finish_reason,
        stop_reason=completion.stop_reason,
    )
