"""Bounds on what one request may make the server do, checked before any work is done."""

from __future__ import annotations

from collections.abc import Sequence, Sized

from starlette.requests import Request

from jaxllm.errors import RequestError
from jaxllm.server.errors import HTTPError

MAX_PROMPTS = 256  # of one completions request; each is a request to the engine
MAX_N = 128  # choices of one prompt
MAX_CHOICES = 1024  # of one request: prompts times n
MAX_ALLOWED_TOKEN_IDS = 2**19  # twice the largest vocabularies
MAX_STOP_STRINGS = 128
MAX_STOP_CHARS = 1024  # of one stop string: the text held back while it may still match
MAX_STOP_TOKEN_IDS = 1024
MAX_BAD_WORDS = 1024
MAX_MESSAGES = 16384
MAX_CACHE_SALT_CHARS = 1024
MAX_TENANT_CHARS = 128
INT32_MAX = 2**31 - 1  # counts travel to the device as int32


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The body, refused as soon as it is known to be longer than `max_bytes`.

    Raises:
        HTTPError: 413, from Content-Length where there is one, else while reading.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > max_bytes:
        raise _too_large(declared, max_bytes)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise _too_large(f"over {max_bytes}", max_bytes)
    return bytes(body)


def _too_large(size: str, max_bytes: int) -> HTTPError:
    return HTTPError(413, f"the body has {size} bytes; accepted: at most {max_bytes}", code="body_too_large")


def check_count(param: str, items: Sized, most: int) -> None:
    if len(items) > most:
        raise RequestError(f"{param} has {len(items)} entries; accepted: at most {most}", param=param)


def check_stop_strings(stop: Sequence[str]) -> None:
    check_count("stop", stop, MAX_STOP_STRINGS)
    for text in stop:
        if len(text) > MAX_STOP_CHARS:
            message = f"stop holds a string of {len(text)} characters; accepted: at most {MAX_STOP_CHARS}"
            raise RequestError(message, param="stop")
