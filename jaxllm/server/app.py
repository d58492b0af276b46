"""The routes, and nothing else."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.routing import Route

from jaxllm.errors import JaxLLMError
from jaxllm.server import health
from jaxllm.server.auth import KeyGuard, open_paths
from jaxllm.server.errors import HTTPError, on_error, on_http_exception
from jaxllm.server.openai import chat, completions, models
from jaxllm.server.request_ids import RequestIds
from jaxllm.server.state import ServerState

ROUTES = (
    Route("/", health.root, methods=["GET"]),
    Route("/health", health.health, methods=["GET"]),
    Route("/ping", health.health, methods=["GET", "POST"]),
    Route("/version", health.version, methods=["GET"]),
    Route("/metrics", health.metrics, methods=["GET"]),
    Route("/v1/models", models.list_models, methods=["GET"]),
    Route("/v1/models/{model:path}", models.get_model, methods=["GET"]),
    Route("/v1/completions", completions.create, methods=["POST"]),
    Route("/v1/chat/completions", chat.create, methods=["POST"]),
)


def create_app(state: ServerState) -> Starlette:
    """The ASGI application over one engine."""
    app = Starlette(
        routes=list(ROUTES),
        middleware=[
            Middleware(RequestIds),
            Middleware(KeyGuard, api_keys=state.config.api_keys, open_paths=open_paths(state.config)),
        ],
        exception_handlers={
            HTTPException: on_http_exception,
            HTTPError: on_error,
            JaxLLMError: on_error,
            ClientDisconnect: on_error,
            Exception: on_error,
        },
    )
    app.router.redirect_slashes = False  # a redirect would answer where the route table does not
    app.state.server = state
    return app
