"""POST /v1/completions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from jaxllm.errors import RequestError
from jaxllm.server.generation import Job, Outputs, run_job
from jaxllm.server.openai import replies
from jaxllm.server.openai.body import json_response, read_request, visible_id
from jaxllm.server.openai.params import completion_params
from jaxllm.server.openai.prompts import EchoedPrompt, echoed_prompts, parse_prompts, scored_only
from jaxllm.server.schema import CompletionRequest, StreamOptions
from jaxllm.server.sse import EventStream, event
from jaxllm.server.state import ServerState, state_of
from jaxllm.types.outputs import CompletionOutput, RequestOutput


@dataclass(frozen=True, slots=True)
class _Call:
    """A checked request: its job, what it echoes, and the fields that every object of its answer repeats."""

    job: Job
    echoed: Sequence[EchoedPrompt]  # empty without echo
    generates: bool  # False: max_tokens=0, the prompt is only given back
    head: dict[str, Any]
    options: StreamOptions
    return_token_ids: bool

    def outputs(self, state: ServerState) -> Outputs:
        return run_job(state, self.job) if self.generates else scored_only(self.echoed)

    def echo(self, index: int) -> str:
        return self.echoed[index].text if self.echoed else ""


async def create(request: Request) -> Response:
    state = state_of(request)
    body = await read_request(state, request, CompletionRequest)
    call = await _checked(state, request, body)
    if body.stream:
        return EventStream(state, _events(state, call))
    async with state.guard(request.receive):
        return json_response(await _whole(state, call))


async def _checked(state: ServerState, request: Request, body: CompletionRequest) -> _Call:
    model = state.resolve_model(body.model)
    generates = body.max_tokens != 0
    if not generates and not body.echo:
        raise RequestError("max_tokens=0 is accepted only with echo=true; else at least 1", param="max_tokens")
    params = completion_params(body if generates else msgspec.structs.replace(body, max_tokens=1), state.default_params)
    adds_special = body.add_special_tokens is not False
    prompts = parse_prompts(body.prompt, adds_special)
    echoed: Sequence[EchoedPrompt] = ()
    if body.echo:  # may tokenise, which takes long for a long text
        echoed = await asyncio.to_thread(echoed_prompts, state.engine, prompts, params, generates=generates)
    request_id = visible_id("cmpl", request, body)
    job = Job(
        prompts=prompts,
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
    options = body.stream_options or StreamOptions()
    return _Call(job, echoed, generates, head, options, bool(body.return_token_ids))


async def _whole(state: ServerState, call: _Call) -> replies.TextCompletion:
    async with aclosing(call.outputs(state)) as outputs:
        last = {index: output async for index, output in outputs}
    choices = tuple(
        _choice(call, index, output, completion, call.echo(index) + completion.text, finished=True)
        for index, output in sorted(last.items())
        for completion in output.outputs
    )
    return replies.TextCompletion(**call.head, choices=choices, usage=replies.usage_of(last.values()))


async def _events(state: ServerState, call: _Call) -> AsyncGenerator[bytes, None]:
    """Text chunks, per choice a chunk with the finish reason alone, a usage chunk if asked."""
    last: dict[int, RequestOutput] = {}
    async with aclosing(call.outputs(state)) as outputs:
        async for index, output in outputs:
            is_first = index not in last
            last[index] = output
            frames = _progress(call, index, output, is_first)
            if frames:
                yield b"".join(frames)
    if call.options.include_usage:
        yield event(replies.TextCompletion(**call.head, choices=(), usage=replies.usage_of(last.values())))


def _progress(call: _Call, index: int, output: RequestOutput, is_first: bool) -> list[bytes]:
    frames: list[bytes] = []
    for completion in output.outputs:
        text = (call.echo(index) if is_first else "") + completion.text
        if text or is_first or (call.return_token_ids and completion.token_ids):
            frames.append(_chunk(call, output, _choice(call, index, output, completion, text, is_first=is_first)))
        if completion.finish_reason is not None:
            finish = replies.TextChoice(
                index=index,
                text="",
                finish_reason=completion.finish_reason,
                stop_reason=completion.stop_reason,
            )
            frames.append(_chunk(call, output, finish))
    return frames


def _choice(
    call: _Call,
    index: int,
    output: RequestOutput,
    completion: CompletionOutput,
    text: str,
    *,
    is_first: bool = True,
    finished: bool = False,
) -> replies.TextChoice:
    with_ids = call.return_token_ids
    return replies.TextChoice(
        index=index,
        text=text,
        finish_reason=completion.finish_reason if finished else None,
        stop_reason=completion.stop_reason if finished else UNSET,
        token_ids=completion.token_ids if with_ids else UNSET,
        prompt_token_ids=output.prompt_token_ids if with_ids and is_first else UNSET,
    )


def _chunk(call: _Call, output: RequestOutput, choice: replies.TextChoice) -> bytes:
    usage: replies.Usage | msgspec.UnsetType | None = UNSET
    if call.options.continuous_usage_stats:
        usage = replies.usage_of([output])
    elif call.options.include_usage:
        usage = None
    return event(replies.TextCompletion(**call.head, choices=(choice,), usage=usage))
