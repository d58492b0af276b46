"""Routes for whoever watches the server: load balancers, dashboards, curious people."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

import jaxllm
from jaxllm.server.state import state_of


async def health(request: Request) -> Response:
    """200 with an empty body while new requests are taken; else 503 with the reason."""
    state_of(request).check_accepting()
    return Response()


async def version(_request: Request) -> Response:
    return Response(msgspec.json.encode({"version": jaxllm.__version__}), media_type="application/json")


async def metrics(request: Request) -> Response:
    text, content_type = state_of(request).engine.metrics.render(request.headers.get("accept"))
    return Response(text, headers={"Content-Type": content_type})


async def root(request: Request) -> Response:
    about = {
        "name": "jaxllm",
        "version": jaxllm.__version__,
        "routes": sorted({request.scope["root_path"] + getattr(route, "path", "") for route in request.app.routes}),
    }
    return Response(msgspec.json.encode(about), media_type="application/json")
