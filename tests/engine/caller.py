"""A caller whose request is fed by hand, deltas in and what it is shown out; and waiting for an engine to be idle."""

from __future__ import annotations

import time
from typing import Any

from jaxllm.engine.engine import Engine
from jaxllm.engine.messages import AddRequest, StepDeltas, TokenDelta
from jaxllm.engine.outputs import OutputProcessor
from jaxllm.engine.siblings import split_siblings
from jaxllm.metrics.stats import CoreStats, FinishedRequest
from jaxllm.testing.byte_tokenizer import ByteLevelTokenizer
from jaxllm.testing.logprobs import scripted_columns
from jaxllm.types.outputs import RequestOutput
from jaxllm.types.request import FinishReason
from jaxllm.types.sampling import OutputKind, SamplingParams
from jaxllm.types.step import PromptLogprobs

EOS = 257


def check_idle(engine: Engine, num_pages: int = 64, limit_s: float = 5.0) -> None:
    """Soon nothing is open and all pages are free. A step in flight holds them a little longer than its requests."""
    deadline_s = time.monotonic() + limit_s
    while True:
        stats = engine.stats()
        now = (stats.core.num_running, stats.core.num_waiting, stats.core.num_free_pages, stats.num_open_requests)
        if now == (0, 0, num_pages, 0):
            return
        assert time.monotonic() < deadline_s, f"running, waiting, free pages, open: {now}"
        time.sleep(0.002)


class Recorder:
    """An observer that keeps all it is told."""

    def __init__(self) -> None:
        self.first_tokens: list[float] = []
        self.inter_tokens: list[float] = []
        self.ended: list[FinishedRequest] = []

    def first_token(self, seconds: float) -> None:
        self.first_tokens.append(seconds)

    def inter_token(self, seconds: float) -> None:
        self.inter_tokens.append(seconds)

    def step(self, num_tokens: int) -> None:
        del num_tokens

    def finished(self, request: FinishedRequest) -> None:
        self.ended.append(request)


class Caller:
    """Feeds one request's sequences and keeps what it is given. Core ids are a#1, a#1/1, a#1/2, …"""

    def __init__(self, prompt_ids: tuple[int, ...] = (1, 2), **params: Any) -> None:
        self.outputs: list[RequestOutput] = []
        self.errors: list[Exception] = []
        self.dropped: list[str] = []
        self.observer = Recorder()
        self.processor = OutputProcessor(ByteLevelTokenizer(), self.observer)
        self.params = SamplingParams(**{"output_kind": OutputKind.DELTA, "max_tokens": 99, **params})
        message = AddRequest("a", prompt_ids, self.params, 0.0, 1)
        self.core_ids = [sibling.request_id for sibling in split_siblings(message, "a#1")]
        self.processor.open(message, self.core_ids, "hi", self._deliver)

    def _deliver(self, news: RequestOutput | Exception) -> None:
        if isinstance(news, Exception):
            self.errors.append(news)
        else:
            self.outputs.append(news)

    def feed(self, *steps: bytes | int, finish: FinishReason | None = None, now_s: float = 1.0) -> Caller:
        """Each step is some bytes or one id of the first sequence; `finish` comes with the last."""
        for number, step in enumerate(steps, 1):
            self.step({0: step}, {0: finish} if finish is not None and number == len(steps) else {}, now_s=now_s)
        return self

    def step(
        self,
        tokens: dict[int, bytes | int],
        finish: dict[int, FinishReason] | None = None,
        *,
        scored: PromptLogprobs | None = None,
        now_s: float = 1.0,
    ) -> Caller:
        """One step of several sequences, by index; with log probabilities as the scripted executor would answer."""
        ends = finish or {}
        deltas = tuple(
            self._delta(index, tokens.get(index, b""), ends.get(index), scored) for index in {**tokens, **ends}
        )
        self.dropped += self.processor.process(StepDeltas(deltas, CoreStats(), 1), now_s)
        return self

    def _delta(
        self, index: int, step: bytes | int, finish: FinishReason | None, scored: PromptLogprobs | None
    ) -> TokenDelta:
        ids = (step,) if isinstance(step, int) else tuple(step)
        asks = self.params.logprobs is not None or self.params.logprob_token_ids is not None
        columns = scripted_columns(ids, self.params.logprobs or 0, self.params.logprob_token_ids) if asks else None
        return TokenDelta(
            self.core_ids[index],
            ids,
            finish,
            num_cached=1,
            logprobs=columns,
            prompt_logprobs=scored if index == 0 else None,
        )

    @property
    def texts(self) -> list[str]:
        return [output.outputs[0].text for output in self.outputs]

    def text(self, index: int) -> str:
        """All that was shown of one sequence, with output_kind DELTA."""
        return "".join(c.text for output in self.outputs for c in output.outputs if c.index == index)

    @property
    def end(self) -> tuple[str | None, int | str | None]:
        last = self.outputs[-1]
        assert last.finished and not any(o.finished for o in self.outputs[:-1])
        return last.outputs[0].finish_reason, last.outputs[0].stop_reason
