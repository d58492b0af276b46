"""One request of chat or completions between its check and its answer: what both routes share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from jaxllm.errors import RequestError
from jaxllm.server import limits
from jaxllm.server.auth import key_name_of
from jaxllm.server.generation import Job, run_job
from jaxllm.server.openai.body import json_response, visible_id
from jaxllm.server.openai.logprobs import LogprobView
from jaxllm.server.openai.params import Asked, Context
from jaxllm.server.openai.replies import ChatChunk, TextCompletion, Usage, usage_of
from jaxllm.server.openai.service import service_of
from jaxllm.server.schema import ChatRequest, CompletionRequest, StreamOptions
from jaxllm.server.sse import EventStream, Push, TextEvent, event
from jaxllm.server.state import ServerState
from jaxllm.tokenizer.base import Tokenizer
from jaxllm.types.outputs import RequestOutput
from jaxllm.types.sampling import SamplingParams

if TYPE_CHECKING:
    from jaxllm.engine.inputs import Prompt

_WORD = "text"  # any that is the same in JSON
_THREAD_POSITIONS = 512  # log probabilities of more tokens are written down off the event loop

Chunk = ChatChunk | TextCompletion
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A checked request: its work for the engine, and what its answer shows."""

    job: Job
    n: int  # choices of a prompt
    head: dict[str, Any]  # what every object of the answer repeats
    options: StreamOptions
    logprobs: LogprobView | None  # of the output, and of an echoed prompt
    prompt_logprobs: int | None  # most likely tokens of each prompt position; -1: all; None: not asked for
    returns_token_ids: bool
    returns_prompt_text: bool
    cuts_prompt: bool

    @property
    def is_text(self) -> bool:
        """Whether most of its news is the text of one choice and nothing else."""
        is_one = len(self.job.prompts) == self.n == 1 and isinstance(self.job.params, SamplingParams)
        shows_more = self.logprobs is not None or self.returns_token_ids or self.options.continuous_usage_stats
        return is_one and not shows_more

    def prompt_ids(self, output: RequestOutput) -> tuple[int, ...] | UnsetType:
        return output.prompt_token_ids if self.returns_token_ids else UNSET

    def prompt_text(self, output: RequestOutput, tokenizer: Tokenizer, *, skip_special_tokens: bool = False) -> str:
        """The prompt as the user gave it; from the ids where that was not text, or was cut."""
        if output.prompt is not None and not self.cuts_prompt:
            return output.prompt
        return tokenizer.decode(output.prompt_token_ids, skip_special_tokens)

    def returned_text(self, output: RequestOutput, tokenizer: Tokenizer) -> str | UnsetType:
        return self.prompt_text(output, tokenizer) if self.returns_prompt_text else UNSET


class Answer(Protocol):
    """How a route shows outputs, whole or in chunks. Mutable; owned by one request."""

    def whole(self, outputs: Mapping[int, RequestOutput]) -> msgspec.Struct:
        """The last output of each prompt, by the prompt's index, as one object."""
        ...

    def opening(self, index: int, output: RequestOutput) -> Iterable[Chunk]:
        """What comes before the news of a prompt's choices; `output` is its first."""
        ...

    def progress(self, index: int, output: RequestOutput) -> Iterable[Chunk]:
        """The news of a prompt's choices; a finish reason travels in a chunk of its own."""
        ...

    def text_chunk(self, text: str) -> tuple[Chunk, str]:
        """The progress of the only choice where that is text alone, and the name of the field that holds it."""
        ...

    def last(self, usage: Usage) -> Chunk:
        """The chunk without choices that closes a stream."""
        ...


def context_of(state: ServerState) -> Context:
    engine = state.engine
    return Context(defaults=state.default_params, max_logprobs=engine.max_logprobs, max_model_len=engine.max_model_len)


