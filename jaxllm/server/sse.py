"""Server-sent events: framing, and a response that can still answer with a proper status.

The event format is WHATWG's: ``data: JSON`` and an empty line; OpenAI ends with ``data: [DONE]``.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxllm.server.direct import direct_send
from jaxllm.server.errors import Interrupted, reply_for
from jaxllm.server.state import ServerState

Push = Callable[[bytes], bool]

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def event(data: Any) -> bytes:
    return b"data: " + _encode(data) + b"\n\n"


class TextEvent:
    """An event of which only one text changes: the rest is written once."""

    def __init__(self, data: Any, field: str, text: str) -> None:
        """`data` has `text`, a plain word, in the field called `field`, and in no other of that name."""
        # A quote within JSON text has a backslash before it, so no other text can look like this.
        around = event(data).split(f'"{field}":"{text}"'.encode())
        if len(around) != 2:
            raise ValueError(f"{field}={text!r} is not once in {data}")
        self._before = around[0] + f'"{field}":'.encode()
        self._after = around[1]

    def __call__(self, text: str) -> bytes:
        return self._before + _encode(text) + self._after


class EventStream(Response):
    """Sends events as they come, `DONE` last.

    The status waits for the first event: until then an error is raised, to become an ordinary
    response; after it, an error is one ``data: {"error": …}`` event before `DONE`. A client that
    leaves closes `events`, whatever it is waiting for.

    `events` is given a function that sends an event at once, from outside its task. It is to be called
    only while the next event is waited for, and answers False where the event has to come as that:
    before the first one, and while the connection takes no more.
    """

    media_type = "text/event-stream"

    def __init__(self, state: ServerState, events: Callable[[Push], AsyncGenerator[bytes, None]]) -> None:
        super().__init__()
        self._state = state
        self._events = events
        self._send: Send | None = None  # of events, once the answer has begun

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._events(self._push)) as events, self._state.guard(receive):
                async for data in events:
                    if self._send is None:
                        await send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
                        self._send = direct_send(scope)
                    await self._send({"type": "http.response.body", "body": data, "more_body": True})
            last = DONE
        except Exception as error:
            if self._send is None:
                raise
            if isinstance(error, Interrupted) and error.client_left:
                return
            last = b"data: " + reply_for(error).body() + b"\n\n" + DONE
        await send({"type": "http.response.body", "body": last, "more_body": False})

    def _push(self, data: bytes) -> bool:
        return self._send is not None and _sent_at_once(
            self._send({"type": "http.response.body", "body": data, "more_body": True})
        )


def _sent_at_once(sending: Awaitable[None]) -> bool:
    """Run what `send` gave up to its end, unless it has to wait or fails.

    uvicorn waits, where it must, before it writes anything: what did not end has written nothing.
    """
    if not isinstance(sending, Coroutine):
        return False
    try:
        sending.send(None)
    except StopIteration:
        return True
    except Exception:  # it will come again, to whoever can deal with it
        return False
    sending.close()
    return False
