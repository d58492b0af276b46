"""API keys: every path but a short open list needs one, whatever the router makes of the path."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxllm.config.engine import ServerConfig
from jaxllm.server.errors import HTTPError, reply_for
from jaxllm.server.root_path import route_path

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
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._hashes or scope["type"] == "lifespan" or route_path(scope) in self._open_paths:
            await self._app(scope, receive, send)
            return
        if self._knows_any(_offered_keys(Headers(scope=scope))):
            await self._app(scope, receive, send)
            return
        message = "missing or wrong API key; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
        refusal = HTTPError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        await reply_for(refusal).response()(scope, receive, send)

    def _knows_any(self, offered: list[str]) -> bool:
        found = False
        for key in offered:
            digest = _sha256(key.encode("latin-1"))
            for known in self._hashes:
                found |= hmac.compare_digest(digest, known)
        return found


def _offered_keys(headers: Headers) -> list[str]:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    offered = [token.strip()] if scheme.lower() == "bearer" else []
    if "x-api-key" in headers:
        offered.append(headers["x-api-key"])
    return offered


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
