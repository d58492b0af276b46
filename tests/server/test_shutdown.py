"""HLT-02 and the end of HLT-01: signals, drains and exit codes of a server in its own process."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from jaxllm.config.engine import ServerConfig
from jaxllm.errors import ConfigError
from jaxllm.server.listen import bind
from tests.server.harness import events_of, wait_until

SCRIPT = Path(__file__).with_name("serve_scripted.py")


@dataclass
class Process:
    url: str
    popen: subprocess.Popen[str]

    def stream(self, max_tokens: int) -> httpx.Response:
        body = {"prompt": "hi", "max_tokens": max_tokens, "stream": True}
        return httpx.post(self.url + "/v1/completions", json=body, timeout=30)

    def counts(self, *names: str) -> tuple[float, ...]:
        """Metrics, by their names in a scrape without the prefix."""
        text = httpx.get(self.url + "/metrics").text
        found = [re.search(rf"^jaxllm:{name}\{{.*\}} (\S+)$", text, re.MULTILINE) for name in names]
        return tuple(float(match[1]) if match else 0.0 for match in found)


@contextlib.contextmanager
def starting(
    *more: str, step_s: float = 0.02, faults: list[Any] | None = None, **config: Any
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process and the first line it prints."""
    args = [sys.executable, str(SCRIPT), str(step_s), json.dumps(config), json.dumps(faults or []), *more]
    with subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as popen:
        try:
            assert popen.stdout is not None
            yield popen, popen.stdout.readline()
        finally:
            popen.kill()


@contextlib.contextmanager
def process(**fields: Any) -> Iterator[Process]:
    with starting(**fields) as (popen, line):
        ready = re.fullmatch(r"jaxllm ready on (http://127\.0\.0\.1:\d+)\n", line)
        assert ready, line
        yield Process(ready[1], popen)


def _start_streams(server: Process, threads: ThreadPoolExecutor, max_tokens: int) -> list[Future[httpx.Response]]:
    """Three that run and one that waits."""
    calls = [threads.submit(server.stream, max_tokens) for _ in range(4)]
    wanted = ("num_requests_running", "num_requests_waiting", "time_to_first_token_seconds_count")
    wait_until(lambda: server.counts(*wanted) == (3, 1, 3), 5, "three requests have a token, and one waits")
    return calls


def test_an_idle_server_stops_at_once_with_code_0() -> None:
    with process() as server:
        assert httpx.get(server.url + "/health").status_code == 200
        server.popen.send_signal(signal.SIGINT)
        start = time.monotonic()
        assert server.popen.wait(5) == 0
        assert time.monotonic() - start < 3


@pytest.mark.parametrize("drain_s", [5, 30])
def test_hlt_02_a_drain_lets_running_requests_end_and_refuses_new_ones(drain_s: float) -> None:
    with process(shutdown_timeout_s=drain_s) as server, ThreadPoolExecutor(4) as threads:
        calls = _start_streams(server, threads, max_tokens=60)
        server.popen.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        refused = server.stream(5)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "shutting_down"
        assert refused.headers["retry-after"]
        assert httpx.get(server.url + "/health").status_code == 503
        for call in calls:
            *_, finish, done = events_of(call.result(10).text)
            assert (finish["choices"][0]["finish_reason"], done) == ("length", "[DONE]")
        assert server.popen.wait(5) == 0


def test_hlt_02_without_drain_every_stream_gets_an_error_and_its_end() -> None:
    with process(shutdown_timeout_s=0) as server, ThreadPoolExecutor(4) as threads:
        calls = _start_streams(server, threads, max_tokens=400)
        start = time.monotonic()
        server.popen.send_signal(signal.SIGTERM)
        replies = [call.result(10) for call in calls]
        assert server.popen.wait(5) == 0
        assert time.monotonic() - start < 4
        running = [reply for reply in replies if reply.status_code == 200]
        assert len(running) == 3
        for reply in running:
            *_, error, done = events_of(reply.text)
            assert (error["error"]["code"], done) == ("interrupted", "[DONE]")
        [queued] = [reply for reply in replies if reply.status_code != 200]
        assert queued.status_code == 503


def test_hlt_02_a_drain_that_runs_out_cuts_what_is_left() -> None:
    with process(shutdown_timeout_s=0.5) as server, ThreadPoolExecutor(4) as threads:
        calls = _start_streams(server, threads, max_tokens=400)
        start = time.monotonic()
        server.popen.send_signal(signal.SIGTERM)
        for call in calls:
            assert "the server is shutting down" in call.result(10).text
        assert server.popen.wait(5) == 0
        assert 0.5 < time.monotonic() - start < 5


