"""The client beside servers that do as they please."""

from __future__ import annotations

import time

import pytest

from jaxllm.bench.http_client import Address, HttpClient, Reply
from jaxllm.bench.load import run_in_loop
from jaxllm.errors import ConfigError
from tests.bench.odd_server import OddServer, chunked, odd_server


def send(server: OddServer, count: int = 1, timeout_s: float = 10.0) -> list[Reply]:
    """One after the other."""

    async def run() -> list[Reply]:
        address = Address.of(server.url)
        client = HttpClient(address, timeout_s=timeout_s)
        replies = [await client.send(address.message("POST", "/x", b"{}", {"A": "b"})) for _ in range(count)]
        client.close()
        return replies

    return run_in_loop(run())


def test_a_connection_is_kept_and_pieces_have_ascending_times() -> None:
    with odd_server(chunked(b"one", b"two", b"three")) as server:
        replies = send(server, 3)
        assert server.num_connections == 1
        assert server.requests[0].startswith(b"POST /x HTTP/1.1\r\nHost: 127.0.0.1:")
        assert b"\r\nA: b\r\n" in server.requests[0]
    for reply in replies:
        assert (reply.status, reply.error, reply.body) == (200, None, b"onetwothree")
        times = [reply.sent_s, *(at for at, _ in reply.pieces), reply.ended_s]
        assert times == sorted(times)
    assert replies[-1].ended_s <= time.perf_counter()


def test_a_kept_connection_that_the_server_let_go_is_no_failure() -> None:
    with odd_server(chunked(b"hi"), per_connection=1) as server:
        replies = send(server, 4)
        assert server.num_connections >= 4
    assert [(reply.status, reply.error) for reply in replies] == [(200, None)] * 4


def test_a_body_with_a_length_or_with_none_at_all() -> None:
    with_length = [b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", b"he", b"llo"]
    until_the_end = [b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nhello"]
    with odd_server(with_length, until_the_end, per_connection=1) as server:
        assert [(reply.error, reply.body) for reply in send(server, 2)] == [(None, b"hello")] * 2


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ([b""], "closed before the answer ended"),
        (chunked(b"hi")[:-1], "closed before the answer ended"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhi"], "closed before the answer ended"),
        ([b"SMTP ready\r\n\r\n"], "this is no HTTP answer"),
    ],
)
def test_an_answer_that_is_not_whole_is_an_error(answer: list[bytes], words: str) -> None:
    with odd_server(answer, per_connection=1) as server:
        (reply,) = send(server)
    assert reply.error is not None
    assert words in reply.error


def test_a_server_that_never_answers_is_given_up() -> None:
    with odd_server([0.5], per_connection=1) as server:
        (reply,) = send(server, timeout_s=0.05)
    assert (reply.status, reply.error) == (0, "no end within 0.05 s")


def test_nobody_at_the_address() -> None:
    with odd_server(chunked(b"")) as server:
        gone = OddServer([], 0)
        gone.port = server.port
    (reply,) = send(gone)
    assert reply.error is not None
    assert "refused" in reply.error.lower()


def test_addresses() -> None:
    assert Address.of("http://h:1/v/") == Address("http", "h", 1, "/v")
    assert Address.of("h") == Address("http", "h", 80, "")
    assert Address.of("https://h").port == 443
    assert Address.of("http://[::1]:8000").url == "http://[::1]:8000"
    for url in ("ftp://x", "http://h:abc", "http://h:99999", "http://[::1", "", "http://a\nb", "http://é"):
        with pytest.raises(ConfigError, match="is no address; accepted"):
            Address.of(url)
