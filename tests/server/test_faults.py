"""API-05 and HLT-01: the engine fails under running requests; clients hear of it, and so does /health."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from jaxllm.engine.executor import Ticket
from jaxllm.server.state import ServerState
from jaxllm.testing.faults import Fault, FaultInjector, FaultKind, FaultPlace
from jaxllm.types.outputs import CompletionOutput, RequestOutput
from jaxllm.types.step import StepOutput
from tests.helpers.scripted_engine import Settings, script, scripted
from tests.server.harness import Running, events_of, running, wait_until

LONG = script("on and on ", repeat=True)
SETTINGS = Settings(num_pages=513, max_model_len=256, max_num_seqs=8, watchdog_s=1.0)


def _failing(kind: FaultKind, step: int) -> Any:
    return scripted(default=LONG, step_s=0.02, faults=[Fault(step, kind)])


def _check_dead(served: Running) -> None:
    wait_until(lambda: served.get("/health").status_code == 503, 3, "/health is 503")
    for reply in (served.chat("hi"), served.complete("hi"), served.chat("hi", stream=True), served.get("/ping")):
        assert reply.status_code == 503
        assert reply.json()["error"]["code"] == "engine_dead"
        assert reply.json()["error"]["message"]
    assert served.get("/metrics").status_code == served.get("/version").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["chat", "complete"])
def test_api_05_a_fault_before_the_first_token_is_a_5xx(path: str, stream: bool) -> None:
    with running(_failing(FaultKind.RAISE, 1), SETTINGS) as served:
        reply = getattr(served, path)("hi", stream=stream)
        assert reply.status_code == 503
        assert reply.json()["error"]["type"] == "server_error"
        _check_dead(served)


@pytest.mark.parametrize("path", ["chat", "complete"])
def test_api_05_a_fault_midway_is_one_error_event_and_then_done(path: str) -> None:
    with running(_failing(FaultKind.RAISE, 6), SETTINGS) as served:
        reply = getattr(served, path)("hi", stream=True, max_tokens=200)
        assert reply.status_code == 200
        *chunks, error, done = events_of(reply.text)
        assert done == "[DONE]"
        assert set(error) == {"error"}
        assert error["error"]["message"]
        assert len(chunks) >= 2
        assert all("error" not in chunk and not chunk["choices"][0]["finish_reason"] for chunk in chunks)


def test_api_05_openais_client_raises_api_error_midway() -> None:
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    with (
        running(_failing(FaultKind.RAISE, 6), SETTINGS) as served,
        openai.OpenAI(base_url=served.url + "/v1", api_key="x", max_retries=0) as client,
        client.chat.completions.create(model="scripted", messages=messages, stream=True, max_tokens=200) as stream,
    ):
        pieces = []
        with pytest.raises(openai.APIError):
            pieces.extend(chunk.choices[0].delta.content for chunk in stream)
        with pytest.raises(openai.InternalServerError):
            client.chat.completions.create(model="scripted", messages=messages)


def test_api_05_one_request_that_fails_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of one request, not of the engine: 500, and the server is as healthy as before."""
    with running(scripted()) as served:
        good = served.state.engine.stream

        async def flaky(prompt: Any, params: Any, **kwargs: Any) -> AsyncGenerator[RequestOutput, None]:
            if "bad" not in prompt.text:
                async for output in good(prompt, params, **kwargs):
                    yield output
                return
            if "late" in prompt.text:
                yield RequestOutput("r", None, (1,), (CompletionOutput(0, "a", (97,)),), finished=False)
            failed = CompletionOutput(0, "", (), finish_reason="error")
            yield RequestOutput("r", None, (1,), (failed,), finished=True, error="its row went wrong")

        monkeypatch.setattr(served.state.engine, "stream", flaky)
        for stream in (False, True):
            reply = served.chat("bad", stream=stream)
            assert reply.status_code == 500
            assert reply.json()["error"]["message"] == "its row went wrong"
        *_, error, done = events_of(served.chat("bad late", stream=True).text)
        assert (error["error"]["message"], done) == ("its row went wrong", "[DONE]")
        both = served.complete(["good", "bad"])
        assert both.status_code == 500
        assert served.chat("good").status_code == served.get("/health").status_code == 200


