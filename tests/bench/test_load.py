"""The load client against the real server on a scripted engine, and against odd ones."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from jaxllm.bench.dataset_files import BenchRequest
from jaxllm.bench.datasets import DatasetArgs, make_requests
from jaxllm.bench.http_client import Address
from jaxllm.bench.load import LoadRun
from jaxllm.bench.serve import ServerFailed, Target, find_target, run_serve
from jaxllm.bench.serve_args import ServeArgs
from jaxllm.bench.serve_result import ServeResult
from jaxllm.errors import ConfigError
from tests.bench.odd_server import DONE, OddServer, chunked, event, odd_server, token, usage
from tests.helpers.scripted_engine import TOKENIZER, script, scripted
from tests.server.harness import Running, running

REQUESTS = make_requests(DatasetArgs(num_prompts=12, random_input_len=20, random_output_len=6), TOKENIZER)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(scripted(default=script("word ", repeat=True))) as server:
        yield server


def load(url: str, requests: Sequence[BenchRequest] = REQUESTS, **settings: Any) -> LoadRun:
    args = ServeArgs(base_url=url, **settings)
    return run_serve(args, find_target(args), requests)


def load_odd(server: OddServer, requests: Sequence[BenchRequest] = REQUESTS, **settings: Any) -> LoadRun:
    """Without asking which models there are."""
    return run_serve(ServeArgs(**settings), Target(Address.of(server.url), "m"), requests)


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_every_token_of_the_real_server_is_counted(server: Running, backend: str) -> None:
    run = load(server.url, backend=backend, ignore_eos=True)
    result = ServeResult.of(run)
    assert result.errors == ()
    assert result.num_completed == 12
    assert result.num_output_tokens == 12 * 6
    assert result.num_without_usage == 0
    for answer in run.answers:
        assert answer.text == "word w"
        assert answer.sent_s < answer.chunk_times[0] <= answer.last_s <= answer.ended_s
    if backend == "openai":
        assert result.num_input_tokens == 12 * 20
    assert result.duration_s >= max(answer.e2el_s for answer in run.answers)


def test_at_most_so_many_at_once(server: Running) -> None:
    run = load(server.url, max_concurrency=3)
    assert run.num_most_running == 3
    moments = [(a.sent_s, 1) for a in run.answers] + [(a.ended_s, -1) for a in run.answers]
    running_now = most = 0
    for _, change in sorted(moments):
        running_now += change
        most = max(most, running_now)
    assert most <= 3


def test_requests_leave_in_order_and_not_before_they_are_due(server: Running) -> None:
    run = load(server.url, request_rate=400.0)
    sent = [answer.sent_s for answer in run.answers]
    assert sent == sorted(sent)
    assert all(answer.sent_s >= answer.due_s for answer in run.answers)
    assert len(run.send_lags_s) == 12


def test_refused_requests_are_counted_by_what_was_said(server: Running) -> None:
    long = [BenchRequest("x" * 600, 600, 5)] * 3
    result = ServeResult.of(load(server.url, [*REQUESTS, *long]))
    assert (result.num_completed, result.num_failed) == (12, 3)
    ((what, how_often),) = result.errors
    assert how_often == 3
    assert "HTTP 400" in what
    assert "maximum context length" in what


def test_warm_ups_come_first_and_do_not_count() -> None:
    with odd_server(chunked(token("a", "stop"), usage(1, 1), DONE)) as server:
        run = load_odd(server, num_warmups=4, max_concurrency=1)
        prompts = [body["prompt"] for body in server.bodies]
    assert prompts == [r.prompt for r in (*REQUESTS[8:], *REQUESTS[:8])]
    assert [answer.request for answer in run.answers] == REQUESTS[:8]


def test_warm_ups_that_all_fail_end_it() -> None:
    with (
        odd_server(chunked(b'{"error": "busy"}', status="503 No")) as server,
        pytest.raises(ServerFailed, match="all 2 warm-up requests failed, the first with: HTTP 503: busy"),
    ):
        load_odd(server, num_warmups=2)


def test_the_body_holds_what_was_asked_for() -> None:
    settings: dict[str, Any] = {"temperature": 0.5, "top_k": 3, "ignore_eos": True, "extra_body": '{"top_k": 4}'}
    with odd_server(chunked(token("a", "stop"), DONE)) as server:
        load_odd(server, REQUESTS[:1], **settings, header=("X-A=1",), api_key="key")
        load_odd(server, REQUESTS[:1], **settings, backend="openai-chat")
        completion, chat = server.bodies
        head = server.requests[0].partition(b"\r\n\r\n")[0]
        paths = [request.split(b" ")[1] for request in server.requests]
    asked = {"model": "m", "stream": True, "stream_options": {"include_usage": True}, "temperature": 0.5, "top_k": 4}
    asked |= {"ignore_eos": True}
    assert completion == {**asked, "prompt": REQUESTS[0].prompt, "max_tokens": 6}
    messages = [{"role": "user", "content": REQUESTS[0].prompt}]
    assert chat == {**asked, "messages": messages, "max_completion_tokens": 6}
    assert b"\r\nAuthorization: Bearer key\r\nX-A: 1\r\n" in head
    assert paths == [b"/v1/completions", b"/v1/chat/completions"]


def test_several_tokens_a_chunk_are_noted() -> None:
    with odd_server(chunked(token("a b c"), token(" d e f", "stop"), usage(20, 6), DONE)) as server:
        result = ServeResult.of(load_odd(server))
    assert result.tokens_per_chunk == 3.0
    assert any("3.00 tokens a chunk" in warning for warning in result.warnings())


def test_failures_of_every_kind_stay_beside_what_succeeded() -> None:
    good = chunked(token("a", "stop"), usage(1, 1), DONE)
    broken = [*chunked(token("a"))[:-1], b"zz\r\n"]
    error = chunked(token("a"), event(error={"message": "engine died"}), DONE)
    with odd_server(good, broken, error, [b""], good, per_connection=1) as server:
        result = ServeResult.of(load_odd(server, REQUESTS[:6], max_concurrency=1))
    assert (result.num_completed, result.num_failed) == (3, 3)
    said = " | ".join(what for what, _ in result.errors)
    assert "no HTTP answer" in said
    assert "engine died" in said
    assert "closed before" in said
    assert result.num_output_tokens == 3


def test_answers_too_many_to_hold_are_read_as_they_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxllm.bench.load._MOST_HELD_BYTES", 0)
    with odd_server(chunked(token("a"), token("b", "stop"), usage(3, 2), DONE)) as server:
        result = ServeResult.of(load_odd(server))
    assert (result.num_completed, result.num_output_tokens) == (12, 24)


def test_a_stalled_client_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-in for a busy machine: each tick of the watch comes 50 ms late."""
    real = asyncio.sleep

    async def late(seconds: float) -> None:
        await real(seconds + (0.05 if seconds == 0.02 else 0))

    monkeypatch.setattr("jaxllm.bench.load.asyncio.sleep", late)
    with odd_server(chunked(token("a"), 0.2, token("b", "stop"), usage(1, 2), DONE)) as server:
        result = ServeResult.of(load_odd(server, REQUESTS[:1]))
    assert result.client_lag.largest >= 0.05
    assert any("the client itself was late" in warning for warning in result.warnings())


