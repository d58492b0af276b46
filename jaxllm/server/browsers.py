"""CORS: which pages of other origins a browser lets call this server. Off unless origins are named."""

from __future__ import annotations

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from jaxllm.config.engine import ServerConfig

_READABLE = ("X-Request-Id", "Retry-After")  # response headers that a page's script may read


def with_cors(app: ASGIApp, config: ServerConfig) -> ASGIApp:
    """`app`, answering preflights itself, before any key is asked for: browsers send none with them.

    `ServerConfig` refuses credentials for every origin, so no origin that was not named is echoed
    together with them.
    """
    if not config.allowed_origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=config.allowed_origins,
        allow_methods=config.allowed_methods,
        allow_headers=config.allowed_headers,
        allow_credentials=config.allow_credentials,
        expose_headers=_READABLE,
    )
