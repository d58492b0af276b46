"""What is read from a stream, however the server cuts it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.bench.answers import Answer, read_answer
from jaxllm.bench.dataset_files import BenchRequest
from jaxllm.bench.http_client import Reply
from tests.bench.odd_server import DONE, event, token, usage

REQUEST = BenchRequest("hi", 2, 8)


def read(*bodies: bytes, status: int = 200, error: str | None = None) -> Answer:
    """Body number i comes at second i + 1; the request left at second 0.5."""
    reply = Reply(0.5, status, [(float(i), body) for i, body in enumerate(bodies, 1)], len(bodies) + 1.0, error)
    return read_answer(REQUEST, 0.0, reply)


def test_moments_and_counts_of_a_plain_stream() -> None:
    answer = read(token("a"), token("b"), token("c", "length"), usage(2, 3), DONE)
    assert answer.error is None
    assert answer.text == "abc"
    assert answer.chunk_times == [1.0, 2.0, 3.0]
    assert (answer.ttft_s, answer.tpot_s, answer.itl_s, answer.e2el_s) == (0.5, 1.0, [1.0, 1.0], 5.5)
    assert (answer.prompt_tokens, answer.output_tokens, answer.has_usage) == (2, 3, True)


def test_several_tokens_a_chunk_count_by_usage() -> None:
    answer = read(token("one two three"), token(" four five six seven", "length"), usage(2, 7), DONE)
    assert (answer.output_tokens, len(answer.chunk_times)) == (7, 2)
    assert answer.tpot_s == pytest.approx(1 / 6)
    assert answer.itl_s == [1.0]


def test_several_events_in_one_piece_come_at_one_moment() -> None:
    answer = read(token("a") + token("b"), token("c", "stop") + usage(2, 3) + DONE)
    assert answer.chunk_times == [1.0, 1.0, 2.0]
    assert answer.tpot_s == 0.5


@given(st.lists(st.integers(1, 400), max_size=8))
def test_cuts_anywhere_change_no_text_and_no_count(cuts: list[int]) -> None:
    whole = b": ping\n\n" + token("a") + token("é🫠") + token("", "stop") + usage(2, 5) + DONE
    ends = sorted({min(cut, len(whole)) for cut in cuts} | {len(whole)})
    pieces = [whole[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    answer = read(*pieces)
    assert (answer.error, answer.text, answer.output_tokens, len(answer.chunk_times)) == (None, "aé🫠", 5, 2)
    assert answer.chunk_times == sorted(answer.chunk_times)


def test_lines_may_end_as_on_windows_and_need_no_space() -> None:
    answer = read(b'data:{"choices":[{"text":"a","finish_reason":"stop"}]}\r\n\r\ndata: [DONE]\r\n\r\n')
    assert (answer.error, answer.text) == (None, "a")


def test_a_chats_first_chunk_is_no_token_and_thoughts_are() -> None:
    def delta(finish_reason: str | None = None, **fields: Any) -> bytes:
        return event(choices=[{"index": 0, "delta": fields, "finish_reason": finish_reason}])

    answer = read(
        delta(role="assistant", content=""),
        delta(reasoning_content="hm", reasoning="hm"),
        delta(content="a"),
        delta(content=""),
        delta(tool_calls=[{"index": 0}]),
        delta("stop"),
        DONE,
    )
    assert answer.chunk_times == [2.0, 3.0, 4.0, 5.0]
    assert answer.last_s == 6.0
    assert answer.text.startswith("hma")


def test_a_token_without_text_counts_and_so_does_an_empty_answer_of_one_token() -> None:
    assert read(token(""), token("a", "stop"), DONE).chunk_times == [1.0, 2.0]
    alone = read(token("", "stop"), usage(2, 1), DONE)
    assert (alone.error, alone.ttft_s, alone.tpot_s) == (None, 0.5, None)


def test_without_usage_chunks_are_counted_and_the_prompt_is_as_it_was_made() -> None:
    answer = read(token("a"), token("b", "stop"), DONE)
    assert (answer.has_usage, answer.output_tokens, answer.prompt_tokens) == (False, 2, 2)


def test_cached_tokens_are_taken_over() -> None:
    body = {"prompt_tokens": 9, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 4}}
    assert read(token("a", "stop"), event(choices=[], usage=body), DONE).num_cached_tokens == 4


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (read(b'{"error": {"message": "full"}}', status=503), "HTTP 503: full"),
        (read(b'{"detail": "no"}', status=404), "HTTP 404: {'detail': 'no'}"),
        (read(b"<html> gone\nfishing", status=502), "HTTP 502: <html> gone fishing"),
        (read(token("a"), event(error={"message": "died"}), DONE), "the server says: died"),
        (read(token("a"), b"data: {nope\n\n", DONE), "an event is no chunk"),
        (read(token("a"), b"data: \xff\n\n", DONE), "an event is no chunk"),
        (read(event(choices=5)), "an event is no chunk"),
        (read(token("a")), "ended without a finish_reason"),
        (read(DONE), "holds no tokens"),
        (read(), "ended without a finish_reason"),
        (read(status=0, error="the connection was lost"), "the connection was lost"),
        (read(token("a"), error="closed before"), "closed before"),
    ],
)
def test_what_is_wrong_is_said(answer: Answer, words: str) -> None:
    assert answer.error is not None
    assert words in answer.error


def test_fields_that_nobody_asked_for_do_no_harm() -> None:
    body = json.dumps({"id": 5, "x": [1], "choices": [{"text": "a", "finish_reason": "stop", "logprobs": {"y": 1}}]})
    assert read(b"data: " + body.encode() + b"\n\n").error is None
