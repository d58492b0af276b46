"""Deadlines of HTTP requests, on the real scheduler: while they wait, and while they run."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.helpers.scripted_engine import script, scripted
from tests.server.harness import SETTINGS, Running, events_of, running, wait_until


@pytest.fixture(scope="module")
def narrow() -> Iterator[Running]:
    """Serves one sequence at a time, which never ends by itself soon."""
    executor = scripted(default=script("on and on ", repeat=True), step_s=0.005)
    with running(executor, replace(SETTINGS, max_num_seqs=1)) as served:
        yield served


@pytest.mark.parametrize("stream", [False, True])
def test_a_running_request_ends_at_its_deadline_with_what_it_has(narrow: Running, stream: bool) -> None:
    reply = narrow.complete(max_tokens=400, deadline_s=0.3, stream=stream)
    assert reply.status_code == 200
    chunks = [chunk for chunk in events_of(reply.text) if chunk != "[DONE]"] if stream else [reply.json()]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(choice["text"] for choice in choices).startswith("on and")
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("abort", "deadline")
    wait_until(lambda: narrow.gauge("num_requests_running") == 0, 10, "its pages and its row are free")


def test_a_request_that_waits_until_its_deadline_is_503_and_the_others_go_on(narrow: Running) -> None:
    others: list[int] = []
    other = threading.Thread(target=lambda: others.append(narrow.complete(max_tokens=200).status_code))
    other.start()
    wait_until(lambda: narrow.gauge("num_requests_running") == 1, 10, "the other one runs")
    for stream in (False, True):
        error = (reply := narrow.complete(deadline_s=0.1, stream=stream)).json()["error"]
        assert (reply.status_code, error["code"], error["param"]) == (503, "deadline_exceeded", "deadline_s")
        assert "deadline_s=0.1" in error["message"]
    other.join(20)
    assert others == [200]


def test_all_siblings_end_at_the_deadline_also_those_that_never_ran(narrow: Running) -> None:
    choices = narrow.complete(max_tokens=400, deadline_s=0.3, n=2).json()["choices"]
    assert {(choice["finish_reason"], choice["stop_reason"]) for choice in choices} == {("abort", "deadline")}
    assert choices[0]["text"] and not choices[1]["text"]


def test_a_beam_search_ends_at_its_deadline_with_the_best_so_far(narrow: Running) -> None:
    body = {"use_beam_search": True, "n": 1, "temperature": 0, "max_tokens": 300, "ignore_eos": True}
    (choice,) = narrow.complete(deadline_s=0.3, **body).json()["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("abort", "deadline")
    assert choice["text"]
