"""A server that answers each connection with bytes as they are told, whatever was asked."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Part = bytes | float  # what to send, or seconds to wait
Answer = Sequence[Part]


def chunked(*bodies: Part, status: str = "200 OK") -> list[Part]:
    """A whole answer, each body a piece of its own."""
    head = f"HTTP/1.1 {status}\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    pieces = [b"%x\r\n%b\r\n" % (len(body), body) if isinstance(body, bytes) else body for body in bodies]
    return [head, *pieces, b"0\r\n\r\n"]


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def token(text: str, finish_reason: str | None = None) -> bytes:
    return event(choices=[{"index": 0, "text": text, "finish_reason": finish_reason}])


def usage(prompt_tokens: int, completion_tokens: int) -> bytes:
    return event(choices=[], usage={"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens})


DONE = b"data: [DONE]\n\n"


class OddServer:
    """`answers` are given in turn, the last one again and again. Closes a connection after `per_connection`."""

    def __init__(self, answers: Sequence[Answer], per_connection: int) -> None:
        self._answers = list(answers)
        self._per_connection = per_connection
        self.requests: list[bytes] = []
        self.num_connections = 0
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            for _ in range(self._per_connection):
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"Content-L"))
                self.requests.append(head + await reader.readexactly(length))
                answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
                for part in answer:
                    if isinstance(part, bytes):
                        writer.write(part)
                        await writer.drain()
                    else:
                        await asyncio.sleep(part)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    @property
    def bodies(self) -> list[Any]:
        return [json.loads(request.partition(b"\r\n\r\n")[2] or b"null") for request in self.requests]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextlib.contextmanager
def odd_server(*answers: Answer, per_connection: int = 1000) -> Iterator[OddServer]:
    """In a thread of its own, on a free port."""
    server, ready = OddServer(answers, per_connection), threading.Event()
    stop: list[Callable[[], Any]] = []

    async def run() -> None:
        done = asyncio.Event()
        loop = asyncio.get_running_loop()
        stop.append(lambda: loop.call_soon_threadsafe(done.set))
        listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
        server.port = listener.sockets[0].getsockname()[1]
        ready.set()
        await done.wait()
        listener.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    thread = threading.Thread(target=lambda: asyncio.run(run()), name="odd-server")
    thread.start()
    try:
        assert ready.wait(10)
        yield server
    finally:
        stop[0]()
        thread.join(10)
        assert not thread.is_alive()
