"""The synchronous engine: prompts in, results out, in the caller's thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType

from jaxllm.engine.front_end import FrontEnd
from jaxllm.engine.inputs import Prompt, served_defaults
from jaxllm.engine.messages import AddRequest
from jaxllm.engine.outputs import merge_outputs
from jaxllm.engine.parts import EngineParts
from jaxllm.errors import RequestError
from jaxllm.metrics.stats import EngineStats
from jaxllm.types.outputs import RequestOutput
from jaxllm.types.sampling import OutputKind, SamplingParams

OnUpdate = Callable[[RequestOutput], None]


class Engine:
    """Runs batches of requests. Not thread-safe: one `generate` at a time."""

    def __init__(self, parts: EngineParts) -> None:
        self.tokenizer = parts.tokenizer
        self.max_model_len = parts.max_model_len
        self.model_name = parts.model_name
        self.default_params = served_defaults(parts.default_params)
        self._front = FrontEnd(parts)
        self._num_requests = 0

    def generate(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], on_update: OnUpdate | None = None
    ) -> list[RequestOutput]:
        """Results in the order of the prompts, complete whatever the params' output_kind.

        `on_update` gets every output as it comes, in the shape that its request's output_kind
        asks for.

        Raises:
            RequestError: one prompt or parameter is wrong; then nothing was run.
            CapacityError: a request could never fit; the others are aborted.
            EngineDead: the engine stopped.
        """
        if len(prompts) != len(params):
            raise RequestError(f"{len(prompts)} prompts with {len(params)} params; accepted: as many", param="params")
        self._front.check_alive()
        if on_update is None:  # nobody looks at outputs in between
            params = [replace(each, output_kind=OutputKind.FINAL_ONLY) for each in params]
        requests = [self._prepare(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
        run = _Run(on_update)
        try:
            for text, message in requests:
                run.kinds[message.request_id] = message.params.output_kind
                self._front.add(message, text, run.deliver)
            while not run.is_over:
                self._wait()
        finally:
            run.on_update = None
            self._front.abort(run.kinds)
        if run.error is not None:
            raise run.error
        return [run.outputs[message.request_id] for _, message in requests]

    def stats(self) -> EngineStats:
        self._front.pump()
        return self._front.stats()

    def close(self) -> None:
        """Stop the engine thread and release the device. Safe to call twice."""
        self._front.shut_down()
        self._front.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _prepare(self, prompt: Prompt, params: SamplingParams) -> tuple[str | None, AddRequest]:
        arrival_s = self._front.clock.now_s()
        prepared = self._front.inputs.tokenize(prompt)
        self._num_requests += 1
        request = self._front.inputs.request(
            prepared, params, request_id=str(self._num_requests - 1), arrival_s=arrival_s
        )
        return prepared.text, request

    def _wait(self) -> None:
        if self._front.transport.to_front.wait(self._front.watch_interval_s):
            self._front.pump()
        else:
            self._front.watch()


class _Run:
    """The outputs of one `generate`. Mutable; owned by it."""

    def __init__(self, on_update: OnUpdate | None) -> None:
        self.kinds: dict[str, OutputKind] = {}
        self.outputs: dict[str, RequestOutput] = {}
        self.error: Exception | None = None
        self.on_update = on_update
        self._num_finished = 0

    @property
    def is_over(self) -> bool:
        return self.error is not None or self._num_finished == len(self.kinds)

    def deliver(self, news: RequestOutput | Exception) -> None:
        if isinstance(news, Exception):
            self.error = self.error or news
            return
        earlier = self.outputs.get(news.request_id)
        kind = self.kinds[news.request_id]
        self.outputs[news.request_id] = merge_outputs(earlier, news, kind) if earlier else news
        self._num_finished += news.finished
        if self.on_update is not None and self.error is None:
            try:
                self.on_update(news)
            except Exception as error:  # the caller's own: it goes back to the caller
                self.error = error