def test_the_first_model_is_asked_for_if_none_is_named(server: Running) -> None:
    assert find_target(ServeArgs(base_url=server.url)).model == "scripted"
    assert find_target(ServeArgs(base_url=server.url, model="a")).model == "a"
    assert find_target(ServeArgs(base_url=server.url, model="a", served_model_name="b")).model == "b"


@pytest.mark.parametrize("body", [b"[]", b"nope", b'{"data": []}'])
def test_a_server_without_models_is_refused(body: bytes) -> None:
    with (
        odd_server(chunked(body)) as server,
        pytest.raises(ServerFailed, match=r"/v1/models answers 200 .*name the model with --model"),
    ):
        find_target(ServeArgs(base_url=server.url))


def test_an_unreachable_server_is_refused(free_port: Callable[[], int]) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(ServerFailed, match=rf"{url}: .*is a server running there"):
        find_target(ServeArgs(base_url=url))
    with pytest.raises(ServerFailed, match="is a server running there"):
        find_target(ServeArgs(base_url=url, ready_check_timeout_sec=0.01))
    with pytest.raises(ConfigError, match="base_url='ftp://x' is no address"):
        find_target(ServeArgs(base_url="ftp://x"))


def test_a_server_that_is_not_ready_yet_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxllm.bench.serve._POLL_S", 0.01)
    busy, ready = chunked(b"loading", status="503 Busy"), chunked(b'{"data": [{"id": "m"}]}')
    with odd_server(busy, busy, ready) as server:
        assert find_target(ServeArgs(base_url=server.url, ready_check_timeout_sec=20)).model == "m"
        assert len(server.requests) == 3


@pytest.fixture
def free_port() -> Callable[[], int]:
    def find() -> int:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            return sock.getsockname()[1]

    return find
