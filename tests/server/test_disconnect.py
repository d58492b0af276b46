"""SCH-01: a client that leaves takes its work with it, in every state, and harms nobody else."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from tests.helpers.scripted_engine import Settings, script, scripted
from tests.server.harness import Running, running, wait_until

SETTINGS = Settings(num_pages=257, max_num_seqs=2, max_model_len=512)
FREE = SETTINGS.num_pages - 1


@pytest.fixture(scope="module")
def slow() -> Iterator[Running]:
    with running(scripted(default=script("slowly ", repeat=True), step_s=0.02), SETTINGS) as served:
        yield served


def _open(served: Running, path: str, body: dict[str, Any]) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", int(served.url.rpartition(":")[2])), timeout=5)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


def _is_idle(served: Running) -> bool:
    pages, running_now, waiting = (
        served.gauge(name) for name in ("num_free_pages", "num_requests_running", "num_requests_waiting")
    )
    return (pages, running_now, waiting, served.state.num_running) == (FREE, 0, 0, 0)


CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 400}
TEXT = {"prompt": "hi", "max_tokens": 400}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {**CHAT, "stream": True}),
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {**TEXT, "stream": True}),
        ("/v1/completions", TEXT),
        ("/v1/completions", {**TEXT, "prompt": ["a", "b", "c", "d"]}),
        ("/v1/completions", {**TEXT, "prompt": ["a", "b", "c", "d"], "stream": True}),
    ],
    ids=["chat-stream", "chat", "text-stream", "text", "texts", "texts-stream"],
)
def test_sch_01_leaving_while_running_gives_all_pages_back(slow: Running, path: str, body: dict[str, Any]) -> None:
    with _open(slow, path, body) as connection:
        wait_until(lambda: slow.gauge("num_requests_running") >= 1, 3, "it runs")
        if body.get("stream"):
            assert b"data: " in connection.recv(4096) + connection.recv(4096)
    wait_until(lambda: _is_idle(slow), 2, "everything is free again")


@pytest.mark.parametrize("stream", [False, True])
def test_sch_01_leaving_while_queued_harms_no_running_request(slow: Running, stream: bool) -> None:
    with ThreadPoolExecutor(2) as threads:
        others = [threads.submit(slow.chat, "stay", max_tokens=60) for _ in range(2)]
        wait_until(lambda: slow.gauge("num_requests_running") == 2, 3, "two requests fill the engine")
        with _open(slow, "/v1/chat/completions", {**CHAT, "stream": stream}):
            wait_until(lambda: slow.gauge("num_requests_waiting") == 1, 3, "the third waits")
        wait_until(lambda: slow.gauge("num_requests_waiting") == 0, 2, "it waits no more")
        assert slow.state.num_running == 2
        for other in others:
            assert other.result(10).json()["usage"]["completion_tokens"] == 60
    wait_until(lambda: _is_idle(slow), 2, "everything is free again")


# How each client asks: the body, how many requests of others run beside it, and what tells that it is in.
KINDS: dict[str, tuple[dict[str, Any], int, str, int]] = {
    "stream": ({**TEXT, "stream": True}, 1, "num_requests_running", 2),
    "whole": (TEXT, 1, "num_requests_running", 2),
    "n=2": ({**TEXT, "n": 2}, 1, "num_requests_running", 3),
    "n=2-stream": ({**TEXT, "n": 2, "stream": True}, 1, "num_requests_running", 3),
    "queued": ({**TEXT, "stream": True}, 3, "num_requests_waiting", 1),
    "queued-whole": (TEXT, 3, "num_requests_waiting", 1),
}


def _stay(served: Running, done: threading.Event) -> int:
    """Ask again and again; how often the whole answer came."""
    num_whole = 0
    while not done.is_set():
        reply = served.complete("stay", max_tokens=300).json()
        assert reply["usage"]["completion_tokens"] == 300
        assert reply["choices"][0]["text"] == ("slowly " * 60)[:300]
        num_whole += 1
    return num_whole


def _seen(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 1
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


@pytest.mark.parametrize("kind", list(KINDS))
def test_sch_01_fifty_clients_leave_one_after_another_beside_others(kind: str) -> None:
    body, num_others, gauge, expected = KINDS[kind]
    settings = replace(SETTINGS, max_num_seqs=3, num_pages=513)
    executor, done = scripted(default=script("slowly ", repeat=True), step_s=0.001), threading.Event()
    with running(executor, settings) as served, ThreadPoolExecutor(4) as threads:
        others = [threads.submit(_stay, served, done) for _ in range(num_others)]
        try:
            num_left = 0
            while num_left < 50:
                with _open(served, "/v1/completions", body) as connection:
                    if not _seen(lambda: served.gauge(gauge) >= expected):
                        continue  # on a busy machine its turn came, or its end, before anybody looked
                    num_left += 1
                    for _ in range(3 if body.get("stream") and gauge == "num_requests_running" else 0):
                        assert connection.recv(4096)
                wait_until(lambda: served.state.num_running <= num_others, 2, "it is out")
        finally:
            done.set()
        assert sum(other.result(20) for other in others) > 0
        wait_until(
            lambda: (served.gauge("num_free_pages"), served.gauge("num_requests_running")) == (512, 0), 2, "all is free"
        )
        whole = served.complete("x" * 111, max_tokens=400).json()
        assert whole["usage"]["completion_tokens"] == 400


def test_sch_01_fifty_clients_leave_at_once(slow: Running) -> None:
    connections = [_open(slow, "/v1/chat/completions", {**CHAT, "stream": index % 2 == 0}) for index in range(50)]
    wait_until(lambda: slow.state.num_running == 50, 5, "all are open")
    for connection in connections:
        connection.close()
    wait_until(lambda: _is_idle(slow), 2, "everything is free again")
    assert slow.chat("still here", max_tokens=2).status_code == 200


def test_a_client_that_leaves_in_the_middle_of_its_body_is_forgotten(slow: Running) -> None:
    with socket.create_connection(("127.0.0.1", int(slow.url.rpartition(":")[2])), timeout=5) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{"
        )
    assert slow.chat("still here", max_tokens=2).status_code == 200
    wait_until(lambda: _is_idle(slow), 2, "nothing is left")
