"""The way past the router for the routes that nearly all requests ask for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxllm.server.errors import on_error
from jaxllm.server.root_path import route_path

Handler = Callable[[Request], Awaitable[Response]]


class Shortcut:
    """Middleware that calls the handler of an exact POST path itself; the rest goes to the router.

    Starlette's layers around a handler (errors twice, the router, the route) cost a tenth of a short
    request. What they do for a handler is done here: an error before the answer begins becomes the
    answer, one after it ends the connection.
    """

    def __init__(self, app: ASGIApp, starlette: Starlette, handlers: Mapping[str, Handler]) -> None:
        self._app = app
        self._starlette = starlette
        self._handlers = dict(handlers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        handler = self._handlers.get(route_path(scope)) if is_post else None
        if handler is None:
            await self._app(scope, receive, send)
            return
        scope["app"] = self._starlette  # where `state_of` finds the server
        request = Request(scope, receive, send)
        has_begun = False

        async def noted(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            response = await handler(request)
            await response(scope, receive, noted)
        except Exception as error:
            if has_begun:
                raise
            await (await on_error(request, error))(scope, receive, send)
