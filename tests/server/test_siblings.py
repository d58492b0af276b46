"""Several choices on the real engine: each its own text and end; streamed as whole; counted exactly."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

from jaxllm.testing.logprobs import scripted_logprob, scripted_top
from jaxllm.testing.scripted import Script
from tests.helpers.scripted_engine import scripted
from tests.server.harness import SETTINGS, Running, events_of, running

TEXTS = ("red STOP or not", "grün 🫠", "b")
EOS = 257


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    executor = scripted(
        Script(choices=tuple(tuple(text.encode()) for text in TEXTS), prompt_contains="colour"),
        Script((), prompt_contains="silent"),
        Script(tuple(b"abab"), repeat=True, prompt_contains="again"),
    )
    with running(executor, SETTINGS) as server:
        yield server


def joined(chunks: list[Any]) -> dict[int, dict[str, Any]]:
    """Text, log probabilities, ids and ends by choice, of the chunks of either route."""
    found: dict[int, dict[str, Any]] = defaultdict(lambda: {"text": "", "logprobs": [], "ids": [], "ends": []})
    for chunk in chunks:
        for part in chunk["choices"]:
            choice = found[part["index"]]
            assert not choice["ends"], "nothing comes after the finish reason"
            choice["text"] += part["delta"].get("content", "") if "delta" in part else part["text"]
            choice["ids"] += part.get("token_ids") or []
            choice["logprobs"] += _entries(part["logprobs"])
            if part["finish_reason"]:
                choice["ends"].append((part["finish_reason"], part["stop_reason"]))
    return dict(found)


def of_whole(body: Any) -> dict[int, dict[str, Any]]:
    return {
        choice["index"]: {
            "text": choice["message"]["content"] if "message" in choice else choice["text"],
            "logprobs": _entries(choice["logprobs"]),
            "ids": choice.get("token_ids") or [],
            "ends": [(choice["finish_reason"], choice["stop_reason"])],
        }
        for choice in body["choices"]
    }


def _entries(logprobs: Any) -> list[Any]:
    if not logprobs:
        return []
    if "content" in logprobs:
        return logprobs["content"]
    columns = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return [list(entry) for entry in zip(*(logprobs[name] for name in columns), strict=True)]


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("path", ["chat", "complete"])
def test_str_07_streamed_choices_are_the_whole_ones(served: Running, path: str, n: int) -> None:
    stops: list[Any] = [None, ["STOP"], ["en", "ü"]]
    for stop, echo, logprobs, limit in itertools.product(stops, (False, True), (False, True), (None, 6)):
        fields: dict[str, Any] = {"n": n, "stop": stop, "echo": echo, "max_tokens": limit, "return_token_ids": True}
        if logprobs:
            fields |= {"logprobs": True, "top_logprobs": 2} if path == "chat" else {"logprobs": 2}
        prompt: Any = "colour" if path == "chat" else ["colour", "of colours"]
        whole = getattr(served, path)(prompt, **fields).json()
        options = {"include_usage": True, "continuous_usage_stats": True}
        reply = getattr(served, path)(prompt, stream=True, stream_options=options, **fields)
        *chunks, usage, done = events_of(reply.text)
        assert done == "[DONE]"
        assert (usage["choices"], usage["usage"]) == ([], _uncached(usage["usage"], whole["usage"]))
        assert joined(chunks) == of_whole(whole), fields
        assert chunks[-1]["usage"] == usage["usage"]


def _uncached(streamed: Any, whole: Any) -> Any:
    """The whole answer's usage, but for the cached tokens: the second run of a prompt finds more."""
    return {**whole, "prompt_tokens_details": streamed["prompt_tokens_details"]}


@pytest.mark.parametrize("include_usage", [True, False, None])
@pytest.mark.parametrize("path", ["chat", "complete"])
def test_str_07_two_choices_that_end_on_their_first_token_have_every_event(
    served: Running, path: str, include_usage: bool | None
) -> None:
    options = {} if include_usage is None else {"stream_options": {"include_usage": include_usage}}
    *chunks, done = events_of(getattr(served, path)("silent", n=2, stream=True, **options).text)
    assert done == "[DONE]"
    if include_usage:
        last = chunks.pop()
        assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 2)
    assert all(("usage" in chunk) == bool(include_usage) for chunk in chunks)
    ends = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["finish_reason"]]
    assert sorted((end["index"], end["finish_reason"]) for end in ends) == [(0, "stop"), (1, "stop")]