def test_an_unforeseen_error_is_500_without_detail(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(scripted()) as served:

        def broken(self: ServerState, visible_id: str) -> str:
            raise ZeroDivisionError("secret detail")

        monkeypatch.setattr(ServerState, "engine_request_id", broken)
        reply = served.post("/v1/completions", {"prompt": "hi"}, headers={"x-request-id": "mine"})
        assert reply.status_code == 500
        assert reply.json()["error"]["type"] == "server_error"
        assert "secret" not in reply.text
        assert reply.headers["x-request-id"] == "mine"


def test_a_connection_outlives_an_unforeseen_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(scripted()) as served:
        monkeypatch.setattr(ServerState, "resolve_model", lambda self, name: 1 / 0)
        address = ("127.0.0.1", int(served.url.rpartition(":")[2]))
        connection = http.client.HTTPConnection(*address, timeout=10)
        connection.connect()
        first = connection.sock
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/completions"):
            connection.request("POST", path, body='{"prompt": "hi"}')
            reply = connection.getresponse()
            assert (reply.status, reply.getheader("connection")) == (500, None)
            reply.read()
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200
        assert connection.sock is first
        connection.close()


@pytest.mark.parametrize("kind", list(FaultKind))
def test_hlt_01_four_running_requests_end_with_an_error_and_health_turns_503(kind: FaultKind) -> None:
    executor, due = scripted(default=LONG, step_s=0.02), threading.Event()
    injector, collect = FaultInjector([Fault(1, kind)]), executor.collect

    def failing_once_due(ticket: Ticket) -> StepOutput:
        if due.is_set():
            injector.reach(1, FaultPlace.COLLECT)
        return collect(ticket)

    executor.collect = failing_once_due  # type: ignore[method-assign]
    with running(executor, SETTINGS) as served, ThreadPoolExecutor(4) as threads:
        calls = [
            threads.submit(served.chat, "a", stream=True, max_tokens=200),
            threads.submit(served.complete, "b", stream=True, max_tokens=200),
            threads.submit(served.chat, "c", max_tokens=200),
            threads.submit(served.complete, ["d", "e"], max_tokens=200),
        ]
        _wait_until_all_have_tokens(served, 5)
        due.set()
        start = time.monotonic()
        replies = [call.result(timeout=10) for call in calls]
        assert time.monotonic() - start < 5
        for reply in replies[:2]:
            *_, error, done = events_of(reply.text)
            assert (set(error), done) == ({"error"}, "[DONE]")
        for reply in replies[2:]:
            assert reply.status_code == 503
            assert reply.json()["error"]["message"]
        _check_dead(served)
        injector.release()


def _wait_until_all_have_tokens(served: Running, num_requests: int) -> None:
    """A running request gets a token a step: a few steps after all of them run, each has some."""
    wait_until(lambda: served.gauge("num_requests_running") == num_requests, 5, "all requests run")
    num_steps = served.state.engine.stats().core.num_steps
    wait_until(lambda: served.state.engine.stats().core.num_steps > num_steps + 5, 5, "each has tokens")


def test_hlt_01_an_engine_that_dies_while_idle_is_noticed() -> None:
    with running(_failing(FaultKind.DIE, 1), SETTINGS) as served:
        assert served.get("/health").status_code == 200
        assert served.chat("hi").status_code == 503
        _check_dead(served)


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_is_503_with_retry_after(stream: bool) -> None:
    settings = Settings(max_num_seqs=1, max_num_queued_reqs=1)
    with running(scripted(default=LONG, step_s=0.01), settings) as served, ThreadPoolExecutor(4) as threads:
        calls = [threads.submit(served.complete, "a", max_tokens=60, stream=stream) for _ in range(4)]
        replies = [call.result(10) for call in calls]
        refused = [reply for reply in replies if reply.status_code != 200]
        assert 2 <= len(refused) <= 3
        for reply in refused:
            assert reply.status_code == 503
            assert int(reply.headers["retry-after"]) >= 1
            assert reply.json()["error"]["code"] == "overloaded"


@pytest.mark.parametrize("stream", [False, True])
def test_the_queue_limit_counts_every_sequence_of_a_request(stream: bool) -> None:
    settings = Settings(max_num_seqs=2, max_num_queued_reqs=3)
    with running(scripted(default=LONG, step_s=0.005), settings) as served, ThreadPoolExecutor(1) as threads:
        alone = served.complete("a", max_tokens=5, n=4, stream=stream)
        assert (alone.status_code, alone.json()["error"]["code"]) == (503, "overloaded")
        assert alone.headers["content-type"] == "application/json"  # refused before any event
        assert int(alone.headers["retry-after"]) >= 1
        first = threads.submit(served.complete, "a", max_tokens=60, n=2)
        wait_until(lambda: served.gauge("num_requests_running") == 2, 3, "two sequences run")
        assert served.complete("b", max_tokens=5, n=2, stream=stream).status_code == 503
        assert served.complete("c", max_tokens=5, stream=stream).status_code == 200
        assert first.result(10).json()["usage"]["completion_tokens"] == 120
        wait_until(lambda: served.gauge("num_free_pages") == settings.num_pages - 1, 2, "all pages are back")
        assert served.complete("d", max_tokens=5, n=3, stream=stream).status_code == 200
