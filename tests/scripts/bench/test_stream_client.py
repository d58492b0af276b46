"""The client: when each token came, what was said, and what went wrong."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

import pytest

from jaxllm.bench.answers import Answer
from scripts.bench.stream_client import Target, run_workload
from scripts.bench.workload import Request, Workload
from tests.scripts.bench.raw_server import serve_in_thread


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    server = serve_in_thread()
    yield Target(f"http://127.0.0.1:{server.server_port}", "m")
    server.shutdown()
    server.server_close()


def ask(target: Target, *prompts: str, num_tokens: int = 4, timeout_s: float = 5.0) -> list[Answer]:
    requests = tuple(Request(prompt, prompt, 3, num_tokens) for prompt in prompts)
    return list(run_workload(target, Workload("w", requests, 8), timeout_s).answers)


def test_each_token_has_its_time_and_the_text_is_whole(target: Target) -> None:
    (answer,) = ask(target, "hello")
    assert answer.error is None
    assert answer.text == " w w w w"
    assert (answer.num_prompt_tokens, answer.num_output_tokens) == (3, 4)  # the server says so
    assert len(answer.chunk_times) == 4
    # A token's chunk is whole only 10 ms after it began; the one before it was sent by then.
    assert answer.chunk_times[0] - answer.sent_s >= 0.01
    assert all(later - sooner > 0.005 for sooner, later in itertools.pairwise(answer.chunk_times))
    assert answer.chunk_times[-1] <= answer.ended_s


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ("fail", "HTTP 400: .*told to fail"),
        ("cut", "the connection was closed before the answer ended"),
        ("forever", "no end within 0.1 s"),
    ],
)
def test_what_went_wrong_is_told_and_spoils_no_other_request(target: Target, prompt: str, error: str) -> None:
    num_tokens, timeout_s = (60, 0.1) if prompt == "forever" else (4, 5.0)
    bad, other = ask(target, prompt, "hello", num_tokens=num_tokens, timeout_s=timeout_s)
    assert bad.error is not None
    assert re.search(error, bad.error)
    assert prompt == "forever" or other.error is None


def test_a_server_that_is_not_there_is_an_error_of_the_request() -> None:
    (answer,) = ask(Target("http://127.0.0.1:9", "m"), "hello")
    assert answer.error is not None
    assert answer.chunk_times == []


def test_extra_fields_reach_the_server(target: Target) -> None:
    (answer,) = ask(Target(target.url, "m", {"max_tokens": 2}), "hello")
    assert answer.num_output_tokens == 2


def test_requests_go_at_their_arrivals_or_as_the_concurrency_allows(target: Target) -> None:
    requests = tuple(Request(str(i), "hello", 3, 1, arrival_s=0.1 * i) for i in range(3))
    online = run_workload(target, Workload("online", requests, None), 5.0)
    assert all(a.sent_s - online.start_s >= r.arrival_s for a, r in zip(online.answers, requests, strict=True))
    one_by_one = run_workload(target, Workload("single", requests, 1), 5.0)
    assert all(b.sent_s >= a.ended_s for a, b in itertools.pairwise(one_by_one.answers))
    assert one_by_one.start_s + one_by_one.duration_s >= one_by_one.answers[-1].ended_s
