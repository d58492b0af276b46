"""Resetting the prefix cache over HTTP."""

from __future__ import annotations

import threading

from tests.helpers.scripted_engine import script, scripted
from tests.server.harness import Running, running, wait_until

PROMPT = "a prompt of more than a few pages"


def _num_cached(server: Running) -> int:
    return server.complete(PROMPT).json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_reset_forgets_the_prefix_cache(server: Running) -> None:
    _num_cached(server)
    assert _num_cached(server) > 0
    reply = server.post("/reset_prefix_cache", None)
    assert (reply.status_code, reply.json()) == (200, {"status": "reset"})
    assert _num_cached(server) == 0


def test_a_reset_is_refused_while_a_request_runs() -> None:
    with running(scripted(default=script("on and on ", repeat=True), step_s=0.002)) as server:
        caller = threading.Thread(target=server.complete, kwargs={"max_tokens": 400})
        caller.start()
        wait_until(lambda: server.gauge("num_requests_running") == 1, 10, "it runs")
        reply = server.post("/reset_prefix_cache", None)
        assert (reply.status_code, reply.json()["error"]["code"]) == (409, "prefix_cache_in_use")
        caller.join(20)
        assert server.post("/reset_prefix_cache", None).status_code == 200
