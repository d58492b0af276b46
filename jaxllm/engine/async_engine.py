"""The asynchronous engine: one async iterator a request, for the server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from jaxllm.engine.beam_run import BeamLimits, BeamRun
from jaxllm.engine.front_end import FrontEnd, id_in_use
from jaxllm.engine.inputs import PreparedPrompt, Prompt, TextPrompt, served_defaults
from jaxllm.engine.merge import merge_outputs
from jaxllm.engine.messages import AddRequest
from jaxllm.engine.parts import EngineParts
from jaxllm.metrics.prometheus import PrometheusMetrics
from jaxllm.metrics.stats import EngineStats
from jaxllm.types.outputs import RequestOutput
from jaxllm.types.sampling import BeamSearchParams, OutputKind, SamplingParams

_THREAD_CHARS = 8192  # longer prompts are tokenised off the event loop, which must stay responsive


class AsyncEngine:
    """Serves many callers on one event loop. Its methods belong to that loop's thread.

    Attributes: tokenizer, max_model_len (tokens), model_name, default_params (the model's own
    sampling defaults), max_logprobs (-1: any number), metrics (`render()` gives the Prometheus text).
    """

    def __init__(self, parts: EngineParts) -> None:
        self.tokenizer = parts.tokenizer
        self.max_model_len = parts.max_model_len
        self.model_name = parts.model_name
        self.max_logprobs = parts.max_logprobs
        self.default_params = served_defaults(parts.default_params)
        self.metrics = PrometheusMetrics(
            self.stats,
            model_name=parts.model_name,
            max_model_len=parts.max_model_len,
            prefix=parts.metrics_prefix,
        )
        self._front = FrontEnd(parts, self.metrics)
        self._beam_limits = BeamLimits.of(parts)
        self._searches: dict[str, list[str]] = {}  # the requests of each beam search's round
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watching: asyncio.TimerHandle | None = None

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs as they come, the last one with `finished` true.

        Nothing happens before the first item is asked for. Outputs that the caller is too slow to
        read are merged into one. Closing the iterator, or cancelling the task that waits on it,
        aborts the request.

        Raises:
            RequestError, CapacityError: the request is refused; always before the first item.
            EngineDead: the engine stopped, before the first item or after any.
        """
        self._bind_loop()
        self._front.check_alive()
        arrival_s = self._front.clock.now_s()
        prepared = await self._tokenize(prompt, params)
        if request_id in self._searches:
            raise id_in_use(request_id)
        message = self._front.inputs.request(
            prepared,
            params,
            request_id=request_id,
            arrival_s=arrival_s,
            priority=priority,
            cache_salt=cache_salt,
        )
        stream = _Stream(params.output_kind)
        self._front.add(message, prepared.text, stream.deliver)
        self._watch_later()
        try:
            while True:
                output = await stream.next()
                yield output
                if output.finished:
                    return
        finally:
            if not stream.has_ended:
                self._front.abort((request_id,))

    async def beam_search(self, prompt: Prompt, params: BeamSearchParams, *, request_id: str) -> RequestOutput:
        """The most likely sequences, best first; cancelling the task aborts the search.

        Raises:
            RequestError, CapacityError: the search is refused.
            EngineDead: the engine stopped.
        """
        self._bind_loop()
        self._front.check_alive()
        arrival_s = self._front.clock.now_s()
        prepared = await self._tokenize(prompt)
        run = BeamRun(
            prepared, params, self._beam_limits, self._front.inputs, request_id=request_id, arrival_s=arrival_s
        )
        if request_id in self._searches or self._front.is_open(request_id):
            raise id_in_use(request_id)
        self._searches[request_id] = []
        try:
            await self._search(run)
        except BaseException as error:
            run.stop(error)
            raise
        finally:
            self._front.abort(self._searches.pop(request_id))
            self._front.count(run.summary(self._front.clock.now_s()))
        return run.output(self.tokenizer, self._front.clock.now_s())

    async def abort(self, request_id: str) -> None:
        """End a request with finish_reason "abort"; unknown and ended ones are ignored."""
        self._front.abort(self._searches.get(request_id, (request_id,)))

    def check_health(self) -> None:
        """Raises: EngineDead: the engine stopped, froze, died or was closed."""
        self._front.pump()
        self._front.check_alive()

    def stats(self) -> EngineStats:
        return self._front.stats()

    async def close(self) -> None:
        """Abort what is open, stop the engine thread, release the device. Safe to call twice."""
        self._front.shut_down()
        if self._watching is not None:
            self._watching.cancel()
        await asyncio.to_thread(self._front.join)

    async def _search(self, run: BeamRun) -> None:
        """Round after round of one token for each beam."""
        while messages := run.wanted(self._front.clock.now_s()):
            self._searches[run.request_id] = [message.request_id for message in messages]
            streams = [self._add_step(message) for message in messages]
            self._watch_later()
            outputs = [await stream.next() for stream in streams]
            run.take(outputs, self._front.clock.now_s())

    def _add_step(self, message: AddRequest) -> _Stream:
        stream = _Stream(message.params.output_kind)
        self._front.add(message, None, stream.deliver, is_counted=False)
        return stream

    async def _tokenize(self, prompt: Prompt, params: SamplingParams | None = None) -> PreparedPrompt:
        text = prompt.text if isinstance(prompt, TextPrompt) else prompt
        size = len(text) if isinstance(text, str) else 0
        if params is not None and params.bad_words:
            size += sum(map(len, params.bad_words))
        if size > _THREAD_CHARS:
            return await asyncio.to_thread(self._front.inputs.tokenize, prompt, params)
        return self._front.inputs.tokenize(prompt, params)

    def _bind_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._watching = loop, None
            self._front.wake_with(self._wake)
            self._front.pump()

    def _wake(self) -> None:
        """Called in the core's thread: let the event loop read the mailbox."""
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has closed: nobody is left to tell
                loop.call_soon_threadsafe(self._front.pump)

    def _watch_later(self) -> None:
        """Keep asking the watchdog while requests are open."""
        if self._watching is None and self._loop is not None:
            self._watching = self._loop.call_later(self._front.watch_interval_s, self._watch)

    def _watch(self) -> None:
        self._watching = None
        self._front.watch()
        if self._front.num_open:
            self._watch_later()


class _Stream:
    """What one caller has not read yet. Mutable; owned by its `stream` call."""

    def __init__(self, kind: OutputKind) -> None:
        self._kind = kind
        self._pending: RequestOutput | None = None
        self._error: Exception | None = None
        self._news = asyncio.Event()
        self.has_ended = False

    def deliver(self, news: RequestOutput | Exception) -> None:
        if isinstance(news, Exception):
            self._error, self.has_ended = news, True
        else:
            self._pending = merge_outputs(self._pending, news, self._kind) if self._pending else news
            self.has_ended = news.finished
        self._news.set()

    async def next(self) -> RequestOutput:
        """The next output; what was delivered before an error comes first."""
        while self._pending is None:
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()
        output, self._pending = self._pending, None
        return output
