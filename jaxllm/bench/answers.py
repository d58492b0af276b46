"""What a streamed answer says: when its tokens came, how many they were, and whether it is whole.

Read after the request has ended, from the pieces that the client kept with their times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from jaxllm.bench.dataset_files import BenchRequest
from jaxllm.bench.http_client import Reply

_MAX_ERROR = 300  # characters


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


@dataclass(slots=True)
class Answer:
    """One request as the client saw it; moments are those of `time.perf_counter`, seconds."""

    request: BenchRequest
    due_s: float
    sent_s: float
    ended_s: float
    chunk_times: list[float] = field(default_factory=list[float])  # of the chunks that carry tokens
    last_s: float = 0.0  # the last token, or the word that no more come
    text: str = ""
    num_prompt_tokens: int | None = None  # as the server counts
    num_output_tokens: int | None = None
    num_cached_tokens: int = 0
    is_finished: bool = False  # a reason to finish, or [DONE], was given
    error: str | None = None

    @property
    def has_usage(self) -> bool:
        return self.num_output_tokens is not None

    @property
    def output_tokens(self) -> int:
        """As the server counts; where it does not say, its chunks."""
        return len(self.chunk_times) if self.num_output_tokens is None else self.num_output_tokens

    @property
    def prompt_tokens(self) -> int:
        return self.num_prompt_tokens or self.request.num_prompt_tokens or 0

    @property
    def ttft_s(self) -> float:
        """Sent until the first token."""
        return self.chunk_times[0] - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds a token after the first; None where there is no second."""
        num_more = self.output_tokens - 1
        return (self.last_s - self.chunk_times[0]) / num_more if num_more > 0 else None

    @property
    def itl_s(self) -> list[float]:
        """Between chunks, each of which may carry several tokens."""
        return [after - before for before, after in zip(self.chunk_times, self.chunk_times[1:], strict=False)]

    @property
    def e2el_s(self) -> float:
        return self.ended_s - self.sent_s


def read_answer(request: BenchRequest, due_s: float, reply: Reply) -> Answer:
    """Never raises: an answer that is wrong says so."""
    answer = Answer(request, due_s, reply.sent_s, reply.ended_s, error=reply.error)
    if reply.status not in (0, 200):
        answer.error = f"HTTP {reply.status}: {_refusal(reply.body)}"
        return answer
    for at_s, line in _lines(reply.pieces):
        if line.startswith(b"data:"):
            _take(answer, at_s, line[5:].strip())
    if not answer.chunk_times and answer.last_s:  # a token without text, and the end with it
        answer.chunk_times.append(answer.last_s)
    if answer.error is None:
        answer.error = _what_is_missing(answer)
    return answer


def _what_is_missing(answer: Answer) -> str | None:
    if not answer.is_finished:
        return "the stream ended without a finish_reason or [DONE]"
    return None if answer.chunk_times else "the answer holds no tokens"


def _take(answer: Answer, at_s: float, payload: bytes) -> None:
    if payload == b"[DONE]":
        answer.is_finished = True
        return
    try:
        event = _decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        answer.error = answer.error or f"an event is no chunk of a completion: {error}"
        return
    if event.error is not None:
        answer.error = answer.error or f"the server says: {_message_of(event.error)}"
    if event.usage is not None:
        _count(answer, event.usage)
    for choice in event.choices:
        _take_choice(answer, at_s, choice)


def _count(answer: Answer, usage: _Usage) -> None:
    answer.num_prompt_tokens = usage.prompt_tokens
    answer.num_output_tokens = usage.completion_tokens
    details = usage.prompt_tokens_details
    answer.num_cached_tokens = (details.cached_tokens if details is not None else None) or 0


def _take_choice(answer: Answer, at_s: float, choice: _Choice) -> None:
    is_last = choice.finish_reason is not None
    answer.is_finished = answer.is_finished or is_last
    text = _text(choice)
    # A token may carry no text yet: half a character, or what may become a stop string. A chat's
    # first chunk says whose turn it is, and carries no token.
    is_empty_token = text == "" and not is_last and (choice.delta is None or choice.delta.role is None)
    if text or is_empty_token:
        answer.chunk_times.append(at_s)
        answer.text += text or ""
    if text or is_empty_token or is_last:
        answer.last_s = at_s


def _text(choice: _Choice) -> str | None:
    """Of a completion or a chat; whatever a model writes counts, also thoughts and calls of tools."""
    delta = choice.delta
    if delta is None:
        return choice.text
    written = [part for part in (delta.reasoning or delta.reasoning_content, delta.content) if part is not None]
    calls = str(delta.tool_calls) if delta.tool_calls else ""
    return "".join(written) + calls if written or calls else None


def _lines(pieces: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """Lines with the moment at which each was whole."""
    rest = b""
    for at_s, data in pieces:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield at_s, line
    if rest:
        yield pieces[-1][0], rest


def _refusal(body: bytes) -> str:
    try:
        value: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return " ".join(body[:_MAX_ERROR].decode(errors="replace").split())
    return _message_of(value.get("error", value) if isinstance(value, dict) else value)


def _message_of(error: Any) -> str:
    text = error.get("message", error) if isinstance(error, dict) else error
    return str(text)[:_MAX_ERROR]
