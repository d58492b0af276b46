"""CORS: off by default; pages of named origins alone, and never credentials for everybody."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from jaxllm.config.engine import ServerConfig
from jaxllm.errors import ConfigError
from tests.helpers.scripted_engine import scripted
from tests.server.harness import Running, running

PAGE = "https://app.example"
PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


@pytest.fixture(scope="module")
def named() -> Iterator[Running]:
    with running(scripted(), api_keys=("k",), allowed_origins=(PAGE,), allow_credentials=True) as served:
        yield served


def test_without_origins_no_answer_mentions_cors() -> None:
    with running(scripted()) as served:
        reply = served.get("/v1/models", headers={"origin": PAGE})
        assert not [name for name in reply.headers if name.startswith("access-control")]
        assert served.http.options("/v1/models", headers=PREFLIGHT).status_code == 405


def test_a_preflight_needs_no_key_and_opens_nothing_else(named: Running) -> None:
    reply = named.http.options("/v1/chat/completions", headers=PREFLIGHT)
    assert reply.status_code == 200
    assert reply.headers["access-control-allow-origin"] == PAGE
    assert "POST" in reply.headers["access-control-allow-methods"]
    assert reply.headers["access-control-allow-headers"] == "authorization,content-type"
    assert reply.headers["x-request-id"]
    assert named.http.options("/v1/chat/completions", headers={"origin": PAGE}).status_code == 401
    assert named.http.options("/v1/chat/completions").status_code == 401
    assert named.http.post("/v1/chat/completions", json={}, headers={"origin": PAGE}).status_code == 401


def test_a_page_can_read_answers_and_refusals(named: Running) -> None:
    for headers, status in (({"x-api-key": "k"}, 200), ({}, 401)):
        reply = named.get("/v1/models", headers={"origin": PAGE, **headers})
        assert reply.status_code == status
        assert reply.headers["access-control-allow-origin"] == PAGE
        assert reply.headers["access-control-allow-credentials"] == "true"
        assert "x-request-id" in reply.headers["access-control-expose-headers"].lower()
        assert "Origin" in reply.headers["vary"]


def test_other_origins_are_never_echoed(named: Running) -> None:
    for origin in ("https://evil.example", "https://app.example.evil.example", "http://app.example", "null"):
        reply = named.get("/health", headers={"origin": origin})
        assert "access-control-allow-origin" not in reply.headers
        refused = named.http.options("/v1/models", headers={**PREFLIGHT, "origin": origin})
        assert refused.status_code == 400
        assert "access-control-allow-origin" not in refused.headers


def test_any_origin_gets_a_star_and_no_credentials() -> None:
    with running(scripted(), allowed_origins=("*",), allowed_headers=("x-api-key",)) as served:
        reply = served.get("/health", headers={"origin": PAGE})
        assert reply.headers["access-control-allow-origin"] == "*"
        assert "access-control-allow-credentials" not in reply.headers
        refused = served.http.options("/health", headers=PREFLIGHT)  # it would send Authorization
        assert refused.status_code == 400
        assert served.http.options("/health", headers={**PREFLIGHT, "access-control-request-headers": "x-api-key"})


def test_methods_can_be_named() -> None:
    with running(scripted(), allowed_origins=(PAGE,), allowed_methods=("GET",)) as served:
        assert served.http.options("/v1/models", headers=PREFLIGHT).status_code == 400
        asked = {**PREFLIGHT, "access-control-request-method": "GET"}
        assert served.http.options("/v1/models", headers=asked).status_code == 200


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"allowed_origins": ("*",), "allow_credentials": True}, "allow_credentials"),
        ({"allowed_origins": ("https://app.example/",)}, "allowed_origins"),
        ({"allowed_origins": ("app.example",)}, "allowed_origins"),
        ({"allowed_origins": ('["*"]',)}, "allowed_origins"),
        ({"allowed_origins": ("https://a,https://b",)}, "allowed_origins"),
        ({"allowed_methods": ("get",)}, "allowed_methods"),
        ({"allowed_headers": ("a b",)}, "allowed_headers"),
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_refused(fields: dict[str, object], name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}.*accepted"):
        ServerConfig(**fields)  # type: ignore[arg-type]
