"""The way past the router answers as the router would."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.testclient import TestClient

from jaxllm.errors import RequestError
from jaxllm.server.shortcut import Shortcut


class BreaksWhileSending(Response):
    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise OSError("half way")


class BreaksBeforeSending(Response):
    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        raise RequestError("no such model", param="model")


async def hot(request: Request) -> Response:
    assert request.app.state.name == "served"
    match (await request.body()).decode():
        case "refuse":
            raise RequestError("n=0; accepted: at least 1", param="n")
        case "bug":
            raise ZeroDivisionError
        case "late refusal":
            return BreaksBeforeSending()
        case "half":
            return BreaksWhileSending()
        case text:
            return PlainTextResponse(f"hot {text}")


async def cold(_request: Request) -> Response:
    return PlainTextResponse("cold")


@pytest.fixture
def client() -> TestClient:
    app = Starlette(routes=[Route("/hot", cold, methods=["GET"]), Route("/cold", cold, methods=["POST"])])
    app.router.redirect_slashes = False
    app.state.name = "served"

    async def rooted(scope: Any, receive: Any, send: Any) -> None:
        await Shortcut(app, app, {"/hot": hot})({**scope, "root_path": ""}, receive, send)

    return TestClient(rooted)


def test_a_post_to_the_exact_path_goes_to_the_handler_and_all_else_to_the_router(client: TestClient) -> None:
    assert client.post("/hot", content="x").text == "hot x"
    assert client.get("/hot").text == "cold"
    assert client.post("/cold").text == "cold"
    assert client.post("/hot/").status_code == 404


@pytest.mark.parametrize(
    ("body", "status", "part"),
    [("refuse", 400, "n=0"), ("late refusal", 400, "no such model"), ("bug", 500, "error")],
)
def test_an_error_before_the_answer_begins_becomes_the_answer(
    client: TestClient, body: str, status: int, part: str
) -> None:
    answer = client.post("/hot", content=body)
    assert answer.status_code == status
    assert part in answer.text


def test_an_error_after_the_answer_began_ends_the_connection(client: TestClient) -> None:
    with pytest.raises(OSError, match="half way"):
        client.post("/hot", content="half")