def test_hlt_02_a_second_signal_ends_it_within_2_s() -> None:
    with process(shutdown_timeout_s=30) as server, ThreadPoolExecutor(4) as threads:
        calls = _start_streams(server, threads, max_tokens=400)
        server.popen.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        start = time.monotonic()
        server.popen.send_signal(signal.SIGTERM)
        assert server.popen.wait(5) == 1
        assert time.monotonic() - start < 2
        for call in calls:
            assert "told to stop" in call.result(5).text


@pytest.mark.parametrize("kind", ["freeze", "die"])
def test_hlt_01_the_process_of_a_dead_engine_answers_503_and_then_exits_with_code_1(kind: str) -> None:
    with process(faults=[{"step": 5, "kind": kind}], engine_dead_grace_s=1.5) as server:
        *_, error, done = events_of(server.stream(100).text)
        assert ("error" in error, done) == (True, "[DONE]")
        assert httpx.get(server.url + "/health").status_code == 503
        assert server.stream(5).status_code == 503
        assert server.popen.wait(8) == 1


def test_a_signal_ends_a_server_whose_engine_is_frozen() -> None:
    faults = [{"step": 1, "kind": "freeze"}]
    with process(faults=faults, engine_dead_grace_s=60, shutdown_timeout_s=0.2) as server:
        assert server.stream(5).status_code == 503
        server.popen.send_signal(signal.SIGTERM)
        assert server.popen.wait(8) == 1


def test_a_taken_port_is_said_before_anything_is_loaded() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"--port {port}"):
            bind(ServerConfig(port=port))
    with pytest.raises(ConfigError, match="no-such-host"):
        bind(ServerConfig(host="no-such-host.invalid"))


def test_nothing_listens_until_the_model_is_ready() -> None:
    with contextlib.closing(bind(ServerConfig(port=0))) as listener, pytest.raises(ConnectionRefusedError):
        socket.create_connection(listener.sock.getsockname(), timeout=2)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_hlt_02_a_signal_while_loading_ends_it_at_once_with_one_line(number: signal.Signals, tmp_path: Path) -> None:
    place = tmp_path / "llm.sock"
    with starting("stuck", uds=str(place)) as (popen, line):
        assert (line, place.exists()) == ("loading\n", True)
        start = time.monotonic()
        popen.send_signal(number)
        assert popen.wait(5) == 128 + number
        assert time.monotonic() - start < 2
        assert popen.stderr is not None
        assert popen.stderr.read() == f"jaxllm: stopped by {number.name} before the server was ready\n"
        assert not place.exists()


@pytest.mark.parametrize("num_signals", [1, 2])
def test_a_unix_socket_is_removed_however_the_server_ends(num_signals: int, tmp_path: Path) -> None:
    place = tmp_path / "llm.sock"
    with starting(uds=str(place), shutdown_timeout_s=30) as (popen, line), ThreadPoolExecutor(1) as threads:
        assert line == f"jaxllm ready on unix:{place}\n"
        http = httpx.Client(transport=httpx.HTTPTransport(uds=str(place)), base_url="http://x", timeout=20)
        body = {"prompt": "hi", "max_tokens": 40 if num_signals == 1 else 400}
        call = threads.submit(http.post, "/v1/completions", json=body)
        wait_until(
            lambda: 'num_requests_running{engine="0",model_name="scripted"} 1' in http.get("/metrics").text, 5, ""
        )
        for _ in range(num_signals):
            popen.send_signal(signal.SIGTERM)
            time.sleep(0.2)
        assert popen.wait(10) == num_signals - 1
        assert call.result(5).status_code == (200 if num_signals == 1 else 503)
        assert not place.exists()
        http.close()


def test_a_process_that_was_stopped_for_longer_than_the_watchdog_goes_on() -> None:
    """The watchdog's limit is 1 s here."""
    with process(step_s=0.05) as server, ThreadPoolExecutor(1) as threads:
        call = threads.submit(server.stream, 60)
        wait_until(lambda: server.counts("num_requests_running") == (1,), 5, "it runs")
        server.popen.send_signal(signal.SIGSTOP)
        time.sleep(4)
        server.popen.send_signal(signal.SIGCONT)
        *_, finish, done = events_of(call.result(20).text)
        assert (finish["choices"][0]["finish_reason"], done) == ("length", "[DONE]")
        assert httpx.get(server.url + "/health").status_code == 200
