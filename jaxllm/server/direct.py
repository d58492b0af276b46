"""The way past the layers around a route, for the thousands of events of a stream."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

_SCOPE_KEY = "jaxllm.direct_send"


class DirectSend:
    """The outermost middleware: keeps the server's own `send` for `direct_send`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[_SCOPE_KEY] = send
        await self._app(scope, receive, send)


def direct_send(scope: Scope) -> Send:
    """Sends without the layers, each of which would look at every event.

    They add headers and watch how an answer begins and ends: what starts it and what ends it must go
    through them.
    """
    return scope[_SCOPE_KEY]
