"""The one place where an exception becomes an HTTP status and OpenAI's error body.

    RequestError        400, or 404 for code "model_not_found"
    HTTPError           the status it carries (401, 404 route, 405, 409, 413, 503: shutting down, deadline)
    CapacityError       503 with Retry-After
    EngineDead          503
    GenerationFailed    500
    Interrupted         503 (the drain ended, or the engine died under the request)
    anything else       500, without detail; the traceback goes to the log

Every body is ``{"error": {"message", "type", "param", "code"}}`` and the message is never empty.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxllm.errors import CapacityError, EngineDead, JaxLLMError, RequestError

logger = logging.getLogger("jaxllm.server")

RETRY_AFTER_S = 1
CLIENT_GONE = 499  # nginx's number; nobody is left to read it


class HTTPError(Exception):
    """An answer that is about HTTP itself, not about a prompt."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})


class GenerationFailed(JaxLLMError):
    """The engine gave up on one request: its fault, not the user's (HTTP 500)."""


class Interrupted(JaxLLMError):
    """The server ended a running request: `client_left`, or shutting down, or the engine died."""

    def __init__(self, message: str, *, client_left: bool = False) -> None:
        super().__init__(message)
        self.client_left = client_left


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """What goes on the wire for one exception: as a response, or as an event inside a stream."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict[str, str])

    def body(self) -> bytes:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def response(self) -> Response:
        return Response(self.body(), self.status, self.headers, media_type="application/json")


def shutting_down() -> HTTPError:
    headers = {"Retry-After": str(RETRY_AFTER_S), "Connection": "close"}
    message = "the server is shutting down and takes no new requests"
    return HTTPError(503, message, code="shutting_down", headers=headers)


def deadline_passed(deadline_s: float | None) -> HTTPError:
    """503, not 408 or 504: the client was quick enough and no gateway is late; there was no room in that time."""
    which = f"deadline_s={deadline_s}" if deadline_s is not None else "the server's default deadline_s"
    message = f"{which} passed before the first token; accepted: a longer one, or another time"
    headers = {"Retry-After": str(RETRY_AFTER_S)}
    return HTTPError(503, message, param="deadline_s", code="deadline_exceeded", headers=headers)


# Errors whose status and code are always the same.
_FIXED: dict[type[JaxLLMError], tuple[int, str]] = {
    CapacityError: (503, "overloaded"),
    EngineDead: (503, "engine_dead"),
    GenerationFailed: (500, "generation_failed"),
    Interrupted: (503, "interrupted"),
}


def reply_for(error: BaseException) -> ErrorReply:
    """The reply of any exception; an unexpected one is logged with its traceback and says nothing more."""
    message = str(error) or type(error).__name__
    if isinstance(error, RequestError):
        status = 404 if error.code == "model_not_found" else 400
        return ErrorReply(status, message, _type_of(status), error.param, error.code)
    if isinstance(error, HTTPError):
        return ErrorReply(error.status, message, _type_of(error.status), error.param, error.code, error.headers)
    for kind, (status, code) in _FIXED.items():
        if isinstance(error, kind):
            headers = {"Retry-After": str(RETRY_AFTER_S)} if kind is CapacityError else {}
            return ErrorReply(status, message, _type_of(status), None, code, headers)
    logger.error("a request failed in a way that was not foreseen", exc_info=error)
    return ErrorReply(500, "internal error; the server's log has the details", _type_of(500))


def _type_of(status: int) -> str:
    named = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    return named.get(status, "invalid_request_error" if status < 500 else "server_error")


async def on_error(_request: Request, error: Exception) -> Response:
    """Starlette's exception handler for every error that a route raises."""
    if isinstance(error, ClientDisconnect) or (isinstance(error, Interrupted) and error.client_left):
        return Response(status_code=CLIENT_GONE)
    return reply_for(error).response()


class Answered:
    """Middleware that takes an exception as dealt with where its answer is out.

    Starlette raises an unforeseen one again behind the 500; the connection would be closed for it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_whole = False

        async def watch(message: Message) -> None:
            nonlocal is_whole
            await send(message)
            is_whole = message["type"] == "http.response.body" and not message.get("more_body", False)

        try:
            await self._app(scope, receive, watch)
        except Exception:
            if not is_whole:
                raise


async def on_http_exception(request: Request, error: Exception) -> Response:
    """The router's own refusals: no such path, or a method that the path does not have."""
    assert isinstance(error, HTTPException)  # Starlette calls this handler for nothing else
    where = f"{request.method} {request.url.path}"
    if error.status_code == 404:
        reply = ErrorReply(404, f"{where}: no such route", _type_of(404), None, "unknown_url")
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        message = f"{where}: method not allowed; accepted: {allowed}"
        reply = ErrorReply(405, message, _type_of(405), None, "method_not_allowed", {"Allow": allowed})
    else:
        message = error.detail or HTTPStatus(error.status_code).phrase
        reply = ErrorReply(error.status_code, message, _type_of(error.status_code), headers=dict(error.headers or {}))
    return reply.response()
