"""Whatever clients do, and whenever they leave: no page, no task and no descriptor stays behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers.scripted_engine import Settings, script, scripted
from tests.server.harness import Running, running, wait_until

SMALL = Settings(num_pages=33, page_size=4, max_num_seqs=3, max_num_batched_tokens=16, max_model_len=64)
TEXT: dict[str, Any] = {"prompt": "abcdefgh", "max_tokens": 40}
BODIES = {
    "stream": {**TEXT, "stream": True},
    "whole": TEXT,
    "many": {**TEXT, "prompt": ["abcdefgh", "ijklmnop", "x"], "stream": True},
    "copies": {**TEXT, "n": 3},
    "refused": {**TEXT, "prompt": "y" * 100},
    "half": {**TEXT, "stream": True},
}


@dataclass
class Clients:
    port: int
    connections: dict[int, socket.socket] = field(default_factory=dict)

    def do(self, index: int, action: str) -> None:
        """Open (leaving first), read a little, or leave."""
        if action == "read":
            if index in self.connections:
                with contextlib.suppress(TimeoutError):
                    self.connections[index].recv(300)
            return
        if index in self.connections:
            self.connections.pop(index).close()
        if action != "leave":
            self.connections[index] = self._open(BODIES[action], half=action == "half")

    def _open(self, body: dict[str, Any], *, half: bool) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=0.02)
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n".encode()
        connection.sendall(head + (data[: len(data) // 2] if half else data))
        return connection


@dataclass(frozen=True)
class Left:
    """What a server holds. At rest it is always the same."""

    free_pages: float
    busy: float
    tasks: int
    descriptors: int

    @classmethod
    def of(cls, served: Running) -> Left:
        async def count_tasks() -> int:
            return len(asyncio.all_tasks()) - 1  # not this one

        names = ("num_requests_running", "num_requests_waiting")
        return cls(
            served.gauge("num_free_pages"),
            sum(served.gauge(name) for name in names) + served.state.num_running,
            asyncio.run_coroutine_threadsafe(count_tasks(), served.loop).result(5),
            len(os.listdir("/proc/self/fd")),
        )


@pytest.fixture(scope="module")
def busy() -> Iterator[Running]:
    with running(scripted(default=script("word ", repeat=True), step_s=0.001), SMALL) as served:
        served.complete("warm", max_tokens=2)
        yield served


ACTIONS = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from([*BODIES, "read", "read", "leave", "leave"])), min_size=1, max_size=16
)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts descriptors in /proc")
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=ACTIONS)
def test_sch_01_no_interleaving_leaves_anything_behind(busy: Running, actions: list[tuple[int, str]]) -> None:
    wait_until(lambda: Left.of(busy).busy == 0, 2, "it is at rest")
    before = Left.of(busy)
    assert before.free_pages == SMALL.num_pages - 1
    clients = Clients(int(busy.url.rpartition(":")[2]))
    for index, action in actions:
        clients.do(index, action)
    for index in list(clients.connections):
        clients.do(index, "leave")
    wait_until(lambda: Left.of(busy) == before, 2, f"all is as before: {before}")
    assert busy.complete("x" * 20, max_tokens=40).json()["usage"]["completion_tokens"] == 40
