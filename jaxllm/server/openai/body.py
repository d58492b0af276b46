"""Reading a JSON request and writing a JSON answer: the same for every route."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from jaxllm.errors import RequestError
from jaxllm.server import limits
from jaxllm.server.request_ids import accepted_id, request_id_of
from jaxllm.server.schema import GenerationRequest, RequestT, decode_request
from jaxllm.server.state import ServerState

_encode = msgspec.json.Encoder().encode


async def read_request(state: ServerState, request: Request, schema: type[RequestT]) -> RequestT:
    """The decoded body of a request for new work.

    Raises:
        RequestError: content type, JSON or a field is wrong.
        HTTPError: the body is too large, or the server is shutting down.
        EngineDead: the engine no longer works.
    """
    state.check_accepting()
    _check_content_type(request.headers.get("content-type"))
    body = await limits.read_body(request, state.config.max_body_bytes)
    return decode_request(body, schema, state.unknown_fields)


def _check_content_type(value: str | None) -> None:
    if value is None:
        return
    kind = value.partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise RequestError(f"Content-Type {value[:80]!r} is not accepted; send application/json")


def visible_id(prefix: str, request: Request, body: GenerationRequest) -> str:
    """The `id` of the answer: the client's own request id, where it sent one, behind OpenAI's prefix."""
    return f"{prefix}-{accepted_id(body.request_id) or request_id_of(request)}"


def json_response(reply: msgspec.Struct) -> Response:
    return Response(_encode(reply), media_type="application/json")
