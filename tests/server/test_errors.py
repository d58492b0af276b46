"""Errors: OpenAI's shape on every route, and the exception classes of OpenAI's own client."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.server.harness import Running

CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client


@pytest.mark.parametrize(
    "body",
    [b"", b"  ", b"{", b'{"messages": [}', b"[1]", b"null", b"3", b'"x"', b"\xff\xfe", b'{"a": NaN}', b"[" * 100_000],
    ids=lambda body: repr(body[:12]),
)
@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_api_02_a_body_that_is_no_json_object_is_400(server: Running, path: str, body: bytes) -> None:
    reply = server.http.post(path, content=body, headers=JSON)
    assert reply.status_code == 400
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
    assert reply.json()["error"]["message"]


def test_api_02_a_wrong_content_type_is_400(server: Running) -> None:
    body = b'{"messages": [{"role": "user", "content": "hi"}]}'
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
        reply = server.http.post(CHAT, content=body, headers={"content-type": kind})
        assert reply.status_code == 400
        assert "application/json" in reply.json()["error"]["message"]
    for kind in ("application/json; charset=utf-8", "APPLICATION/JSON"):
        assert server.http.post(CHAT, content=body, headers={"content-type": kind}).status_code == 200


def test_api_02_an_unknown_field_is_taken_and_logged_once(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "jaxllm.server"):
        for _ in range(3):
            assert server.chat("hi", a_new_toy={"x": 1}).status_code == 200
    assert sum("a_new_toy" in record.getMessage() for record in caplog.records) == 1


def test_api_02_a_half_surrogate_is_400(server: Running) -> None:
    body = b'{"messages": [{"role": "user", "content": "\\ud800"}]}'
    assert server.http.post(CHAT, content=body, headers=JSON).status_code == 400


@pytest.mark.parametrize(
    "path", ["/", "/v2", "/v1/chat", "/v1/chat/completions/", "//v1/models", "/V1/models", "/docs"]
)
def test_an_unknown_path_is_404_in_openais_shape(server: Running, path: str) -> None:
    reply = server.http.post(path, json={}) if path == CHAT + "/" else server.get(path)
    if path == "/":
        assert reply.json()["name"] == "jaxllm"
        return
    assert reply.status_code == 404
    assert reply.json()["error"]["code"] == "unknown_url"


def test_a_wrong_method_is_405_and_names_the_right_one(server: Running) -> None:
    reply = server.get(CHAT)
    assert (reply.status_code, reply.headers["allow"]) == (405, "POST")
    assert "POST" in reply.json()["error"]["message"]


def test_sec_02_a_body_too_large_is_413_before_it_is_read(server: Running) -> None:
    size = server.state.config.max_body_bytes + 1
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {size}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=5) as raw:
        raw.sendall(head.encode() + b"{")
        answer = raw.recv(65536)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"body_too_large" in answer


def test_sec_02_a_body_without_length_is_413_once_it_is_too_long(server: Running) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(server.state.config.max_body_bytes // 2**20 + 2):
            yield b" " * 2**20

    reply = server.http.post(CHAT, content=chunks(), headers=JSON)
    assert reply.status_code == 413
    assert server.chat("hi").status_code == 200


def test_api_02_openais_client_raises_its_own_classes(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "hi", "name": "ann"}]
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-none", messages=messages)
    assert unknown.value.code == "model_not_found"
    assert unknown.value.param == "model"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-none", prompt="hi")
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="tiny", messages=messages, response_format={"type": "nonsense"})  # type: ignore[arg-type]
    assert wrong.value.param == "response_format"
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="tiny", messages=[], stream=True)


def test_openais_client_streams_what_it_gets_whole(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "unicode"}]
    whole = client.chat.completions.create(model="tiny", messages=messages)
    with client.chat.completions.stream(
        model="tiny", messages=messages, stream_options={"include_usage": True}
    ) as stream:
        streamed = stream.get_final_completion()
    assert streamed.choices[0].message.content == whole.choices[0].message.content
    assert streamed.choices[0].finish_reason == whole.choices[0].finish_reason == "stop"
    assert streamed.usage is not None
    assert whole.usage is not None
    assert streamed.usage.completion_tokens == whole.usage.completion_tokens
    text = client.completions.create(model="alias/of-tiny", prompt="hi")
    pieces = client.completions.create(model="alias/of-tiny", prompt="hi", stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == text.choices[0].text
    assert text.model == "alias/of-tiny"


def test_openais_client_lists_and_finds_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "alias/of-tiny"]
    assert client.models.retrieve("alias/of-tiny").owned_by == "jaxllm"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-none")


def test_request_ids_are_taken_where_sane_and_always_sent_back(server: Running) -> None:
    reply = server.post(CHAT, {"messages": [{"role": "user", "content": "hi"}]}, headers={"x-request-id": "abc-1"})
    assert reply.headers["x-request-id"] == "abc-1"
    assert reply.json()["id"] == "chatcmpl-abc-1"
    assert server.get("/nowhere", headers={"x-request-id": "abc-2"}).headers["x-request-id"] == "abc-2"
    for insane in ("a" * 500, "a b", 'quote"'):
        assert server.get("/health", headers={"x-request-id": insane}).headers["x-request-id"] != insane
    assert server.chat("hi", request_id="mine").json()["id"] == "chatcmpl-mine"


def test_health_version_and_metrics(server: Running) -> None:
    assert (server.get("/health").status_code, server.get("/health").content) == (200, b"")
    assert server.get("/ping").status_code == server.http.post("/ping").status_code == 200
    assert server.http.head("/").status_code == server.http.head("/metrics").status_code == 200
    assert server.get("/version").json()["version"]
    assert "text/plain" in server.get("/metrics").headers["content-type"]
    assert server.gauge("num_requests_running") == 0


@pytest.mark.parametrize("field", ["response_format", "guided_json", "structured_outputs", "content", "role"])
def test_sec_02_json_nested_up_to_the_parsers_limit_is_never_an_inner_error(server: Running, field: str) -> None:
    for depth in range(880, 1000):  # somewhere here lies what can be decoded but not written as text
        nested = '{"a":' * depth + "1" + "}" * depth
        role, content, more = '"user"', '"hi"', ""
        if field == "content":
            content = nested
        elif field == "role":
            role = nested
        else:
            more = f', "{field}": {nested}'
        body = f'{{"messages": [{{"role": {role}, "content": {content}}}], "max_tokens": 1{more}}}'
        reply = server.http.post(CHAT, content=body, headers=JSON)
        assert reply.status_code == 400, depth
        assert len(reply.json()["error"]["message"]) < 400


def test_sec_02_a_message_repeats_no_long_value(server: Running) -> None:
    for more in ({"tool_choice": "x" * 100_000}, {"structured_outputs": {"json": "x" * 100_000}}):
        reply = server.chat("hi", **more)
        assert reply.status_code == 400
        assert len(reply.json()["error"]["message"]) < 400
