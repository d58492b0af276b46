"""From prompts to engine outputs: one stream, or several merged, with the engine's faults as exceptions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from jaxllm.errors import RequestError
from jaxllm.server.errors import GenerationFailed
from jaxllm.server.state import ServerState
from jaxllm.types.outputs import RequestOutput
from jaxllm.types.sampling import BeamSearchParams, SamplingParams

if TYPE_CHECKING:
    from jaxllm.engine.inputs import Prompt

OnText = Callable[[str], bool]
Outputs = AsyncGenerator[tuple[int, RequestOutput], None]  # (index of the prompt, its next output)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One HTTP request's work for the engine."""

    prompts: Sequence[Prompt]
    params: SamplingParams | BeamSearchParams
    request_id: str
    priority: int = 0
    cache_salt: str | None = None
    num_copies: int = 1  # equal choices of a prompt that is only scored
    spelling: Mapping[str, str] = field(default_factory=dict[str, str])  # a parameter's name, as the user knows it


async def run_job(state: ServerState, job: Job, on_text: OnText | None = None) -> Outputs:
    """Outputs of every prompt as they come. Closing the generator aborts what still runs.

    `on_text`, for one prompt and one choice on a `text_engine`, is offered news that is text alone.

    Raises:
        RequestError, CapacityError: the engine refused a prompt.
        EngineDead, GenerationFailed: the engine ended a request that was sound.
    """
    streams = [_open(state, job, prompt, on_text) for prompt in job.prompts]
    merged = _single(streams[0]) if len(streams) == 1 else _merge(streams)
    try:
        async with aclosing(merged) as outputs:
            async for index, output in outputs:
                _check(state, output)
                yield index, output if job.num_copies == 1 else _copied(output, job.num_copies)
    except RequestError as error:
        raise respelled(error, job.spelling) from None


def respelled(error: RequestError, spelling: Mapping[str, str]) -> RequestError:
    """Name the field as the user spelled it."""
    spelled = spelling.get(error.param or "")
    if spelled is None or error.param is None:
        return error
    return RequestError(str(error).replace(error.param, spelled, 1), param=spelled, code=error.code)


def _open(state: ServerState, job: Job, prompt: Prompt, on_text: OnText | None) -> AsyncGenerator[RequestOutput, None]:
    request_id = state.engine_request_id(job.request_id)
    if isinstance(job.params, BeamSearchParams):
        return _beam_search(state, prompt, job.params, request_id)
    params, priority, salt = job.params, job.priority, job.cache_salt
    if on_text is not None and state.text_engine is not None:
        stream = state.text_engine.stream
        return stream(prompt, params, request_id=request_id, priority=priority, cache_salt=salt, on_text=on_text)
    return state.engine.stream(prompt, params, request_id=request_id, priority=priority, cache_salt=salt)


async def _beam_search(
    state: ServerState, prompt: Prompt, params: BeamSearchParams, request_id: str
) -> AsyncGenerator[RequestOutput, None]:
    yield await state.engine.beam_search(prompt, params, request_id=request_id)


def _copied(output: RequestOutput, count: int) -> RequestOutput:
    return replace(output, outputs=tuple(replace(output.outputs[0], index=index) for index in range(count)))


def _check(state: ServerState, output: RequestOutput) -> None:
    reasons = {completion.finish_reason for completion in output.outputs}
    if output.error is None and not reasons & {"error", "abort"}:
        return
    state.check_alive()
    raise GenerationFailed(output.error or "the engine aborted the request")


async def _single(stream: AsyncGenerator[RequestOutput, None]) -> Outputs:
    async with aclosing(stream):
        async for output in stream:
            yield 0, output


def _of_prompt(index: int, error: RequestError) -> RequestError:
    """The error of one prompt among several, saying which."""
    if error.param != "prompt":
        return error
    path = f"prompt[{index}]"
    return RequestError(f"{path}: {error}", param=path, code=error.code)


async def _merge(streams: Sequence[AsyncGenerator[RequestOutput, None]]) -> Outputs:
    # Bounded, so that a slow reader slows the pumps and the engine merges deltas instead of us queueing them.
    queue: asyncio.Queue[tuple[int, RequestOutput] | Exception | None] = asyncio.Queue(maxsize=len(streams))

    async def pump(index: int, stream: AsyncGenerator[RequestOutput, None]) -> None:
        try:
            async for _, output in _single(stream):
                await queue.put((index, output))
            await queue.put(None)
        except RequestError as error:
            await queue.put(_of_prompt(index, error))
        except Exception as error:
            await queue.put(error)

    pumps = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        num_open = len(streams)
        while num_open:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
