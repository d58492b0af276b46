"""POST /v1/chat/completions: whole answers, streams, and what each field does."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.conftest import SPLIT_CHARACTER
from tests.server.harness import Running, events_of


def test_a_whole_answer_has_every_field_that_validators_want(server: Running) -> None:
    reply = server.chat("hi")
    assert reply.status_code == 200
    body = reply.json()
    prompt_tokens = len(b"hi") + 2  # one byte a token, and two turn marks
    assert body["id"].startswith("chatcmpl-")
    assert (body["object"], body["model"], body["service_tier"]) == ("chat.completion", "tiny", "default")
    assert body["system_fingerprint"].startswith("jaxllm-")
    assert isinstance(body["created"], int)
    [choice] = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello", "refusal": None, "annotations": []}
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "stop", None)
    assert choice["stop_reason"] is None
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt_tokens, 6)
    assert usage["total_tokens"] == prompt_tokens + 6
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 0


def test_a_repeated_prompt_reports_its_cached_tokens(server: Running) -> None:
    text = "cache me if you can " * 4
    first, second = (server.chat(text, cache_salt="only here").json()["usage"] for _ in range(2))
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["prompt_tokens_details"]["cached_tokens"] == second["prompt_tokens"] - 1


@pytest.mark.parametrize("include_usage", [True, False, None])
def test_str_07_events_come_in_order(server: Running, include_usage: bool | None) -> None:
    options = {} if include_usage is None else {"stream_options": {"include_usage": include_usage}}
    whole = server.chat("order").json()
    reply = server.chat("order", stream=True, **options)
    assert reply.headers["content-type"].startswith("text/event-stream")
    *chunks, done = events_of(reply.text)
    assert done == "[DONE]"
    usage_chunks = [chunk for chunk in chunks if not chunk["choices"]]
    choice_chunks = [chunk for chunk in chunks if chunk["choices"]]
    assert len(usage_chunks) == (1 if include_usage else 0)
    if include_usage:
        assert chunks[-1] is usage_chunks[0]
        assert chunks[-1]["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
        assert all(chunk["usage"] is None for chunk in choice_chunks)
    else:
        assert all("usage" not in chunk for chunk in chunks)
    deltas = [chunk["choices"][0]["delta"] for chunk in choice_chunks]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in choice_chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[-1] == {}
    assert reasons == [None] * (len(reasons) - 1) + ["stop"]
    assert "".join(delta["content"] for delta in deltas[1:-1]) == "Hello"
    assert {(chunk["object"], chunk["id"]) for chunk in chunks} == {("chat.completion.chunk", chunks[0]["id"])}


def test_str_07_a_run_that_ends_on_its_first_token_still_has_every_event(server: Running) -> None:
    text = server.chat("silent", stream=True, stream_options={"include_usage": True}).text
    role, finish, usage, done = events_of(text)
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert (finish["choices"][0]["delta"], finish["choices"][0]["finish_reason"]) == ({}, "stop")
    assert usage["usage"]["completion_tokens"] == 1
    assert done == "[DONE]"


def test_usage_can_be_asked_for_on_every_chunk(server: Running) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events_of(server.chat("hi", stream=True, stream_options=options).text)[:-1]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 6


def test_str_01_a_character_of_several_tokens_is_never_torn(server: Running) -> None:
    chunks = events_of(server.chat("unicode", stream=True).text)[:-1]
    pieces = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "".join(pieces) == SPLIT_CHARACTER
    assert not any("�" in piece for piece in pieces)


def test_a_stop_string_is_named_and_left_out(server: Running) -> None:
    choice = server.chat("stopping", stop=["STOP", "unused"]).json()["choices"][0]
    assert choice["message"]["content"] == "one two "
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "STOP")
    chunks = events_of(server.chat("stopping", stop="STOP", stream=True).text)[:-1]
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "one two "
    assert chunks[-1]["choices"][0]["stop_reason"] == "STOP"


def test_token_ids_are_returned_on_request(server: Running) -> None:
    body = server.chat("hi", return_token_ids=True).json()
    assert body["choices"][0]["token_ids"][:5] == list(b"Hello")
    assert body["prompt_token_ids"] == [258, *b"hi", 259]
    chunks = events_of(server.chat("hi", return_token_ids=True, stream=True).text)[:-1]
    streamed = [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", [])]
    assert streamed == body["choices"][0]["token_ids"]
    assert chunks[0]["prompt_token_ids"] == [258, *b"hi", 259]


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_api_01_both_names_of_max_tokens_limit_the_answer(server: Running, field: str) -> None:
    body = server.chat("long", **{field: 7}).json()
    assert body["usage"]["completion_tokens"] == 7
    assert body["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("value", [None, 10**9, 10**30])
def test_api_01_a_max_tokens_that_is_absent_or_too_large_means_all_that_fits(server: Running, value: Any) -> None:
    body = server.chat("long", max_tokens=value).json()
    assert body["usage"]["total_tokens"] == server.state.engine.max_model_len


@pytest.mark.parametrize("value", [0, -1, "5", 1.5, True, [4]])
@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_api_01_a_wrong_max_tokens_is_400_and_named(server: Running, field: str, value: Any) -> None:
    reply = server.chat("hi", **{field: value})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == field
    assert field in error["message"]
    assert (error["type"], error["code"]) == ("invalid_request_error", None)


def test_the_newer_name_of_max_tokens_wins(server: Running) -> None:
    assert server.chat("long", max_tokens=9, max_completion_tokens=3).json()["usage"]["completion_tokens"] == 3


def test_content_parts_names_and_developers_are_taken(server: Running) -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "name": "ann", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "c"},
    ]
    reply = server.post("/v1/chat/completions", {"messages": messages, "return_token_ids": True})
    assert reply.status_code == 200, reply.text
    prompt = server.state.engine.tokenizer.decode(reply.json()["prompt_token_ids"], skip_special_tokens=False)
    assert prompt == "<|system|>be brief<|user|>a\nb<|assistant|><|user|>c<|assistant|>"


def test_a_last_message_can_be_continued(server: Running) -> None:
    messages = [{"role": "user", "content": "say"}, {"role": "assistant", "content": "I sa"}]
    body = {"messages": messages, "continue_final_message": True, "return_token_ids": True}
    ids = server.post("/v1/chat/completions", body).json()["prompt_token_ids"]
    assert server.state.engine.tokenizer.decode(ids, skip_special_tokens=False).endswith("<|assistant|>I sa")
    refused = server.post("/v1/chat/completions", {**body, "add_generation_prompt": True})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "continue_final_message"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hello", "messages"),
        ([["user", "hi"]], "messages[0]"),
        ([{"content": "hi"}], "messages[0].role"),
        ([{"role": "robot", "content": "hi"}], "messages[0].role"),
        ([{"role": ["user"], "content": "hi"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [5]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": "hi", "name": 5}], "messages[0].name"),
        ([{"role": "assistant", "tool_calls": 5}], "messages[0].tool_calls"),
        ([{"role": "assistant", "content": "hi", "tool_calls": {"a": 1}}], "messages[0].tool_calls"),
        ([{"role": "function", "content": "hi"}], "messages"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_malformed_messages_are_400_and_named(server: Running, messages: Any, param: str, stream: bool) -> None:
    reply = server.post("/v1/chat/completions", {"messages": messages, "stream": stream})
    assert reply.status_code == 400
    assert reply.headers["content-type"] == "application/json"
    assert reply.json()["error"]["param"] == param
    assert reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 10**6}, "n"),
        ({"n": 0}, "n"),
        ({"n": 10**400}, "n"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 2 * 10**9}, "top_logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"logprob_token_ids": [5]}, "logprob_token_ids"),
        ({"logprobs": True, "logprob_token_ids": []}, "logprob_token_ids"),
        ({"logprobs": True, "logprob_token_ids": [1] * 200}, "logprob_token_ids"),
        ({"logprobs": True, "logprob_token_ids": [1, 2], "top_logprobs": 3}, "top_logprobs"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"min_p": 1.5}, "min_p"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [1] * 600_000}, "allowed_token_ids"),
        ({"logit_bias": dict.fromkeys(map(str, range(2000)), 1)}, "logit_bias"),
        ({"repetition_detection": {"max_pattern_size": -1}}, "repetition_detection"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncation_side": "top"}, "truncation_side"),
        ({"thinking_token_budget": 5}, "thinking_token_budget"),
        ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
        ({"use_beam_search": True, "stream": True}, "stream"),
        ({"documents": ["text"]}, "documents[0]"),
        ({"top_logprobs": 2 * 10**9}, "top_logprobs"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"abc": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {}}, "response_format"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": {"type": 1}}}, "response_format"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"guided_choice": ["a"]}, "guided_choice"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"bad_words": ["a"] * 50_000}, "bad_words"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs.chat_template"),
        ({"reasoning_effort": "colossal"}, "reasoning_effort"),
        ({"top_p": -1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"temperature": 999999}, "temperature"),
        ({"temperature": "warm"}, "temperature"),
        ({"stop": ["x"] * 500_000}, "stop"),
        ({"stop": "x" * 2000}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": [None]}, "stop[0]"),
        ({"min_tokens": 10**40}, "min_tokens"),
        ({"stop_token_ids": [10**40]}, "stop_token_ids"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": 5}, "cache_salt"),
        ({"priority": 2**70}, "priority"),
        ({"priority": 10**300}, "priority"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": "yes"}, "stream"),
        ({"seed": 2**80}, "seed"),
    ],
    ids=str,
)
def test_sec_02_values_out_of_range_or_not_served_yet_are_400_and_named(
    server: Running, fields: dict[str, Any], param: str
) -> None:
    reply = server.chat("hi", **fields)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == param
    assert len(error["message"]) < 400


def test_values_that_ask_for_nothing_are_accepted(server: Running) -> None:
    neutral: dict[str, Any] = {
        "n": 1,
        "logprobs": False,
        "top_logprobs": 0,
        "echo": False,
        "use_beam_search": False,
        "documents": [],
        "vllm_xargs": {},
        "length_penalty": 1.0,
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": {},
        "tools": [],
        "tool_choice": "none",
        "parallel_tool_calls": False,
        "response_format": {"type": "text"},
        "bad_words": [],
        "stop": [],
        "top_k": -1,
        "metadata": {"a": "b"},
        "store": False,
        "user": "ann",
        "service_tier": "auto",
        "reasoning_effort": "low",
        "modalities": ["text"],
        "prompt_cache_key": "k",
        "priority": 3,
        "cache_salt": "salt",
        "chat_template_kwargs": {"enable_thinking": False},
    }
    assert server.chat("hi", **neutral).status_code == 200
    with_tools = {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"}
    assert server.chat("hi", **with_tools).status_code == 200


def test_every_field_may_be_null(server: Running) -> None:
    from jaxllm.server.schema import ChatRequest

    nulls = dict.fromkeys(name for name in ChatRequest.__struct_fields__ if name != "messages")
    assert server.chat("hi", **nulls).json()["choices"][0]["message"]["content"] == "Hello"


def test_a_prompt_too_long_says_both_numbers(server: Running) -> None:
    reply = server.chat("x" * 600, stream=True)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "602" in error["message"]
    assert "512" in error["message"]
