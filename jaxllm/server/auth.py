"""API keys: every path but a short open list needs one, whatever the router makes of the path."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxllm.config.engine import ServerConfig
from jaxllm.server.errors import HTTPError, reply_for
from jaxllm.server.root_path import route_path

_SCOPE_KEY = "jaxllm.key_name"
OPEN_PATHS = frozenset({"/", "/health", "/ping", "/version", "/metrics"})


def open_paths(config: ServerConfig) -> frozenset[str]:
    """Exact paths that need no key."""
    return OPEN_PATHS - {"/metrics"} if config.metrics_need_key else OPEN_PATHS


class KeyGuard:
    """Middleware that answers 401 before routing, so that a new route is guarded from its birth.

    A key comes as ``Authorization: Bearer KEY`` or ``x-api-key: KEY``. Hashes are compared, in
    constant time and against every key, so that the time tells neither a prefix nor which key.
    """

    def __init__(self, app: ASGIApp, *, api_keys: Sequence[str], open_paths: frozenset[str]) -> None:
        self._app = app
        self._hashes = [_sha256(key.encode()) for key in api_keys]
        self._names = [f"key{index}" for index in range(len(api_keys))]  # says nothing of the key itself
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._hashes or scope["type"] == "lifespan" or route_path(scope) in self._open_paths:
            await self._app(scope, receive, send)
            return
        number = self._known(_offered_keys(Headers(scope=scope)))
        if number is not None:
            if len(self._hashes) > 1:
                scope[_SCOPE_KEY] = self._names[number]
            await self._app(scope, receive, send)
            return
        message = "missing or wrong API key; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
        refusal = HTTPError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        await reply_for(refusal).response()(scope, receive, send)

    def _known(self, offered: list[str]) -> int | None:
        """The number of the first known key, or None."""
        found: list[int] = []
        for key in offered:
            digest = _sha256(key.encode("latin-1"))
            found += [number for number, known in enumerate(self._hashes) if hmac.compare_digest(digest, known)]
        return min(found, default=None)


def key_name_of(request: Request) -> str | None:
    """What a request's API key is called: "key" and its place among the keys; None where there are no several."""
    return request.scope.get(_SCOPE_KEY)


def _offered_keys(headers: Headers) -> list[str]:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    offered = [token.strip()] if scheme.lower() == "bearer" else []
    if "x-api-key" in headers:
        offered.append(headers["x-api-key"])
    return offered


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
