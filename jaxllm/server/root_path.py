"""Serving under a path of a proxy, whether or not the proxy takes that path away."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class RootPath:
    """Middleware that gives routing and the key guard one truth: ASGI's root_path, and a path below it."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        """`root_path` is empty, or starts with a slash and does not end with one."""
        self._app = app
        self._root = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            scope = {**scope, "root_path": self._root, "path": self._below_root(scope["path"])}
        await self._app(scope, receive, send)

    def _below_root(self, path: str) -> str:
        if path == self._root:
            return path + "/"
        return path if path.startswith(self._root + "/") else self._root + path


def route_path(scope: Scope) -> str:
    """The path that the router matches; inside `RootPath` alone."""
    return scope["path"].removeprefix(scope["root_path"])
