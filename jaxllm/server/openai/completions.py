"""POST /v1/completions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from jaxllm.server.openai import replies
from jaxllm.server.openai.body import read_request
from jaxllm.server.openai.call import Call, context_of, open_call, respond
from jaxllm.server.openai.logprobs import Position, TextOffsets, prompt_logprobs, text_logprobs
from jaxllm.server.openai.params import completion_params
from jaxllm.server.openai.prompts import cut_from_the_right, parse_prompts
from jaxllm.server.schema import CompletionRequest
from jaxllm.server.state import state_of
from jaxllm.tokenizer.base import Tokenizer
from jaxllm.tokenizer.detokenize import IncrementalDetokenizer
from jaxllm.types.outputs import CompletionOutput, RequestOutput


async def create(request: Request) -> Response:
    state = state_of(request)
    body = await read_request(state, request, CompletionRequest)
    state.resolve_model(body.model)
    asked = completion_params(body, context_of(state))
    prompts = parse_prompts(body.prompt, body.add_special_tokens is not False)
    if body.truncation_side == "right":
        prompts, asked = await asyncio.to_thread(cut_from_the_right, state.engine, prompts, asked)
    call = open_call(state, request, body, prompts, asked, prefix="cmpl")
    answer = TextAnswer(call, state.engine.tokenizer, body)
    return await respond(state, request, call, answer, stream=bool(body.stream))


@dataclass(frozen=True, slots=True)
class _ShownPrompt:
    """What every choice of a prompt repeats of it."""

    text: str  # empty without echo
    logprobs: replies.TextLogprobs | None  # of an echoed prompt
    table: replies.PromptLogprobs | UnsetType


class TextAnswer:
    """Text completions, whole or in chunks. Prompt i's choices have the indices from i * n on."""

    def __init__(self, call: Call, tokenizer: Tokenizer, body: CompletionRequest) -> None:
        self._call = call
        self._tokenizer = tokenizer
        self._echoes = bool(body.echo)
        self._skips_special = body.skip_special_tokens is not False
        self._spaces = body.spaces_between_special_tokens is not False
        self._prompts: dict[int, _ShownPrompt] = {}
        self._offsets: dict[int, TextOffsets] = {}  # by choice

    def whole(self, outputs: Mapping[int, RequestOutput]) -> replies.TextCompletion:
        choices = tuple(
            self._choice(index, output, completion)
            for index, output in sorted(outputs.items())
            for completion in output.outputs
        )
        return replies.TextCompletion(**self._call.head, choices=choices, usage=replies.usage_of(outputs.values()))

    def opening(self, index: int, output: RequestOutput) -> Iterator[replies.TextCompletion]:
        """The echo of every choice, and what was asked to be given back of the prompt."""
        call = self._call
        if self._echoes or call.returns_token_ids or call.returns_prompt_text:
            for i in range(call.n):
                yield self._chunk(self._prompt_choice(index, i, output))

    def progress(self, index: int, output: RequestOutput) -> Iterator[replies.TextCompletion]:
        for completion in output.outputs:
            number = index * self._call.n + completion.index
            ids = completion.token_ids if self._call.returns_token_ids and completion.token_ids else UNSET
            logprobs = self._logprobs(number, completion.token_ids, completion.logprobs)
            if completion.text or logprobs is not None or ids is not UNSET:
                yield self._chunk(
                    replies.TextChoice(index=number, text=completion.text, logprobs=logprobs, token_ids=ids)
                )
            if completion.finish_reason is not None:
                yield self._chunk(_finish(number, completion))

    def text_chunk(self, text: str) -> tuple[replies.TextCompletion, str]:
        return self._chunk(replies.TextChoice(index=0, text=text)), "text"

    def last(self, usage: replies.Usage) -> replies.TextCompletion:
        return replies.TextCompletion(**self._call.head, choices=(), usage=usage)

    def _chunk(self, choice: replies.TextChoice) -> replies.TextCompletion:
        return replies.TextCompletion(**self._call.head, choices=(choice,))

    def _choice(self, index: int, output: RequestOutput, completion: CompletionOutput) -> replies.TextChoice:
        """A whole choice: what it shows of the prompt, and then the output."""
        choice = self._prompt_choice(index, completion.index, output)
        choice.text += completion.text
        choice.logprobs = _joined(
            choice.logprobs, self._logprobs(choice.index, completion.token_ids, completion.logprobs)
        )
        choice.finish_reason = completion.finish_reason
        choice.stop_reason = completion.stop_reason
        if self._call.returns_token_ids:
            choice.token_ids = completion.token_ids
        choice.prompt_logprobs = self._prompts[index].table
        return choice

    def _prompt_choice(self, index: int, sibling: int, output: RequestOutput) -> replies.TextChoice:
        """A choice that shows the prompt alone: echoed, with its log probabilities if asked for."""
        shown = self._prompts.get(index)
        if shown is None:
            shown = self._prompts[index] = self._shown_prompt(output)
        number = index * self._call.n + sibling
        self._offsets[number] = TextOffsets(self._detokenizer(), start=len(shown.text))
        return replies.TextChoice(
            index=number,
            text=shown.text,
            logprobs=shown.logprobs,
            prompt_token_ids=self._call.prompt_ids(output),
            prompt_text=self._call.returned_text(output, self._tokenizer),
        )

    def _shown_prompt(self, output: RequestOutput) -> _ShownPrompt:
        call, positions = self._call, output.prompt_logprobs
        text, logprobs, table = "", None, UNSET
        if self._echoes:
            text = call.prompt_text(output, self._tokenizer, skip_special_tokens=self._skips_special)
        if self._echoes and call.logprobs is not None and positions:
            offsets = TextOffsets(self._detokenizer())
            logprobs = text_logprobs(call.logprobs, output.prompt_token_ids, positions, offsets)
        if call.prompt_logprobs is not None and positions:
            table = prompt_logprobs(self._tokenizer, positions, call.prompt_logprobs)
        return _ShownPrompt(text, logprobs, table)

    def _logprobs(
        self, number: int, ids: Sequence[int], positions: Sequence[Position] | None
    ) -> replies.TextLogprobs | None:
        if self._call.logprobs is None or not positions:
            return None
        if number not in self._offsets:
            self._offsets[number] = TextOffsets(self._detokenizer())
        return text_logprobs(self._call.logprobs, ids, positions, self._offsets[number])

    def _detokenizer(self) -> IncrementalDetokenizer:
        return IncrementalDetokenizer(self._tokenizer, self._skips_special, self._spaces)


def _joined(first: replies.TextLogprobs | None, second: replies.TextLogprobs | None) -> replies.TextLogprobs | None:
    if first is None or second is None:
        return first or second
    return replies.TextLogprobs(
        first.text_offset + second.text_offset,
        first.token_logprobs + second.token_logprobs,
        first.tokens + second.tokens,
        first.top_logprobs + second.top_logprobs,
    )


def _finish(number: int, completion: CompletionOutput) -> replies.TextChoice:
    return replies.TextChoice(
        index=number, text="", finish_reason=completion.finish_reason, stop_reason=completion.stop_reason
    )
