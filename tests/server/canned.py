"""The HTTP routes over an engine that gives prepared outputs, cut into pieces as a test likes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from jaxllm.config.engine import ServerConfig
from jaxllm.engine.inputs import Prompt, TextPrompt, TokensPrompt
from jaxllm.server.app import create_app
from jaxllm.server.state import ServerState
from jaxllm.testing.byte_tokenizer import ByteLevelTokenizer
from jaxllm.tokenizer.chat import ChatTemplate
from jaxllm.tokenizer.detokenize import IncrementalDetokenizer
from jaxllm.types.outputs import CompletionOutput, RequestOutput, TokenLogprob
from jaxllm.types.sampling import BeamSearchParams, OutputKind, SamplingParams

TOKENIZER = ByteLevelTokenizer()

Piece = Mapping[int, int]  # how many tokens of each choice one output brings


@dataclass
class Canned:
    """The choices' token ids, and the pieces that a stream brings them in (what is left comes last)."""

    choices: Sequence[Sequence[int]]
    pieces: Sequence[Piece] = ()
    reasons: Sequence[str] = ()  # "length" where there is none
    stop_reason: str | None = None  # of every choice


class NoMetrics:
    def render(self, accept: str | None = None) -> tuple[bytes, str]:
        del accept
        return b"", "text/plain"


@dataclass
class CannedEngine:
    """A `ServingEngine`. `answers` are by prompt, in the order that prompts are asked in."""

    answers: Sequence[Canned]
    max_model_len: int = 512
    max_logprobs: int = 20
    model_name: str = "canned"
    tokenizer: ByteLevelTokenizer = field(default_factory=ByteLevelTokenizer)
    default_params: Mapping[str, Any] = field(default_factory=dict)
    metrics: NoMetrics = field(default_factory=NoMetrics)
    asked: list[tuple[Prompt, SamplingParams | BeamSearchParams]] = field(default_factory=list)
    terms: list[dict[str, Any]] = field(default_factory=list)  # priority, cache_salt and service of each

    async def stream(
        self, prompt: Prompt, params: SamplingParams, *, request_id: str, **terms: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        self.terms.append(terms)
        canned = self.answers[len(self.asked)]
        self.asked.append((prompt, params))
        run = _Run(request_id, prompt, params, canned)
        if params.output_kind is OutputKind.FINAL_ONLY:
            yield run.final()
            return
        for output in run.deltas():
            await asyncio.sleep(0)  # the others' turn
            yield output

    async def beam_search(
        self, prompt: Prompt, params: BeamSearchParams, *, request_id: str, **terms: Any
    ) -> RequestOutput:
        self.terms.append(terms)
        canned = self.answers[len(self.asked)]
        self.asked.append((prompt, params))
        return _Run(request_id, prompt, SamplingParams(), canned).final()

    async def reset_prefix_cache(self) -> bool:
        return True

    def check_health(self) -> None:
        pass

    def start_profile(self, folder: str) -> None:
        raise NotImplementedError(folder)

    def stop_profile(self) -> Path:
        raise NotImplementedError

    async def close(self) -> None:
        pass


def logprob_of(token_id: int, count: int) -> tuple[TokenLogprob, ...]:
    """Made-up values: each token has its own, and the most likely are those from its successor on."""
    top = [TokenLogprob((token_id + 1 + i) % 250, -0.25 * (i + 1), i + 1) for i in range(count)]
    return (TokenLogprob(token_id, -1.0 - token_id / 64, 100), *top)


class _Run:
    def __init__(self, request_id: str, prompt: Prompt, params: SamplingParams, canned: Canned) -> None:
        self._params = params
        self._canned = canned
        text, ids = _prompt_of(prompt)
        rows = None
        if params.prompt_logprobs is not None:
            rows = (None, *(logprob_of(i, params.prompt_logprobs) for i in ids[1:]))
        self._head = RequestOutput(request_id, text, ids, (), False, prompt_logprobs=rows)

    def final(self) -> RequestOutput:
        return self._output([self._part(index, 0, len(ids)) for index, ids in enumerate(self._canned.choices)], None)

    def deltas(self) -> list[RequestOutput]:
        sizes = [len(ids) for ids in self._canned.choices]
        taken, found = [0] * len(sizes), list[RequestOutput]()
        for piece in (*self._canned.pieces, dict(enumerate(sizes))):
            parts: list[CompletionOutput] = []
            for index, count in piece.items():
                end = min(sizes[index], taken[index] + count)
                if end > taken[index]:
                    parts.append(self._part(index, taken[index], end))
                    taken[index] = end
            if parts:
                found.append(self._output(parts, sum(taken)))
        return found or [self.final()]

    def _output(self, parts: Sequence[CompletionOutput], num_tokens: int | None) -> RequestOutput:
        total = sum(map(len, self._canned.choices))
        count = total if num_tokens is None else num_tokens
        return replace(self._head, outputs=tuple(parts), finished=count == total, num_generated_tokens=count)

    def _part(self, index: int, start: int, end: int) -> CompletionOutput:
        ids = self._canned.choices[index]
        is_last = end == len(ids)
        logprobs = None
        if self._params.logprobs is not None:
            logprobs = tuple(logprob_of(i, self._params.logprobs) for i in ids[start:end])
        reasons = dict(enumerate(self._canned.reasons))
        return CompletionOutput(
            index,
            _text(ids[:end], finished=is_last)[len(_text(ids[:start], finished=False)) :],
            tuple(ids[start:end]),
            logprobs=logprobs,
            finish_reason=reasons.get(index, "length") if is_last else None,
            stop_reason=self._canned.stop_reason if is_last else None,
        )


def _text(ids: Sequence[int], *, finished: bool) -> str:
    reader = IncrementalDetokenizer(TOKENIZER)
    return reader.push(ids) + (reader.finish() if finished else "")


def _prompt_of(prompt: Prompt) -> tuple[str | None, tuple[int, ...]]:
    if isinstance(prompt, TokensPrompt):
        return prompt.text, tuple(prompt.token_ids)
    text = prompt.text if isinstance(prompt, TextPrompt) else prompt
    return text, tuple(TOKENIZER.encode(text))


def ask(
    engine: CannedEngine,
    path: str,
    body: Any,
    *,
    template: str | None = None,
    headers: Mapping[str, str] | None = None,
    **config: Any,
) -> httpx.Response:
    """One request to the routes over `engine`; `config` are fields of `ServerConfig`."""
    chat = ChatTemplate(template or "{% for m in messages %}{{ m.content }}{% endfor %}")

    async def go() -> httpx.Response:
        app = create_app(ServerState(engine, ServerConfig(**config), chat_template=chat))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://canned") as client:
            return await client.post(path, json=body, headers=headers)

    return asyncio.run(go())
