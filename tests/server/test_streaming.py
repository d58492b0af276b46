"""A stream and a whole answer say the same, whatever pieces the tokens come in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.testing.byte_tokenizer import ByteLevelTokenizer
from jaxllm.testing.scripted import Script
from tests.helpers.scripted_engine import scripted
from tests.server.canned import Canned, CannedEngine, ask
from tests.server.harness import SETTINGS, Running, events_of, running

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


class PieceTokenizer(ByteLevelTokenizer):
    """Bytes and special tokens, and beyond them tokens of several characters, and halves of some."""

    PIECES = (b"say q", b";", b"r and more", b"one two three", b"\nzz", b"\xf0\x9f", b"\xab\xa0 ok")
    vocab_size = 260 + len(PIECES)

    def token_bytes(self, token_id: int) -> bytes:
        return self.PIECES[token_id - 260] if token_id >= 260 else super().token_bytes(token_id)

    def token(self, token_id: int) -> str | None:
        return self.token_bytes(token_id).decode("latin-1") if token_id >= 260 else super().token(token_id)


PIECES = PieceTokenizer()


@pytest.fixture(scope="module")
def pieces() -> Iterator[Running]:
    executor = scripted(
        Script((260, 261, 262), prompt_contains="stop"),
        Script((263, 264), prompt_contains="held"),
        Script((65, 265, 266), prompt_contains="torn"),
        Script((65, 265), prompt_contains="broken"),
        Script((256, 258, 259, 65, 256, 66), prompt_contains="special"),
    )
    parts = {"tokenizer": PIECES, "vocab_size": PIECES.vocab_size}
    with running(executor, SETTINGS, parts=parts) as served:
        yield served


def both(served: Running, prompt: str, **fields: Any) -> tuple[str, str, Any, list[str]]:
    """(text, finish reason, stop reason, deltas) of each route, whole and streamed, which must agree."""
    found: list[tuple[str, str, Any, tuple[int, ...]]] = []
    deltas: list[str] = []
    fields = {"return_token_ids": True, **fields}
    for ask_route in (served.chat, served.complete):
        choice = ask_route(prompt, **fields).json()["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        found.append((text, choice["finish_reason"], choice["stop_reason"], tuple(choice["token_ids"])))
        *chunks, done = events_of(ask_route(prompt, stream=True, **fields).text)
        assert done == "[DONE]"
        parts = [chunk["choices"][0] for chunk in chunks]
        deltas = [part["delta"].get("content", "") if "delta" in part else part["text"] for part in parts]
        ids = tuple(i for part in parts for i in part.get("token_ids") or ())
        found.append(("".join(deltas), parts[-1]["finish_reason"], parts[-1]["stop_reason"], ids))
    assert len(set(found)) == 1, found
    return (*found[0][:3], deltas)


def test_str_03_a_stop_string_over_several_tokens_is_cut_out_exactly(pieces: Running) -> None:
    text, reason, stop, deltas = both(pieces, "stop", stop=["q;r"])
    assert (text, reason, stop) == ("say ", "stop", "q;r")
    assert all("q" not in delta for delta in deltas)
    text, _, stop, _ = both(pieces, "stop", stop=["q;r"], include_stop_str_in_output=True)
    assert (text, stop) == ("say q;r", "q;r")


@pytest.mark.parametrize(("max_tokens", "reason"), [(None, "stop"), (1, "length")])
def test_str_04_text_held_for_a_stop_string_is_shown_when_the_run_ends(
    pieces: Running, max_tokens: int | None, reason: str
) -> None:
    text, found, stop, _ = both(pieces, "held", stop=["three\nzzz"], max_tokens=max_tokens)
    assert (text, found, stop) == ("one two three" + ("" if max_tokens else "\nzz"), reason, None)


def test_str_01_halves_of_a_character_come_as_one(pieces: Running) -> None:
    text, _, _, deltas = both(pieces, "torn")
    assert text == "A🫠 ok"
    assert not any("\ufffd" in delta for delta in deltas)
    text, _, _, deltas = both(pieces, "broken")
    assert text == "A\ufffd"
    assert len([delta for delta in deltas if "\ufffd" in delta]) == 1


def test_str_01_every_token_of_a_held_character_keeps_its_log_probability(pieces: Running) -> None:
    for prompt in ("torn", "broken", "stop"):
        whole = pieces.chat(prompt, logprobs=True, top_logprobs=2, stop="q;r").json()["choices"][0]
        chunks = events_of(pieces.chat(prompt, logprobs=True, top_logprobs=2, stop="q;r", stream=True).text)[:-1]
        parts = [chunk["choices"][0] for chunk in chunks]
        entries = [entry for part in parts for entry in (part["logprobs"] or {"content": []})["content"]]
        assert entries == whole["logprobs"]["content"]
        assert len(entries) == 4 if prompt == "torn" else 3


@pytest.mark.parametrize("spaces", [True, False])
def test_str_06_special_tokens_stand_as_the_tokenizer_decodes_them(pieces: Running, spaces: bool) -> None:
    fields = {"skip_special_tokens": False, "spaces_between_special_tokens": spaces}
    text, *_ = both(pieces, "special", **fields)
    ids = [256, 258, 259, 65, 256, 66, 257]
    assert text == PIECES.decode(ids, skip_special_tokens=False) == "<bos><|user|><|assistant|>A<bos>B<eos>"
    assert both(pieces, "special")[0] == "AB"
