"""A stream and a whole answer say the same, whatever pieces the tokens come in."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.server.canned import Canned, CannedEngine, ask
from tests.server.harness import events_of

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"

# Bytes of whole, torn and broken characters, and special tokens.
token_ids = st.lists(st.sampled_from([65, 66, 0xC3, 0x84, 0xF0, 0x9F, 0xAB, 0xA0, 256, 257]), min_size=1, max_size=9)


@st.composite
def canned(draw: st.DrawFn, n: int) -> Canned:
    choices = draw(st.lists(token_ids, min_size=n, max_size=n))
    piece = st.dictionaries(st.integers(0, n - 1), st.integers(0, 4), max_size=n)
    reasons = draw(st.lists(st.sampled_from(["stop", "length"]), min_size=n, max_size=n))
    return Canned(choices, draw(st.lists(piece, max_size=8)), reasons)


asked_for = st.fixed_dictionaries(
    {},
    optional={
        "echo": st.booleans(),
        "return_token_ids": st.booleans(),
        "return_tokens_as_token_ids": st.booleans(),
        "return_prompt_text": st.booleans(),
    },
)
options = st.fixed_dictionaries({"include_usage": st.booleans(), "continuous_usage_stats": st.booleans()})


@settings(deadline=None, max_examples=40)
@given(data=st.data(), n=st.integers(1, 3), fields=asked_for, options=options, top=st.none() | st.integers(0, 3))
def test_str_07_a_streamed_chat_is_the_whole_chat(
    data: st.DataObject, n: int, fields: dict[str, Any], options: dict[str, bool], top: int | None
) -> None:
    answer = data.draw(canned(n))
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "so "}]
    body: dict[str, Any] = {"messages": messages, "n": n, **fields}
    if top is not None:
        body |= {"logprobs": True, "top_logprobs": top}
    whole = ask(CannedEngine([answer]), CHAT, body).json()
    chunks = _chunks(answer, CHAT, {**body, "stream_options": options})
    joined = _checked_usage(chunks, whole["usage"], options)
    for choice in whole["choices"]:
        parts = joined[choice["index"]]
        deltas = [part["delta"] for part in parts]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert deltas[-1] == {}
        assert "".join(delta.get("content", "") for delta in deltas) == choice["message"]["content"]
        entries = [entry for part in parts for entry in (part["logprobs"] or {"content": []})["content"]]
        assert entries == (choice["logprobs"]["content"] if choice["logprobs"] else [])
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + [choice["finish_reason"]]
        assert [i for part in parts for i in part.get("token_ids", [])] == choice.get("token_ids", [])
    for name in ("prompt_token_ids", "prompt_text"):
        assert chunks[0].get(name) == whole.get(name)


@settings(deadline=None, max_examples=40)
@given(
    data=st.data(),
    n=st.integers(1, 3),
    num_prompts=st.integers(1, 3),
    fields=asked_for,
    options=options,
    top=st.none() | st.integers(0, 3),
)
def test_str_07_streamed_completions_are_the_whole_ones(
    data: st.DataObject, n: int, num_prompts: int, fields: dict[str, Any], options: dict[str, bool], top: int | None
) -> None:
    answers = [data.draw(canned(n)) for _ in range(num_prompts)]
    prompts = data.draw(st.lists(st.sampled_from(["hi", "Ä🫠!"]), min_size=num_prompts, max_size=num_prompts))
    body: dict[str, Any] = {"prompt": prompts, "n": n, "logprobs": top, **fields}
    whole = ask(CannedEngine(answers), TEXT, body).json()
    chunks = _chunks(answers, TEXT, {**body, "stream_options": options})
    joined = _checked_usage(chunks, whole["usage"], options)
    assert [choice["index"] for choice in whole["choices"]] == list(range(n * num_prompts))
    for choice in whole["choices"]:
        parts = joined[choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        for column in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            values = [value for part in parts if part["logprobs"] for value in part["logprobs"][column]]
            assert values == (choice["logprobs"] or {column: []})[column], column
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + [choice["finish_reason"]]
        assert [i for part in parts for i in part.get("token_ids", [])] == choice.get("token_ids", [])
        for name in ("prompt_token_ids", "prompt_text"):
            assert parts[0].get(name) == choice.get(name)
        offsets = (choice["logprobs"] or {"text_offset": []})["text_offset"]
        assert offsets == sorted(offsets)
        assert all(offset <= len(choice["text"]) for offset in offsets)


def _chunks(answers: Canned | list[Canned], path: str, body: dict[str, Any]) -> list[Any]:
    engine = CannedEngine(answers if isinstance(answers, list) else [answers])
    *chunks, done = events_of(ask(engine, path, {**body, "stream": True}).text)
    assert done == "[DONE]"
    return chunks


def _checked_usage(chunks: list[Any], whole: Any, options: dict[str, bool]) -> dict[int, list[Any]]:
    """The choices' parts in order of arrival; usage stands where it was asked for, and counts exactly."""
    if options["include_usage"]:
        last = chunks.pop()
        assert (last["choices"], last["usage"]) == ([], whole)
    seen: dict[int, list[Any]] = {}
    for chunk in chunks:
        [choice] = chunk["choices"]
        seen.setdefault(choice["index"], []).append(choice)
    usages = [chunk["usage"] for chunk in chunks if "usage" in chunk]
    if options["continuous_usage_stats"]:
        counts = [usage["completion_tokens"] for usage in usages]
        assert counts == sorted(counts)
        assert usages[-1] == whole
    else:
        assert usages == ([None] * len(chunks) if options["include_usage"] else [])
    return seen
