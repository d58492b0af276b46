"""The synchronous engine: prompts in, results out, in the caller's thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TypeVar

from jaxllm.engine.beam_run import BeamLimits, BeamRun
from jaxllm.engine.front_end import FrontEnd
from jaxllm.engine.inputs import PreparedPrompt, Prompt, served_defaults
from jaxllm.engine.merge import join_deltas
from jaxllm.engine.messages import AddRequest
from jaxllm.engine.parts import EngineParts
from jaxllm.engine.profiler import Profiled
from jaxllm.errors import RequestError
from jaxllm.metrics.stats import EngineStats
from jaxllm.types.outputs import RequestOutput
from jaxllm.types.sampling import BeamSearchParams, OutputKind, SamplingParams
from jaxllm.types.service import DEFAULT_SERVICE, ServiceParams

OnUpdate = Callable[[RequestOutput], None]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """On which terms a request is served, beside what it is."""

    priority: int = 0  # lower runs earlier, where the policy looks at it
    service: ServiceParams = DEFAULT_SERVICE


class Engine(Profiled):
    """Runs batches of requests. Not thread-safe: one call at a time."""

    def __init__(self, parts: EngineParts) -> None:
        self.tokenizer = parts.tokenizer
        self.max_model_len = parts.max_model_len
        self.model_name = parts.model_name
        self.default_params = served_defaults(parts.default_params)
        self._front = FrontEnd(parts)
        self._profiler = parts.profiler
        self._beam_limits = BeamLimits.of(parts)
        self._num_requests = 0

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        on_update: OnUpdate | None = None,
        terms: Sequence[Terms] | None = None,
    ) -> list[RequestOutput]:
        """Results in the order of the prompts, complete whatever the params' output_kind.

        `on_update` gets every output as it comes, in the shape that its request's output_kind
        asks for. One whose deadline passes ends with finish_reason "abort" and stop_reason
        "deadline", and holds what there was until then.

        Raises:
            RequestError: one prompt or parameter is wrong; then nothing was run.
            CapacityError: a request could never fit; the others are aborted.
            EngineDead: the engine stopped.
        """
        terms = [Terms()] * len(prompts) if terms is None else terms
        for name, given in (("params", params), ("terms", terms)):
            if len(prompts) != len(given):
                raise RequestError(f"{len(prompts)} prompts with {len(given)} {name}; accepted: as many", param=name)
        self._front.check_alive()
        if on_update is None:  # nobody looks at outputs in between
            params = [replace(each, output_kind=OutputKind.FINAL_ONLY) for each in params]
        prepared = self._prepare_all(prompts, params)
        requests = [self._request(*each) for each in zip(prepared, params, terms, strict=True)]
        return self._run(requests, on_update)

    def beam_search(
        self, prompts: Sequence[Prompt], params: BeamSearchParams, terms: Terms | None = None
    ) -> list[RequestOutput]:
        """The most likely sequences after each prompt, best first.

        Raises:
            RequestError, CapacityError, EngineDead: see `generate`.
        """
        self._front.check_alive()
        prepared = self._prepare_all(prompts, [None] * len(prompts))
        runs = [self._beam_run(prompt, params, terms or Terms()) for prompt in prepared]
        try:
            while self._search_round(runs):
                pass
        except BaseException as error:
            for run in runs:
                run.stop(error)
            raise
        finally:
            for run in runs:
                self._front.count(run.summary(self._front.clock.now_s()))
        return [run.output(self.tokenizer, self._front.clock.now_s()) for run in runs]

    def prepare(self, prompt: Prompt, params: SamplingParams | None = None) -> PreparedPrompt:
        """The ids of a prompt, checked and cut as `params` say.

        Raises:
            RequestError: what is wrong with it, or with `params`.
        """
        prepared = self._front.inputs.tokenize(prompt, params)
        if params is not None:
            self._front.inputs.check(params, prepared.bad_word_ids)
        return prepared

    def reset_prefix_cache(self) -> bool:
        """Forget every cached page on every device; False where a request held some.

        Raises:
            EngineDead: the engine stopped.
        """
        answers: list[bool | Exception] = []
        self._front.reset_prefix_cache(answers.append)
        while not answers:
            self._front.wait()
        if isinstance(answers[0], Exception):
            raise answers[0]
        return answers[0]

    def stats(self) -> EngineStats:
        self._front.pump()
        return self._front.stats()

    def close(self) -> None:
        """Stop the engine's threads and release the devices. Safe to call twice."""
        self._front.shut_down()
        self._front.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _prepare_all(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams | None]) -> list[PreparedPrompt]:
        pairs = enumerate(zip(prompts, params, strict=True))
        tokenize = self._front.inputs.tokenize
        return [at_index(lambda p=p, q=q: tokenize(p, q), index, len(prompts)) for index, (p, q) in pairs]

    def _request(self, prompt: PreparedPrompt, params: SamplingParams, terms: Terms) -> tuple[str | None, AddRequest]:
        message = self._front.inputs.request(
            prompt,
            params,
            request_id=self._next_id(),
            arrival_s=self._front.clock.now_s(),
            priority=terms.priority,
            service=terms.service,
        )
        return prompt.text, message

    def _beam_run(self, prompt: PreparedPrompt, params: BeamSearchParams, terms: Terms) -> BeamRun:
        return BeamRun(
            prompt,
            params,
            self._beam_limits,
            self._front.inputs,
            request_id=self._next_id(),
            arrival_s=self._front.clock.now_s(),
            priority=terms.priority,
            service=terms.service,
        )

    def _next_id(self) -> str:
        self._num_requests += 1
        return str(self._num_requests - 1)

    def _search_round(self, runs: Sequence[BeamRun]) -> bool:
        """One more token for every beam of every search; False when all are over."""
        wanted = [run.wanted() for run in runs]
        outputs = iter(self._run([(None, message) for messages in wanted for message in messages], is_counted=False))
        for run, messages in zip(runs, wanted, strict=True):
            if messages:
                run.take([next(outputs) for _ in messages], self._front.clock.now_s())
        return any(wanted)

    def _run(
        self,
        requests: Sequence[tuple[str | None, AddRequest]],
        on_update: OnUpdate | None = None,
        *,
        is_counted: bool = True,
    ) -> list[RequestOutput]:
        run = _Run(on_update)
        try:
            for text, message in requests:
                run.kinds[message.request_id] = message.params.output_kind
                self._front.add(message, text, run.deliver, is_counted=is_counted)
            while not run.is_over:
                self._front.wait()
        finally:
            run.on_update = None
            self._front.abort(run.kinds)
        if run.error is not None:
            raise run.error
        return [run.output(message.request_id) for _, message in requests]