def open_call(
    state: ServerState,
    request: Request,
    body: ChatRequest | CompletionRequest,
    prompts: Sequence[Prompt],
    asked: Asked,
    *,
    prefix: str,
) -> Call:
    """Raises: RequestError: the model is not served here, or all prompts together have too many choices."""
    if len(prompts) * asked.n > limits.MAX_CHOICES:
        message = f"n={asked.n} for {len(prompts)} prompts is too many; accepted: {limits.MAX_CHOICES} choices in all"
        raise RequestError(message, param="n")
    request_id = visible_id(prefix, request, body)
    job = Job(
        prompts=prompts,
        params=asked.params,
        request_id=request_id,
        priority=body.priority or 0,
        cache_salt=body.cache_salt,
        service=service_of(body, key_name_of(request)),
        num_copies=asked.num_copies,
        spelling=asked.spelling,
    )
    head = {
        "id": request_id,
        "created": int(time.time()),
        "model": state.resolve_model(body.model),
        "system_fingerprint": state.fingerprint,
    }
    return Call(
        job=job,
        n=asked.n,
        head=head,
        options=body.stream_options or StreamOptions(),
        logprobs=_view(state.engine.tokenizer, body),
        prompt_logprobs=body.prompt_logprobs,
        returns_token_ids=bool(body.return_token_ids),
        returns_prompt_text=bool(body.return_prompt_text),
        cuts_prompt=body.truncate_prompt_tokens is not None,
    )


def _view(tokenizer: Tokenizer, body: ChatRequest | CompletionRequest) -> LogprobView | None:
    num_top = (body.top_logprobs or 0) if isinstance(body, ChatRequest) else body.logprobs
    if num_top is None or body.logprobs is None or body.logprobs is False:
        return None
    ids = body.logprob_token_ids
    return LogprobView(
        tokenizer,
        num_top=num_top,
        token_ids=None if ids is None else tuple(dict.fromkeys(ids)),
        as_ids=bool(body.return_tokens_as_token_ids),
    )


async def respond(state: ServerState, request: Request, call: Call, answer: Answer, *, stream: bool) -> Response:
    """The answer of a call: a stream of events, or one JSON object.

    Raises:
        RequestError, CapacityError, EngineDead, GenerationFailed, Interrupted: nothing was sent yet.
    """
    if stream:
        return EventStream(state, lambda push: _events(state, call, answer, push))
    async with state.guard(request.receive), aclosing(run_job(state, call.job)) as outputs:
        last = {index: output async for index, output in outputs}
        return await _made(last.values(), lambda: json_response(answer.whole(last)))


async def _events(state: ServerState, call: Call, answer: Answer, push: Push) -> AsyncGenerator[bytes, None]:
    """Chunks of the choices as they come, and a usage chunk if asked for; those of text alone are pushed."""
    last: dict[int, RequestOutput] = {}
    on_text = _pusher(call, answer, push) if call.is_text and state.text_engine is not None else None
    async with aclosing(run_job(state, call.job, on_text)) as outputs:
        async for index, output in outputs:
            if data := await _news(call, answer, last, index, output):
                yield data
    if call.options.include_usage:
        yield event(answer.last(usage_of(last.values())))


def _pusher(call: Call, answer: Answer, push: Push) -> Callable[[str], bool]:
    """Pushes a chunk of text: filled into one that was made before."""
    chunk, field = answer.text_chunk(_WORD)
    text_event = TextEvent(_with_usage(call, [chunk], {})[0], field, _WORD)
    return lambda text: push(text_event(text))


async def _news(call: Call, answer: Answer, last: dict[int, RequestOutput], index: int, output: RequestOutput) -> bytes:
    """The events of a prompt's next output, which becomes its last; empty where it brings nothing to show."""
    chunks: list[Chunk] = []
    if index not in last:
        chunks += await _made((output,), lambda: list(answer.opening(index, output)))
    last[index] = output
    chunks += answer.progress(index, output)
    return b"".join(map(event, _with_usage(call, chunks, last))) if chunks else b""


def _with_usage(call: Call, chunks: list[Chunk], last: Mapping[int, RequestOutput]) -> list[Chunk]:
    """Each chunk with the tokens of the whole request so far, if asked for; null announces the one at the end."""
    if call.options.continuous_usage_stats:
        usage = usage_of(last.values())
    elif call.options.include_usage:
        usage = None
    else:
        return chunks
    for chunk in chunks:
        chunk.usage = usage
    return chunks


async def _made(outputs: Iterable[RequestOutput], make: Callable[[], T]) -> T:
    """The result of `make`, which runs in a thread where it has much to write."""
    if sum(map(_num_positions, outputs)) <= _THREAD_POSITIONS:
        return make()
    return await asyncio.to_thread(make)


def _num_positions(output: RequestOutput) -> int:
    in_choices = sum(len(completion.logprobs or ()) for completion in output.outputs)
    return len(output.prompt_logprobs or ()) + in_choices
