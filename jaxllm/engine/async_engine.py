"""The asynchronous engine: one async iterator a request, for the server."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable

from jaxllm.engine.beam_run import BeamLimits, BeamRun
from jaxllm.engine.front_end import FrontEnd, id_in_use
from jaxllm.engine.inputs import PreparedPrompt, Prompt, TextPrompt, served_defaults
from jaxllm.engine.merge import join_deltas
from jaxllm.engine.messages import AddRequest
from jaxllm.engine.parts import EngineParts
from jaxllm.engine.profiler import Profiled
from jaxllm.metrics.prometheus import PrometheusMetrics
from jaxllm.metrics.stats import EngineStats
from jaxllm.types.outputs import RequestOutput
from jaxllm.types.sampling import BeamSearchParams, OutputKind, SamplingParams
from jaxllm.types.service import DEFAULT_SERVICE, ServiceParams

OnText = Callable[[str], bool]  # whether it took the text; must not raise

_THREAD_CHARS = 8192  # longer prompts are tokenised off the event loop, which must stay responsive


class AsyncEngine(Profiled):
    """Serves many callers on one event loop. Its methods belong to that loop's thread.

    Attributes: tokenizer, max_model_len (tokens), model_name, default_params (the model's own
    sampling defaults), max_logprobs (-1: any number), metrics (`render()` gives the Prometheus text).
    """

    pushes_text = True  # `stream` knows `on_text`

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
        self._profiler = parts.profiler
        self._beam_limits = BeamLimits.of(parts)
        self._searches: dict[str, list[str]] = {}  # the requests of each beam search's round
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watching: asyncio.TimerHandle | None = None
        self._is_timing = False  # what is sent of the latest step

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str | None = None,
        service: ServiceParams = DEFAULT_SERVICE,
        on_text: OnText | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs as they come, the last one with `finished` true.

        Nothing happens before the first item is asked for. Outputs that the caller is too slow to
        read are merged into one. Closing the iterator, or cancelling the task that waits on it,
        aborts the request.

        `on_text` is for callers with output_kind DELTA who care for text alone. News that is no more
        than text goes to it first, while the caller waits for an item, without waking the caller's
        task; what it answers False to comes as an item. The first and the last item, and each that
        tells more than text, such as log probabilities, always come. The ids of tokens that came as
        text are in no output; their count is.

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
            service=service,
        )
        stream = _Stream(params.output_kind, on_text)
        push_text = stream.push_text if on_text is not None and params.output_kind is OutputKind.DELTA else None
        self._front.add(message, prepared.text, stream.deliver, push_text=push_text)
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

    async def beam_search(
        self,
        prompt: Prompt,
        params: BeamSearchParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str | None = None,
        service: ServiceParams = DEFAULT_SERVICE,
    ) -> RequestOutput:
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
            prepared,
            params,
            self._beam_limits,
            self._front.inputs,
            request_id=request_id,
            arrival_s=arrival_s,
            priority=priority,
            cache_salt=cache_salt,
            service=service,
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

    async def reset_prefix_cache(self) -> bool:
        """Forget every cached page on every device; False where a request held some.

        Raises:
            EngineDead: the engine stopped.
        """
        self._bind_loop()
        answer: asyncio.Future[bool | Exception] = asyncio.get_running_loop().create_future()
        self._front.reset_prefix_cache(lambda news: None if answer.done() else answer.set_result(news))
        self._watch_later()
        news = await answer
        if isinstance(news, Exception):
            raise news
        return news

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
        while messages := run.wanted():
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
            self._loop, self._watching, self._is_timing = loop, None, False
            self._front.wake_with(self._wake)
            self._front.pump()

    def _wake(self) -> None:
        """Called in the core's thread: let the event loop read the mailbox."""
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has closed: nobody is left to tell
                loop.call_soon_threadsafe(self._pump)

    def _pump(self) -> None:
        """Deliver a step's news, and time what becomes of it, text apart.

        The tasks that it wakes run before whatever is scheduled now, and the loop writes to its
        sockets before what that schedules in turn.
        """
        loop, phases = self._loop, self._front.phases
        started_s = time.perf_counter() - phases.detokenise_s
        self._front.pump()
        if loop is not None and not self._is_timing:
            self._is_timing = True
            loop.call_soon(loop.call_soon, self._end_timing, started_s)

    def _end_timing(self, started_s: float) -> None:
        """`started_s`: when the step's delivery began, less the seconds of text until then."""
        self._is_timing = False
        phases = self._front.phases
        phases.send_s += max(0.0, time.perf_counter() - phases.detokenise_s - started_s)

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

    def __init__(self, kind: OutputKind, on_text: OnText | None = None) -> None:
        self._kind = kind
        self._on_text = on_text
        self._news: list[RequestOutput] = []  # oldest first
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None  # waits for news
        self.has_ended = False

    def deliver(self, news: RequestOutput | Exception) -> None:
        if isinstance(news, Exception):
            self._error, self.has_ended = news, True
        else:
            if self._kind is not OutputKind.DELTA:
                self._news.clear()
            self._news.append(news)
            self.has_ended = news.finished
        reader = self._reader
        if reader is not None and not reader.done():
            reader.set_result(None)

    def push_text(self, text: str) -> bool:
        """Hand text to a caller who waits, and so has dealt with all that came before; whether it took it."""
        on_text, reader = self._on_text, self._reader
        return on_text is not None and reader is not None and not reader.done() and on_text(text)

    async def next(self) -> RequestOutput:
        """All outputs that wait, as one; what was delivered before an error comes first."""
        news = self._news
        while not news:
            if self._error is not None:
                raise self._error
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        output = join_deltas(news)
        news.clear()
        return output
