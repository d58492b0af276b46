"""The routes, and nothing else."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import ASGIApp

from jaxllm.errors import JaxLLMError
from jaxllm.server import caching, health, tokens
from jaxllm.server.auth import KeyGuard, open_paths
from jaxllm.server.browsers import with_cors
from jaxllm.server.direct import DirectSend
from jaxllm.server.errors import Answered, HTTPError, on_error, on_http_exception
from jaxllm.server.openai import chat, completions, models
from jaxllm.server.profiling import profiling_routes
from jaxllm.server.request_ids import RequestIds
from jaxllm.server.root_path import RootPath
from jaxllm.server.shortcut import Shortcut
from jaxllm.server.state import ServerState

ROUTES = (  # looked through in this order for each request
    Route("/v1/chat/completions", chat.create, methods=["POST"]),
    Route("/v1/completions", completions.create, methods=["POST"]),
    Route("/", health.root, methods=["GET"]),
    Route("/health", health.health, methods=["GET"]),
    Route("/ping", health.health, methods=["GET", "POST"]),
    Route("/version", health.version, methods=["GET"]),
    Route("/metrics", health.metrics, methods=["GET"]),
    Route("/v1/models", models.list_models, methods=["GET"]),
    Route("/v1/models/{model:path}", models.get_model, methods=["GET"]),
    Route("/tokenize", tokens.tokenize, methods=["POST"]),
    Route("/detokenize", tokens.detokenize, methods=["POST"]),
    Route("/reset_prefix_cache", caching.reset_prefix_cache, methods=["POST"]),
)
HOT = {"/v1/chat/completions": chat.create, "/v1/completions": completions.create}  # in ROUTES too: for other methods


def create_app(state: ServerState) -> ASGIApp:
    """The ASGI application over one engine.

    The layers stand around Starlette, not inside it, so that they also see its answer to an error that
    nobody foresaw. From the outside in: the root path, request ids, CORS (browsers ask without a key
    whether they may ask), keys, the end of exceptions that are answered.
    """
    config = state.config
    app = Starlette(
        routes=[*ROUTES, *profiling_routes(config)],
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
    routed = Shortcut(Answered(app), app, HOT)
    guarded = KeyGuard(routed, api_keys=config.api_keys, open_paths=open_paths(config))
    return DirectSend(RootPath(RequestIds(with_cors(guarded, config)), config.root_path))
