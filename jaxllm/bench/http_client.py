"""HTTP/1.1 for the load client: kept connections, and of each answer no more than when its bytes came.

A client that parses what it gets while it measures takes a core from the server beside it, and
then measures itself. Here a piece of body costs a call of a C parser and a clock.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, urlsplit

from jaxllm.errors import ConfigError

_PORTS = {"http": 80, "https": 443}


@dataclass(slots=True)
class Reply:
    """One answer. Moments are those of `time.perf_counter`, seconds."""

    sent_s: float
    status: int = 0  # 0: no answer came
    pieces: list[tuple[float, bytes]] = field(default_factory=list[tuple[float, bytes]])  # of the body, as they came
    ended_s: float = 0.0
    error: str | None = None  # why the answer is not whole

    @property
    def body(self) -> bytes:
        return b"".join(data for _, data in self.pieces)


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is."""

    scheme: str
    host: str
    port: int
    path: str  # before the endpoint's; no slash at its end

    @staticmethod
    def of(url: str) -> Address:
        """Raises: ConfigError: this is no URL."""
        wrong = ConfigError(f"base_url={url!r} is no address; accepted: http://HOST:PORT")
        try:
            parts: SplitResult = urlsplit(url if "//" in url else f"http://{url}")
            port = parts.port
        except ValueError:
            raise wrong from None
        if parts.scheme not in _PORTS or not parts.hostname or not url.isprintable() or not url.isascii():
            raise wrong
        return Address(parts.scheme, parts.hostname, port or _PORTS[parts.scheme], parts.path.rstrip("/"))

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.path}"

    def message(self, method: str, endpoint: str, body: bytes, headers: Mapping[str, str]) -> bytes:
        """The bytes of a request, made before the clock runs."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [
            f"{method} {self.path}{endpoint} HTTP/1.1",
            f"Host: {host}:{self.port}",
            *(f"{name}: {value}" for name, value in headers.items()),
            f"Content-Length: {len(body)}",
        ]
        return "\r\n".join([*lines, "", ""]).encode() + body


class HttpClient:
    """Sends messages over connections that it keeps. Mutable; owned by one event loop."""

    def __init__(self, address: Address, *, timeout_s: float, verify: bool = True) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._tls = _tls(verify) if address.scheme == "https" else None
        self._idle: list[_Connection] = []  # the one used last is taken first

    async def send(self, message: bytes) -> Reply:
        """The answer to a message. Whatever goes wrong is said in it; nothing is raised."""
        reply = Reply(time.perf_counter())
        connection: _Connection | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                connection = await self._exchange(message, reply)
        except TimeoutError:
            reply.error = f"no end within {self._timeout_s:g} s"
        except (OSError, UnicodeError) as failure:
            reply.error = str(failure) or type(failure).__name__
        reply.ended_s = time.perf_counter()
        if connection is not None and connection.is_reusable:
            self._idle.append(connection)
        elif connection is not None:
            connection.close()
        return reply

    async def _exchange(self, message: bytes, reply: Reply) -> _Connection:
        while self._idle:
            kept = self._idle.pop()
            await kept.exchange(message, reply)
            if not kept.was_closed_early:
                return kept
            # The server had let go of it before the message arrived: that is no failed request.
            reply.error, reply.sent_s = None, time.perf_counter()
        connection = await self._connect()
        await connection.exchange(message, reply)
        return connection

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        _, protocol = await loop.create_connection(
            _Connection, self._address.host, self._address.port, ssl=self._tls, server_hostname=self._server_name()
        )
        return protocol

    def _server_name(self) -> str | None:
        return self._address.host if self._tls else None

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()


class _Connection(asyncio.Protocol):
    """One connection with one request at a time. Mutable; owned by the exchange that runs on it."""

    def __init__(self) -> None:
        self._transport: Any = None
        self._reply: Reply | None = None
        self._parser: Any = None
        self._done: asyncio.Future[None] | None = None
        self._is_whole = False
        self._is_lost = False
        self._keeps_open = False
        self._ends_with_connection = True  # the body, where no header says how long it is

    async def exchange(self, message: bytes, reply: Reply) -> None:
        import httptools

        self._reply, self._is_whole, self._ends_with_connection = reply, False, True
        if self._is_lost:
            return
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(message)
        try:
            await self._done
        except asyncio.CancelledError:
            self.close()
            raise

    @property
    def is_reusable(self) -> bool:
        return self._is_whole and self._keeps_open and not self._is_lost

    @property
    def was_closed_early(self) -> bool:
        """Whether the connection ended before an answer began."""
        return self._is_lost and self._reply is not None and self._reply.status == 0

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        import httptools

        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, AttributeError) as error:  # also: bytes that nobody asked for
            self._end(f"this is no HTTP answer: {error}")
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        began = self._reply is not None and self._reply.status != 0
        if began and self._ends_with_connection and exc is None:
            self.on_message_complete()
        elif not self._is_whole:
            self._end(f"the connection was lost: {exc}" if exc else "the connection was closed before the answer ended")

    # What the parser calls.

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._ends_with_connection = False

    def on_headers_complete(self) -> None:
        if self._reply is not None:
            self._reply.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._reply is not None:
            self._reply.pieces.append((time.perf_counter(), body))

    def on_message_complete(self) -> None:
        self._is_whole = True
        self._keeps_open = bool(self._parser.should_keep_alive())  # it forgets, later
        self._end(None)

    def _end(self, error: str | None) -> None:
        """The first end counts: what follows on a connection that is being closed says nothing."""
        if self._done is None or self._done.done():
            return
        if self._reply is not None and error is not None:
            self._reply.error = error
        self._done.set_result(None)


def _tls(verify: bool) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


async def ask(client: HttpClient, message: bytes) -> tuple[int, bytes]:
    """A short answer's status and body.

    Raises:
        OSError: no whole answer came.
    """
    reply = await client.send(message)
    if reply.error is not None:
        raise OSError(reply.error)
    return reply.status, reply.body


__all__ = ["Address", "HttpClient", "Reply", "ask"]
