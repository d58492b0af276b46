"""Forgetting the prefix cache on demand, under vLLM's name: after new weights, or before a measurement."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from jaxllm.server.errors import HTTPError
from jaxllm.server.state import state_of

_IN_USE = "the prefix cache was not reset, because requests hold pages of it; accepted: when none waits or runs"


async def reset_prefix_cache(request: Request) -> Response:
    """Forget every cached page on every device; 409 while requests hold pages."""
    state = state_of(request)
    state.check_alive()
    if not await state.engine.reset_prefix_cache():
        raise HTTPError(409, _IN_USE, code="prefix_cache_in_use")
    return Response(msgspec.json.encode({"status": "reset"}), media_type="application/json")
