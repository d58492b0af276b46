"""A client that streams completions from any OpenAI-compatible server, and takes little time itself.

While requests run it only notes when bytes came; what they say is read after the last one ended.
A client that parses as it goes takes a core from the server it measures.
"""

from __future__ import annotations

import asyncio
import gc
import json
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any
from urllib.parse import urlsplit

from scripts.bench.workload import Request, Workload

_TICK_S = 0.02
_LAST_CHUNK = b"0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go, and what every body holds beside the prompt."""

    url: str  # without /v1
    model: str
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(slots=True)
class Answer:
    """One request as the client saw it; seconds since the workload began."""

    request: Request
    sent_s: float
    ended_s: float
    token_times: list[float] = field(default_factory=list[float])  # of the chunks that carry text
    text: str = ""
    usage: dict[str, Any] = field(default_factory=dict[str, Any])
    error: str | None = None

    @property
    def num_output_tokens(self) -> int:
        return self.usage.get("completion_tokens") or len(self.token_times)


@dataclass(frozen=True, slots=True)
class Run:
    answers: tuple[Answer, ...]
    wall_s: float
    max_lag_s: float  # the most that this client was late
    cpu_s: float  # of the client


@dataclass(slots=True, eq=False)
class _Exchange(asyncio.Protocol):
    """A connection for one request. The server closes it, or the last chunk ends it."""

    message: bytes
    done: asyncio.Future[None]
    blocks: list[tuple[float, bytes]] = field(default_factory=list[tuple[float, bytes]])
    _transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._transport.write(self.message)

    def data_received(self, data: bytes) -> None:
        self.blocks.append((time.perf_counter(), data))
        if data.endswith(_LAST_CHUNK):
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)


def run_workload(target: Target, workload: Workload, timeout_s: float) -> Run:
    """Send every request of `workload`; one that fails or takes longer than `timeout_s` is an answer with an error."""
    messages = [_message(target, request) for request in workload.requests]
    gc.collect()
    gc.disable()
    cpu_s = time.process_time()
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            exchanges, wall_s, max_lag_s = runner.run(_run(target, workload, messages, timeout_s))
    finally:
        gc.enable()
    cpu_s = time.process_time() - cpu_s
    answers = tuple(_read(r, exchange) for r, exchange in zip(workload.requests, exchanges, strict=True))
    return Run(answers, wall_s, max_lag_s, cpu_s)


def _loop_factory() -> Any:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _message(target: Target, request: Request) -> bytes:
    url = urlsplit(target.url)
    body = {
        "model": target.model,
        "prompt": request.prompt,
        "max_tokens": request.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **target.extra,
    }
    data = json.dumps(body).encode()
    head = (
        f"POST {url.path.rstrip('/')}/v1/completions HTTP/1.1\r\nHost: {url.netloc}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nAccept: text/event-stream\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


@dataclass(frozen=True, slots=True)
class _Done:
    sent_s: float
    ended_s: float
    blocks: list[tuple[float, bytes]]  # seconds since the workload began
    error: str | None


async def _run(
    target: Target, workload: Workload, messages: list[bytes], timeout_s: float
) -> tuple[list[_Done], float, float]:
    start_s = time.perf_counter()
    turns = asyncio.Semaphore(workload.concurrency or len(messages) or 1)
    lags = [0.0]
    watch = asyncio.create_task(_watch(lags))

    async def one(request: Request, message: bytes) -> _Done:
        if workload.concurrency is None:
            await asyncio.sleep(start_s + request.arrival_s - time.perf_counter())
        async with turns:
            return await _exchange(target, message, start_s, timeout_s)

    jobs = [one(request, message) for request, message in zip(workload.requests, messages, strict=True)]
    done = await asyncio.gather(*jobs)
    wall_s = time.perf_counter() - start_s
    watch.cancel()
    return done, wall_s, max(lags)


async def _watch(lags: list[float]) -> None:
    """How late this client runs: where that is much, the times it measured say little."""
    while True:
        start_s = time.perf_counter()
        await asyncio.sleep(_TICK_S)
        lags[0] = max(lags[0], time.perf_counter() - start_s - _TICK_S)


async def _exchange(target: Target, message: bytes, start_s: float, timeout_s: float) -> _Done:
    loop = asyncio.get_running_loop()
    url = urlsplit(target.url)
    exchange = _Exchange(message, loop.create_future())
    sent_s, error = time.perf_counter() - start_s, None
    transport = None
    try:
        async with asyncio.timeout(timeout_s):
            transport, _ = await loop.create_connection(lambda: exchange, url.hostname or "", url.port or 80)
            await exchange.done
    except (OSError, TimeoutError) as failure:
        error = f"{type(failure).__name__}: {failure}" if str(failure) else f"no end within {timeout_s:g} s"
    finally:
        if transport is not None:
            transport.abort()
    blocks = [(at - start_s, data) for at, data in exchange.blocks]
    return _Done(sent_s, time.perf_counter() - start_s, blocks, error)


def _read(request: Request, done: _Done) -> Answer:
    answer = Answer(request, done.sent_s, done.ended_s, error=done.error)
    try:
        head, pieces = _pieces(done.blocks)
        status = int(head.split(maxsplit=2)[1])
    except (ValueError, IndexError):
        answer.error = answer.error or "the connection was closed without a whole answer"
        return answer
    if status != 200:
        text = b"".join(data for _, data in pieces).decode(errors="replace")
        answer.error = f"HTTP {status}: {text[:300]}"
        return answer
    for at, line in _lines(pieces):
        if line.startswith(b"data:") and line != b"data: [DONE]":
            _take(answer, at, json.loads(line[5:]))
    if answer.error is None and not answer.token_times:
        answer.error = "an answer without text"
    return answer


def _take(answer: Answer, at: float, event: dict[str, Any]) -> None:
    if event.get("error"):
        answer.error = str(event["error"])[:300]
    answer.usage = event.get("usage") or answer.usage
    for choice in event.get("choices") or ():
        text = choice.get("text")
        # A token may carry no text yet: a part of a character, or of what could be a stop string.
        if text or (text == "" and not choice.get("finish_reason")):
            answer.token_times.append(at)
            answer.text += text


def _pieces(blocks: list[tuple[float, bytes]]) -> tuple[bytes, list[tuple[float, bytes]]]:
    """The head of an HTTP answer, and its body as pieces with the time at which each was whole.

    Raises:
        ValueError: the head or a chunk is not whole.
    """
    raw = b"".join(data for _, data in blocks)
    ends = list(accumulate(len(data) for _, data in blocks))
    at = raw.index(b"\r\n\r\n") + 4
    head = raw[:at]
    if b"transfer-encoding: chunked" not in head.lower():
        starts = [0, *ends]
        bodies = [(when, data[max(0, at - start) :]) for start, (when, data) in zip(starts, blocks, strict=False)]
        return head, [piece for piece in bodies if piece[1]]
    pieces: list[tuple[float, bytes]] = []
    while True:
        line_end = raw.index(b"\r\n", at)
        size = int(raw[at:line_end].split(b";")[0], 16)
        if size == 0:
            return head, pieces
        at = line_end + 2 + size
        pieces.append((blocks[bisect_left(ends, at)][0], raw[line_end + 2 : at]))
        at += 2


def _lines(pieces: list[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    rest = b""
    for at, data in pieces:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield at, line.strip()
    if rest:
        yield pieces[-1][0], rest.strip()
