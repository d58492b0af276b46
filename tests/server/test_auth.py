"""SEC-03: with a key set, nothing but the short open list answers without it."""

from __future__ import annotations

import hmac
from collections.abc import Iterator
from hmac import compare_digest
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import openai
import pytest

from jaxllm.server.app import ROUTES
from jaxllm.server.auth import OPEN_PATHS
from tests.helpers.scripted_engine import scripted
from tests.server.harness import Running, running

KEY = "s3cret-ключ"
VARIANTS = ("{}", "/{}", "{}/", "{}//", "/.{}", "{}%2f", "{}?key=1", "{};x", "{}/../health", "/health/..{}")


@pytest.fixture(scope="module")
def guarded() -> Iterator[Running]:
    with running(scripted(), api_keys=("other", KEY)) as served:
        yield served


def _wrong_headers() -> list[dict[str, bytes]]:
    key = KEY.encode()
    return [
        {},
        {"authorization": b"Bearer wrong"},
        {"authorization": b"Bearer"},
        {"authorization": key},
        {"authorization": b"Basic " + key},
        {"authorization": b"Bearer " + key + b"x"},
        {"authorization": b"Bearer " + key[:-1]},
        {"x-api-key": b"wrong"},
        {"x-api-key": b""},
    ]


def test_sec_03_every_route_outside_the_open_list_needs_the_key(guarded: Running) -> None:
    closed = [route for route in ROUTES if route.path not in OPEN_PATHS]
    assert len(closed) >= 4
    for route in closed:
        path = route.path.replace("{model:path}", "scripted")
        for method in route.methods or ():
            for headers in _wrong_headers():
                reply = guarded.http.request(method, path, headers=headers)
                assert reply.status_code == 401, (method, path, headers)
    assert guarded.get("/v1/models").json()["error"]["type"] == "authentication_error"


def test_sec_03_the_open_list_is_exactly_this(guarded: Running) -> None:
    assert set(OPEN_PATHS) == {"/", "/health", "/ping", "/version", "/metrics"}
    for path in OPEN_PATHS:
        assert guarded.get(path).status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/models", "/v1/chat/completions", "/tokenize", "/nowhere", "/docs", "/v1/MODELS", "/V1/models"),
        *("/%76%31/models", "/v1%2Fmodels", "/v1/models%00", "/health%2f..%2fv1/models", "/health%00", "/%2fhealth"),
    ],
)
def test_sec_03_path_variants_and_unknown_paths_need_the_key(guarded: Running, path: str) -> None:
    for variant in VARIANTS:
        url = guarded.url + variant.format(path)  # urllib sends the path as it is
        for method in ("GET", "POST", "OPTIONS", "HEAD"):
            with pytest.raises(HTTPError) as refused, urlopen(Request(url, method=method), timeout=5):
                pass
            refused.value.close()
            assert refused.value.code == 401, (method, url)


@pytest.mark.parametrize("path", ["/HEALTH", "//health", "/health/", "/metrics/x"])
def test_sec_03_variants_of_open_paths_are_not_open(guarded: Running, path: str) -> None:
    assert guarded.http.get(guarded.url + path).status_code == 401


def test_both_headers_and_every_key_are_accepted(guarded: Running) -> None:
    for headers in ({"authorization": b"Bearer " + KEY.encode()}, {"x-api-key": KEY.encode()}, {"x-api-key": b"other"}):
        assert guarded.get("/v1/models", headers=headers).status_code == 200
    assert guarded.get("/v1/models", headers={"authorization": b"bearer other"}).status_code == 200


def test_openais_client_is_refused_with_its_own_class(guarded: Running) -> None:
    with openai.OpenAI(base_url=guarded.url + "/v1", api_key="wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError):
            client.models.list()
        allowed = client.with_options(api_key="other")
        assert [model.id for model in allowed.models.list()] == ["scripted"]


def test_metrics_can_be_put_behind_the_key() -> None:
    with running(scripted(), api_keys=("k",), metrics_need_key=True) as served:
        assert served.get("/metrics").status_code == 401
        assert served.get("/metrics", headers={"x-api-key": "k"}).status_code == 200
        assert served.get("/health").status_code == 200


@pytest.mark.parametrize("offered", [b"first", b"second", b"third", b"wrong"])
def test_sec_03_every_key_is_compared_in_constant_time_whichever_matches(
    monkeypatch: pytest.MonkeyPatch, offered: bytes
) -> None:
    sizes: list[tuple[int, int]] = []

    def watched(one: bytes, other: bytes) -> bool:
        sizes.append((len(one), len(other)))
        return compare_digest(one, other)

    with running(scripted(), api_keys=("first", "second", "third")) as served:
        monkeypatch.setattr(hmac, "compare_digest", watched)
        status = served.get("/v1/models", headers={"x-api-key": offered}).status_code
    assert status == (401 if offered == b"wrong" else 200)
    assert sizes == [(32, 32)] * 3  # hashes, so no length is told either