class _Run:
    """The outputs of one batch of requests. Mutable; owned by the call that runs it."""

    def __init__(self, on_update: OnUpdate | None) -> None:
        self.kinds: dict[str, OutputKind] = {}
        self.error: Exception | None = None
        self.on_update = on_update
        self._outputs: dict[str, list[RequestOutput]] = {}  # with DELTA all of them, else the latest
        self._num_finished = 0

    @property
    def is_over(self) -> bool:
        return self.error is not None or self._num_finished == len(self.kinds)

    def output(self, request_id: str) -> RequestOutput:
        return join_deltas(self._outputs[request_id])

    def deliver(self, news: RequestOutput | Exception) -> None:
        if isinstance(news, Exception):
            self.error = self.error or news
            return
        outputs = self._outputs.setdefault(news.request_id, [])
        if self.kinds[news.request_id] is not OutputKind.DELTA:
            outputs.clear()
        outputs.append(news)
        self._num_finished += news.finished
        if self.on_update is not None and self.error is None:
            try:
                self.on_update(news)
            except Exception as error:  # the caller's own: it goes back to the caller
                self.error = error


def at_index(prepare: Callable[[], T], index: int, count: int) -> T:
    """What `prepare` makes of one prompt; where there are several, its error says which one it was.

    Raises:
        RequestError: the prompt is wrong.
    """
    try:
        return prepare()
    except RequestError as error:
        if count == 1 or error.param != "prompt":
            raise
        raise RequestError(f"prompts[{index}]: {error}", param=error.param, code=error.code) from None
