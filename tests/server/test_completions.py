"""POST /v1/completions: kinds of prompts, echo, several choices, streams."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from tests.helpers.scripted_engine import make_parts, script, scripted
from tests.server.harness import Running, events_of, running

LONGEST = 512  # max_model_len of the test server


def test_a_whole_completion(server: Running) -> None:
    body = server.complete("hi").json()
    assert (body["object"], body["model"]) == ("text_completion", "tiny")
    assert body["id"].startswith("cmpl-")
    [choice] = body["choices"]
    assert (choice["index"], choice["text"], choice["finish_reason"]) == (0, "Hello", "stop")
    assert (choice["logprobs"], choice["stop_reason"]) == (None, None)
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (2, 6)


def test_sixteen_tokens_are_the_default(server: Running) -> None:
    assert server.complete("long").json()["usage"]["completion_tokens"] == 16
    assert server.complete("long", max_tokens=None).json()["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("prompt", ["hi", ["hi"], list(b"hi"), [list(b"hi")]], ids=str)
def test_each_kind_of_prompt_means_the_same(server: Running, prompt: Any) -> None:
    body = server.complete(prompt, return_token_ids=True).json()
    assert body["choices"][0]["prompt_token_ids"] == list(b"hi")
    assert body["choices"][0]["text"] == "Hello"


def test_several_prompts_give_several_choices_in_order(server: Running) -> None:
    body = server.complete(["hi", "long one", "unicode"], max_tokens=12).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert [choice["text"][:4] for choice in body["choices"]] == ["Hell", "over", "Ä 🫠 "]
    assert body["usage"]["prompt_tokens"] == 2 + 8 + 7


def test_streamed_choices_equal_whole_ones(server: Running) -> None:
    fields: dict[str, Any] = {"max_tokens": 12, "stream_options": {"include_usage": True}}
    prompts = ["hi", "long one", "unicode", "silent"]
    whole = server.complete(prompts, max_tokens=12).json()
    *chunks, usage, done = events_of(server.complete(prompts, stream=True, **fields).text)
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
    texts, reasons = defaultdict[int, str](str), defaultdict[int, list[str]](list)
    for chunk in chunks:
        [choice] = chunk["choices"]
        assert chunk["usage"] is None
        assert not reasons[choice["index"]], "nothing comes after the finish reason"
        texts[choice["index"]] += choice["text"]
        if choice["finish_reason"]:
            assert choice["text"] == ""
            reasons[choice["index"]].append(choice["finish_reason"])
    assert [texts[i] for i in range(4)] == [choice["text"] for choice in whole["choices"]]
    assert [reasons[i] for i in range(4)] == [[choice["finish_reason"]] for choice in whole["choices"]]


@pytest.mark.parametrize("prompt", ["hi", list(b"hi")], ids=str)
def test_echo_puts_the_prompt_before_the_answer(server: Running, prompt: Any) -> None:
    assert server.complete(prompt, echo=True).json()["choices"][0]["text"] == "hiHello"
    chunks = events_of(server.complete(prompt, echo=True, stream=True).text)[:-1]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hiHello"


def test_api_01_max_tokens_0_gives_back_the_prompt_with_echo_alone(server: Running) -> None:
    body = server.complete(["hi", "x" * LONGEST], echo=True, max_tokens=0).json()
    assert [choice["text"] for choice in body["choices"]] == ["hi", "x" * LONGEST]
    assert {choice["finish_reason"] for choice in body["choices"]} == {"length"}
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (2 + LONGEST, 0)
    streamed = events_of(server.complete("hi", echo=True, max_tokens=0, stream=True).text)
    assert (streamed[0]["choices"][0]["text"], streamed[-1]) == ("hi", "[DONE]")
    for prompt in ("x" * (LONGEST + 1), "", [5, 10_000], [[]]):
        refused = server.complete(prompt, echo=True, max_tokens=0)
        assert refused.status_code == 400, prompt
        assert refused.json()["error"]["param"].startswith("prompt")


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize(("value", "status"), [(0, None), (-1, 400), (None, 200), ("5", 400), (10**9, 200)])
def test_api_01_max_tokens(server: Running, value: Any, status: int | None, echo: bool) -> None:
    reply = server.complete("hi", max_tokens=value, echo=echo)
    assert reply.status_code == (status or (200 if echo else 400))
    if reply.status_code == 400:
        assert reply.json()["error"]["param"] == "max_tokens"


@pytest.mark.parametrize(
    "prompt",
    [None, "", [], [""], [[]], ["hi", ""], ["hi", 5], [5, "hi"], [True], [1.5], [[1, "a"]], {"a": 1}, [-1], [260]],
    ids=str,
)
@pytest.mark.parametrize("stream", [False, True])
def test_sch_05_nothing_or_nonsense_to_complete_is_400(server: Running, prompt: Any, stream: bool) -> None:
    reply = server.complete(prompt, stream=stream)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"].startswith("prompt")
    assert server.get("/health").status_code == 200
    assert server.complete("hi").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_prompt_among_several_is_named(server: Running, stream: bool) -> None:
    for prompts in (["hi", "", "hi"], [[1], [260], [1]]):
        reply = server.complete(prompts, stream=stream)
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "prompt[1]"
        assert reply.json()["error"]["message"].startswith("prompt[1]: ")


def test_sec_02_too_many_prompts_are_400(server: Running) -> None:
    assert server.complete(["x"] * 300).json()["error"]["param"] == "prompt"
    assert server.complete(["x"] * 200, n=100).json()["error"]["param"] == "n"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"suffix": "x"}, "suffix"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
        ({"best_of": 3}, "best_of"),
        ({"best_of": 10**9}, "best_of"),
        ({"n": 2, "best_of": 3}, "best_of"),
    ],
    ids=str,
)
def test_values_out_of_range_or_not_served_yet_are_400(server: Running, fields: dict[str, Any], param: str) -> None:
    for echo in (False, True):
        assert server.complete("hi", echo=echo, **fields).json()["error"]["param"] == param


def test_every_field_may_be_null(server: Running) -> None:
    from jaxllm.server.schema import CompletionRequest

    nulls = dict.fromkeys(name for name in CompletionRequest.__struct_fields__ if name != "prompt")
    assert server.complete("hi", **nulls).json()["choices"][0]["text"] == "Hello"


def test_the_models_own_defaults_come_before_openais() -> None:
    executor = scripted(default=script("Hello"))
    defaults = {"temperature": 0.25, "top_k": 7, "min_p": 0.3, "max_tokens": 3, "unheard_of": 1}
    with running(executor, parts={"default_params": defaults}) as served:
        assert served.state.default_params == {"temperature": 0.25, "top_k": 7, "min_p": 0.3, "max_tokens": 3}
        assert served.chat().json()["usage"]["completion_tokens"] == 3
        assert served.complete().json()["usage"]["completion_tokens"] == 6
    assert make_parts(executor).default_params == {}
