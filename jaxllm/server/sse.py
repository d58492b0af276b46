"""Server-sent events: framing, and a response that can still answer with a proper status.

The event format is WHATWG's: ``data: JSON`` and an empty line; OpenAI ends with ``data: [DONE]``.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxllm.server.errors import Interrupted, reply_for
from jaxllm.server.state import ServerState

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def event(data: Any) -> bytes:
    return b"data: " + _encode(data) + b"\n\n"


class EventStream(Response):
    """Sends events as they come, `DONE` last.

    The status waits for the first event: until then an error is raised, to become an ordinary
    response; after it, an error is one ``data: {"error": …}`` event before `DONE`. A client that
    leaves closes `events`, whatever it is waiting for.
    """

    media_type = "text/event-stream"

    def __init__(self, state: ServerState, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__()
        self._state = state
        self._events = events
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._events), self._state.guard(receive):
                async for data in self._events:
                    if not self._started:
                        self._started = True
                        await send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            last = DONE
        except Exception as error:
            if not self._started:
                raise
            if isinstance(error, Interrupted) and error.client_left:
                return
            last = b"data: " + reply_for(error).body() + b"\n\n" + DONE
        await send({"type": "http.response.body", "body": last, "more_body": False})