def test_each_choice_has_its_own_text_and_end(served: Running) -> None:
    body = served.chat("colour", n=3, stop="STOP", max_tokens=7).json()
    assert [choice["message"]["content"] for choice in body["choices"]] == ["red STO", "grün \ufffd", "b"]
    ends = [(choice["finish_reason"], choice["stop_reason"]) for choice in body["choices"]]
    assert ends == [("length", None), ("length", None), ("stop", None)]
    body = served.chat("colour", n=3, stop="STOP").json()
    assert [choice["message"]["content"] for choice in body["choices"]] == ["red ", "grün 🫠", "b"]
    ends = [(choice["finish_reason"], choice["stop_reason"]) for choice in body["choices"]]
    assert ends == [("stop", "STOP"), ("stop", None), ("stop", None)]


def test_the_prompt_is_counted_once_and_every_token_of_every_choice(served: Running) -> None:
    usage = served.complete("colour", n=3, max_tokens=None, stop=None).json()["usage"]
    assert usage["prompt_tokens"] == len("colour")
    lengths = [min(16, len(text.encode()) + 1) for text in TEXTS]  # and EOS, where 16 tokens suffice
    assert usage["completion_tokens"] == sum(lengths)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_log_probabilities_are_the_devices_own(served: Running) -> None:
    [entries] = [c["logprobs"]["content"] for c in served.chat("hi", logprobs=True, top_logprobs=3).json()["choices"]]
    ids = [*b"Hello", EOS]
    assert [entry["logprob"] for entry in entries] == [scripted_logprob(i) for i in ids]
    for token_id, entry in zip(ids[:-1], entries, strict=False):
        assert [top["bytes"] for top in entry["top_logprobs"]] == [[x] for x in scripted_top(token_id, 3)]
        values = [scripted_logprob(token_id, x) for x in scripted_top(token_id, 3)]
        assert [top["logprob"] for top in entry["top_logprobs"]] == values
    columns = served.complete("hi", echo=True, logprobs=1, max_tokens=1).json()["choices"][0]["logprobs"]
    assert columns["token_logprobs"] == [None, scripted_logprob(ord("i")), scripted_logprob(ord("H"))]
    best = chr(scripted_top(ord("i"), 1)[0])
    assert columns["top_logprobs"][1] == {best: -1.0, "i": scripted_logprob(ord("i"))}


def test_an_answer_that_repeats_itself_can_be_ended(served: Running) -> None:
    detection = {"max_pattern_size": 2, "min_pattern_size": 2, "min_count": 3}
    choice = served.complete("again", repetition_detection=detection, max_tokens=100).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("ababab", "stop", "repetition")


@pytest.mark.parametrize("path", ["chat", "complete"])
def test_beam_search_gives_n_choices_best_first(served: Running, path: str) -> None:
    body = getattr(served, path)("hi", use_beam_search=True, n=3, max_tokens=4, return_token_ids=True).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    ids = [tuple(choice["token_ids"]) for choice in body["choices"]]
    assert len(set(ids)) == 3
    assert all(len(each) <= 4 for each in ids)
    assert body["choices"][0]["finish_reason"] in ("stop", "length")
    text = body["choices"][0]["message"]["content"] if path == "chat" else body["choices"][0]["text"]
    assert text == served.state.engine.tokenizer.decode(ids[0])
    assert served.gauge("num_requests_running") == 0


def test_beam_search_without_max_tokens_fits_the_model(served: Running) -> None:
    reply = served.chat("x" * 500, use_beam_search=True, n=1)
    assert reply.status_code == 200, reply.text
    assert reply.json()["usage"]["total_tokens"] <= served.state.engine.max_model_len


def test_a_beam_too_wide_for_the_servers_log_probabilities_is_400_and_names_n(served: Running) -> None:
    error = served.complete("hi", use_beam_search=True, n=11).json()["error"]
    assert error["param"] == "n"
    assert error["message"].startswith("n=11 ")
