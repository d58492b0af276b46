"""From prompts to engine outputs: one stream, or several merged, with the engine's faults as exceptions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypedDict

from jaxllm.errors import RequestError
from jaxllm.server.errors import GenerationFailed, deadline_passed
from jaxllm.server.state import ServerState
from jaxllm.types.outputs import RequestOutput
from jaxllm.types.request import DEADLINE
from jaxllm.types.sampling import BeamSearchParams, SamplingParams
from jaxllm.types.service import DEFAULT_SERVICE, ServiceParams

if TYPE_CHECKING:
    from jaxllm.engine.inputs import Prompt

OnText = Callable[[str], bool]


class Terms(TypedDict):
    """What goes with a request to the engine beside its parameters."""

    priority: int
    cache_salt: str | None
    service: ServiceParams


Outputs = AsyncGenerator[tuple[int, RequestOutput], None]  # (index of the prompt, its next output)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One HTTP request's work for the engine."""

    prompts: Sequence[Prompt]
    params: SamplingParams | BeamSearchParams
    request_id: str
    priority: int = 0
    cache_salt: str | None = None
    service: ServiceParams = DEFAULT_SERVICE
    num_copies: int = 1  # equal choices of a prompt that is only scored
    spelling: Mapping[str, str] = field(default_factory=dict[str, str])  # a parameter's name, as the user knows it


async def run_job(state: ServerState, job: Job, on_text: OnText | None = None) -> Outputs:
    """Outputs of every prompt as they come. Closing the generator aborts what still runs.

    `on_text`, for one prompt and one choice on a `text_engine`, is offered news that is text alone.

    Raises:
        RequestError, CapacityError: the engine refused a prompt.
        HTTPError: the deadline came before a token of any prompt.
        EngineDead, GenerationFailed: the engine ended a request that was sound.
    """
    unbegun: list[tuple[int, RequestOutput]] = []  # whose deadline came before a token
    has_begun = False
    streams = [_open(state, job, prompt, on_text) for prompt in job.prompts]
    merged = _single(streams[0]) if len(streams) == 1 else _merge(streams)
    try:
        async with aclosing(merged) as outputs:
            async for index, output in outputs:
                _check(state, output)
                if output.finished and output.num_generated_tokens == 0 and _is_past_deadline(output):
                    unbegun.append((index, output))
                    continue
                has_begun = True
                yield index, output if job.num_copies == 1 else _copied(output, job.num_copies)
        if unbegun and not has_begun:
            raise deadline_passed(job.service.deadline_s)
        for index, output in unbegun:
            yield index, output
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
        return _beam_search(state, prompt, job, request_id)
    terms = _terms(job)
    if on_text is not None and state.text_engine is not None:
        return state.text_engine.stream(prompt, job.params, request_id=request_id, on_text=on_text, **terms)
    return state.engine.stream(prompt, job.params, request_id=request_id, **terms)


def _terms(job: Job) -> Terms:
    return {"priority": job.priority, "cache_salt": job.cache_salt, "service": job.service}


async def _beam_search(
    state: ServerState, prompt: Prompt, job: Job, request_id: str
) -> AsyncGenerator[RequestOutput, None]:
    assert isinstance(job.params, BeamSearchParams)
    yield await state.engine.beam_search(prompt, job.params, request_id=request_id, **_terms(job))


def _copied(output: RequestOutput, count: int) -> RequestOutput:
    return replace(output, outputs=tuple(replace(output.outputs[0], index=index) for index in range(count)))


def _check(state: ServerState, output: RequestOutput) -> None:
    reasons = {completion.finish_reason for completion in output.outputs}
    if output.error is None and not reasons & {"error", "abort"}:
        return
    if output.error is None and _is_past_deadline(output):
        return
    state.check_alive()
    raise GenerationFailed(output.error or "the engine aborted the request")


def _is_past_deadline(output: RequestOutput) -> bool:
    """Whether it is its own deadline that ended each of its sequences that were cut short."""
    cut_short = [each for each in output.outputs if each.finish_reason in ("error", "abort")]
    return bool(cut_short) and all(each.stop_reason == DEADLINE for each in cut_short)


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
