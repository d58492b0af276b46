"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from jaxllm.engine.inputs import TextPrompt
from jaxllm.server.generation import Job, run_job
from jaxllm.server.openai import replies
from jaxllm.server.openai.body import json_response, read_request, visible_id
from jaxllm.server.openai.messages import render_chat
from jaxllm.server.openai.params import chat_params
from jaxllm.server.schema import ChatRequest, StreamOptions
from jaxllm.server.sse import EventStream, event
from jaxllm.server.state import ServerState, state_of
from jaxllm.types.outputs import RequestOutput


@dataclass(frozen=True, slots=True)
class _Call:
    """A checked chat request: its job, and the fields that every object of its answer repeats."""

    job: Job
    head: dict[str, Any]
    options: StreamOptions
    return_token_ids: bool


async def create(request: Request) -> Response:
    state = state_of(request)
    body = await read_request(state, request, ChatRequest)
    call = await _checked(state, request, body)
    if body.stream:
        return EventStream(state, _events(state, call))
    async with state.guard(request.receive):
        return json_response(await _whole(state, call))


async def _checked(state: ServerState, request: Request, body: ChatRequest) -> _Call:
    model = state.resolve_model(body.model)
    params = chat_params(body, state.default_params)
    text = await render_chat(state, body)
    # The template writes the special tokens itself, so the tokenizer must not add them again.
    prompt = TextPrompt(text, add_special_tokens=bool(body.add_special_tokens))
    request_id = visible_id("chatcmpl", request, body)
    job = Job(
        prompts=[prompt],
        params=params,
        request_id=request_id,
        priority=body.priority or 0,
        cache_salt=body.cache_salt,
    )
    head = {
        "id": request_id,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": state.fingerprint,
    }
    return _Call(job, head, body.stream_options or StreamOptions(), bool(body.return_token_ids))


async def _whole(state: ServerState, call: _Call) -> replies.ChatCompletion:
    last: RequestOutput | None = None
    async with aclosing(run_job(state, call.job)) as outputs:
        async for _, output in outputs:
            last = output
    if last is None:
        raise RuntimeError("the engine ended a request without an output")
    choices = tuple(
        replies.ChatChoice(
            index=completion.index,
            message=replies.Message(completion.text),
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
            token_ids=completion.token_ids if call.return_token_ids else UNSET,
        )
        for completion in last.outputs
    )
    prompt_ids = last.prompt_token_ids if call.return_token_ids else UNSET
    return replies.ChatCompletion(
        **call.head, choices=choices, usage=replies.usage_of([last]), prompt_token_ids=prompt_ids
    )


async def _events(state: ServerState, call: _Call) -> AsyncGenerator[bytes, None]:
    """Role chunk, content chunks, a chunk with the finish reason alone, a usage chunk if asked."""
    last: RequestOutput | None = None
    async with aclosing(run_job(state, call.job)) as outputs:
        async for _, output in outputs:
            frames = [] if last is not None else _opening(call, output)
            frames += _progress(call, output)
            last = output
            if frames:
                yield b"".join(frames)
    if last is not None and call.options.include_usage:
        yield event(replies.ChatChunk(**call.head, choices=(), usage=replies.usage_of([last])))


def _opening(call: _Call, output: RequestOutput) -> list[bytes]:
    choices = tuple(
        replies.ChunkChoice(index=completion.index, delta=replies.Delta("assistant", ""))
        for completion in output.outputs
    )
    prompt_ids = output.prompt_token_ids if call.return_token_ids else UNSET
    return [_chunk(call, output, choices, prompt_token_ids=prompt_ids)]


def _progress(call: _Call, output: RequestOutput) -> list[bytes]:
    frames: list[bytes] = []
    for completion in output.outputs:
        ids = completion.token_ids if call.return_token_ids and completion.token_ids else UNSET
        if completion.text or ids is not UNSET:
            delta = replies.Delta(content=completion.text)
            frames.append(
                _chunk(call, output, (replies.ChunkChoice(index=completion.index, delta=delta, token_ids=ids),))
            )
        if completion.finish_reason is not None:
            finish = replies.ChunkChoice(
                index=completion.index,
                delta=replies.Delta(),
                finish_reason=completion.finish_reason,
                stop_reason=completion.stop_reason,
            )
            frames.append(_chunk(call, output, (finish,)))
    return frames


def _chunk(call: _Call, output: RequestOutput, choices: tuple[replies.ChunkChoice, ...], **more: Any) -> bytes:
    if call.options.continuous_usage_stats:
        more["usage"] = replies.usage_of([output])
    elif call.options.include_usage:
        more["usage"] = None
    return event(replies.ChatChunk(**call.head, choices=choices, **more))
