"""X-Request-Id: taken from the client where it is sane, made up otherwise, always sent back."""

from __future__ import annotations

import random
import re

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_ACCEPTED = re.compile(r"[A-Za-z0-9._:\-]{1,128}")
_HEADER = b"x-request-id"
_SCOPE_KEY = "jaxllm.request_id"


class RequestIds:
    """Middleware that gives each request an id and echoes it as a response header."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        # Unlike uuid4 it asks the system once, not for each id: a name is no secret.
        self._random = random.Random()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = accepted_id(_sent_id(scope)) or f"{self._random.getrandbits(128):032x}"
        header = (_HEADER, request_id.encode())
        scope[_SCOPE_KEY] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                others = (pair for pair in message.get("headers", ()) if pair[0].lower() != _HEADER)
                message = {**message, "headers": [*others, header]}
            await send(message)

        await self._app(scope, receive, send_with_id)


def _sent_id(scope: Scope) -> str | None:
    """The first such header. Names come in lower case."""
    for name, value in scope["headers"]:
        if name == _HEADER:
            return value.decode("latin-1")
    return None


def accepted_id(value: str | None) -> str | None:
    """The client's id, unless it could not safely stand in a header, a log line or a JSON id."""
    return value if value and _ACCEPTED.fullmatch(value) else None


def request_id_of(request: Request) -> str:
    return request.scope[_SCOPE_KEY]
