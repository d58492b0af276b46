"""/metrics as scrapers read it: both formats, both parsers, and exact counts (MET-01)."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
from prometheus_client import openmetrics, parser
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics

from tests.helpers.scripted_engine import Settings, script, scripted
from tests.server.harness import Running, running, wait_until

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)


def _samples(families: Any) -> dict[str, float]:
    """Value by name and labels, without the moments at which series began."""
    return {
        f"{sample.name}{sorted(sample.labels.items())}": sample.value
        for family in families
        for sample in family.samples
        if not sample.name.endswith("_created") and not family.name.startswith("process_")
    }


@pytest.mark.parametrize("accept", [OPENMETRICS, PROMETHEUS_3, "text/plain;q=0.5, application/openmetrics-text"])
def test_openmetrics_where_it_is_preferred(server: Running, accept: str) -> None:
    server.complete("hi")
    reply = server.get("/metrics", headers={"accept": accept})
    assert reply.headers["content-type"] == openmetrics.exposition.CONTENT_TYPE_LATEST
    assert reply.text.endswith("# EOF\n")
    strict = _samples(read_openmetrics(reply.text))  # raises on anything that is not OpenMetrics
    plain = server.get("/metrics", headers={"accept": "text/plain"})
    assert plain.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert strict == _samples(parser.text_string_to_metric_families(plain.text))
    assert any(name.startswith("jaxllm:request_success_total") for name in strict)


@pytest.mark.parametrize(
    "accept",
    [
        *("", "*/*", "text/plain", "application/json", "application/openmetrics-text;q=0"),
        *("application/openmetrics-text;q=0.1, text/plain;q=0.2", "application/openmetrics-text;q=many"),
    ],
)
def test_plain_text_otherwise(server: Running, accept: str) -> None:
    reply = server.get("/metrics", headers={"accept": accept})
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "# EOF" not in reply.text
    assert list(parser.text_string_to_metric_families(reply.text))


def test_the_process_is_measured_too(server: Running) -> None:
    families = {f.name: f for f in parser.text_string_to_metric_families(server.get("/metrics").text)}
    assert families["process_resident_memory_bytes"].samples[0].value > 2**20
    assert families["process_open_fds"].samples[0].value > 3


def test_get_routes_answer_head_with_the_same_headers_and_no_body(server: Running) -> None:
    for path in ("/", "/health", "/ping", "/version", "/v1/models", "/v1/models/tiny"):
        get, head = server.get(path), server.http.head(path)
        assert (head.status_code, head.content) == (get.status_code, b"")
        assert head.headers.get("content-length") == get.headers.get("content-length")
    for accept in (OPENMETRICS, "text/plain"):
        head = server.http.head("/metrics", headers={"accept": accept})
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-type"].startswith(accept.partition(";")[0])
    assert server.http.head("/v1/completions").status_code == 405


class Scrape:
    def __init__(self, served: Running) -> None:
        self._families = list(read_openmetrics(served.get("/metrics", headers={"accept": OPENMETRICS}).text))

    def __call__(self, name: str, **labels: str) -> float:
        samples = (sample for family in self._families for sample in family.samples)
        found = [s.value for s in samples if s.name == f"jaxllm:{name}" and labels.items() <= s.labels.items()]
        assert len(found) == 1, (name, labels, found)
        return found[0]


def _open(served: Running, body: Mapping[str, Any]) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", int(served.url.rpartition(":")[2])), timeout=5)
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


def test_met_01_counts_are_exact() -> None:
    """10 end, one of them with n=2, pages are short so that some are preempted; 3 leave; 2 are refused."""
    settings = Settings(num_pages=16, max_num_batched_tokens=16)
    executor = scripted(default=script("0123456789" * 3, repeat=True), step_s=0.02)
    with running(executor, settings) as served, ThreadPoolExecutor(10) as threads, ExitStack() as clients:
        with _open(served, {"prompt": "leaver", "max_tokens": 100, "stream": True}) as leaver:
            assert b"data: " in leaver.recv(4096)
        wait_until(lambda: served.gauge("num_requests_running") == 0, 2, "it has left")
        early = served.gauge("generation_tokens_total")
        asked = [{"max_tokens": 20, "n": 2 if i == 9 else 1} for i in range(10)]
        calls = [threads.submit(served.complete, chr(97 + i) * 6, **fields) for i, fields in enumerate(asked)]
        wait_until(lambda: served.gauge("num_requests_waiting") >= 3, 2, "the engine is full")
        for _ in range(2):
            clients.enter_context(_open(served, {"prompt": "q" * 6, "max_tokens": 100}))
        wait_until(lambda: served.state.num_running >= 12, 2, "two more wait")
        clients.close()
        usages = [call.result(20).json()["usage"] for call in calls]
        for prompt in ("", "x" * 500):
            assert served.complete(prompt).status_code == 400
        wait_until(lambda: served.gauge("num_free_pages") == 15, 2, "all pages are back")

        value = Scrape(served)
        success = {
            reason: value("request_success_total", finished_reason=reason)
            for reason in ("stop", "length", "abort", "error")
        }
        assert success == {"stop": 0, "length": 10, "abort": 3, "error": 0}
        assert [usage["completion_tokens"] for usage in usages] == [20] * 9 + [40]
        assert value("generation_tokens_total") - early == sum(usage["completion_tokens"] for usage in usages)
        assert early >= 1
        assert value("time_to_first_token_seconds_count") == 11
        assert value("time_to_first_token_seconds_sum") > 0
        assert value("e2e_request_latency_seconds_count") == value("request_prompt_tokens_count") == 13
        assert value("request_params_n_count") == 13
        assert value("request_params_n_sum") == 14
        assert value("request_generation_tokens_sum") == value("generation_tokens_total")
        assert value("request_max_num_generation_tokens_sum") == value("generation_tokens_total") - 20
        assert value("prompt_tokens_total") == 11 * 6
        assert value("num_preemptions_total") >= 1
        assert value("prefix_cache_queries_total") == 11 * 6
        cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
        assert value("prefix_cache_hits_total") == value("prompt_tokens_cached_total") == cached == 0
        assert value("prompt_tokens_by_source_total", source="local_compute") == 66
        assert value("num_requests_running") == value("num_requests_waiting") == 0
