"""Log probabilities in answers: values, order, spelling, offsets; whole, streamed and of echoed prompts."""

from __future__ import annotations

import json
import math
from typing import Any, cast

import httpx
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.server.openai.logprobs import (
    LogprobView,
    TextOffsets,
    byte_reader,
    chat_logprobs,
    most_likely,
    prompt_logprobs,
    text_logprobs,
)
from jaxllm.testing.byte_tokenizer import ByteLevelTokenizer
from jaxllm.tokenizer.base import Tokenizer
from jaxllm.tokenizer.detokenize import IncrementalDetokenizer
from jaxllm.types.outputs import TokenLogprob
from tests.server.harness import Running

TOKENIZER = ByteLevelTokenizer()
VIEW = LogprobView(TOKENIZER, num_top=2)


def entry(token_id: int, logprob: float, rank: int | None = 1) -> TokenLogprob:
    return TokenLogprob(token_id, logprob, rank)


def strict_json(value: Any) -> Any:
    """What a parser that knows no NaN and no Infinity reads."""

    def refuse(name: str) -> None:
        raise ValueError(name)

    return json.loads(msgspec.json.encode(value), parse_constant=refuse)


@given(
    logits=st.lists(st.sampled_from([0.0, -1.5, -2.5, -math.inf]), min_size=1, max_size=8),
    chosen=st.integers(0, 7),
    count=st.integers(-1, 9),
)
def test_the_most_likely_are_those_of_a_stable_sort_also_with_ties(
    logits: list[float], chosen: int, count: int
) -> None:
    chosen %= len(logits)
    order = np.argsort(-np.array(logits), kind="stable").tolist()[: None if count < 0 else count]
    rank = 1 + sum(value > logits[chosen] for value in logits)
    position = [entry(chosen, logits[chosen], rank)]
    position += [entry(i, logits[i], place + 1) for place, i in enumerate(order) if i != chosen]
    assert [e.token_id for e in most_likely(position, count)] == order


def test_sam_09_what_is_impossible_is_a_number_of_strict_json() -> None:
    position = (entry(65, -math.inf, 4), entry(66, -0.5), entry(67, -math.inf, 4), entry(68, math.nan, 4))
    shown = strict_json(chat_logprobs(VIEW, [position]))
    assert shown["content"][0]["logprob"] == -9999.0
    view = LogprobView(TOKENIZER, num_top=-1)
    columns = strict_json(text_logprobs(view, [65], [position], offsets()))
    assert columns["token_logprobs"] == [-9999.0]
    assert columns["top_logprobs"] == [{"B": -0.5, "A": -9999.0, "C": -9999.0, "D": -9999.0}]
    assert strict_json(prompt_logprobs(TOKENIZER, [None, position], 1))[1]["65"]["logprob"] == -9999.0


def test_a_chat_entry_has_text_bytes_and_the_most_likely_tokens_in_order() -> None:
    first = (entry(ord("b"), -1.0, 2), entry(ord("a"), -0.5), entry(0xC3, -3.0, 3))
    [shown] = strict_json(chat_logprobs(VIEW, [first]))["content"]
    assert (shown["token"], shown["logprob"], shown["bytes"]) == ("b", -1.0, [98])
    assert [(top["token"], top["logprob"]) for top in shown["top_logprobs"]] == [("a", -0.5), ("b", -1.0)]


def test_a_part_of_a_character_shows_its_own_bytes() -> None:
    parts = [(entry(byte, -1.0),) for byte in "Ä".encode()]
    content = chat_logprobs(LogprobView(TOKENIZER), parts).content
    assert bytes(byte for token in content for byte in token.bytes).decode() == "Ä"
    assert content[0].top_logprobs == ()


def test_asked_tokens_come_in_the_order_asked_for_in_place_of_the_most_likely() -> None:
    view = LogprobView(TOKENIZER, num_top=0, token_ids=(67, 65, 66))
    position = (entry(65, -0.1), entry(67, -4.0, None), entry(66, -3.0, None))
    [shown] = chat_logprobs(view, [position]).content
    assert [top.token for top in shown.top_logprobs] == ["C", "A", "B"]
    assert text_logprobs(view, [65], [position], offsets()).top_logprobs == [{"C": -4.0, "A": -0.1, "B": -3.0}]


def test_tokens_can_be_spelled_as_ids() -> None:
    view = LogprobView(TOKENIZER, num_top=1, as_ids=True)
    position = (entry(65, -2.0, 5), entry(66, -0.5))
    [shown] = chat_logprobs(view, [position]).content
    assert (shown.token, shown.top_logprobs[0].token, shown.bytes) == ("token_id:65", "token_id:66", [65])
    columns = text_logprobs(view, [65], [position], offsets())
    assert columns.tokens == ["token_id:65"]
    assert columns.top_logprobs == [{"token_id:66": -0.5, "token_id:65": -2.0}]


def test_of_two_tokens_with_one_text_the_likelier_stays() -> None:
    """Harnesses compare the chosen value with the largest of these, to see whether greedy would choose it."""
    position = (entry(0xC3, -5.0, 3), entry(0xC4, -0.5), entry(0xC5, -1.0))  # each a lone byte: U+FFFD
    [top] = text_logprobs(VIEW, [0xC3], [position], offsets()).top_logprobs
    assert top == {"\ufffd": -0.5}


def test_the_first_position_of_a_prompt_is_null() -> None:
    positions = [None, (entry(66, -1.0),)]
    columns = strict_json(text_logprobs(VIEW, [65, 66], positions, offsets()))
    assert columns == {
        "text_offset": [0, 1],
        "token_logprobs": [None, -1.0],
        "tokens": ["A", "B"],
        "top_logprobs": [None, {"B": -1.0}],
    }
    table = strict_json(prompt_logprobs(TOKENIZER, positions, 1))
    assert table == [None, {"66": {"logprob": -1.0, "rank": 1, "decoded_token": "B"}}]


def test_a_prompt_table_holds_the_token_itself_and_so_many_others() -> None:
    position = (entry(65, -3.0, 3), entry(66, -1.0, 1), entry(67, -2.0, 2))
    for count, expected in ((0, [65]), (1, [65, 66]), (2, [65, 66, 67]), (-1, [65, 66, 67])):
        [shown] = prompt_logprobs(TOKENIZER, [position], count)
        assert shown is not None
        assert list(shown) == expected


@given(text=st.text(max_size=12), start=st.integers(0, 5), cuts=st.lists(st.integers(0, 40), max_size=4))
def test_offsets_count_the_whole_characters_before_a_token_however_it_is_cut(
    text: str, start: int, cuts: list[int]
) -> None:
    raw = text.encode(errors="replace")
    expected = [start + len(raw[:i].decode(errors="ignore")) for i in range(len(raw))]
    reader, bounds = offsets(start), sorted(min(cut, len(raw)) for cut in cuts)
    pieces = [raw[low:high] for low, high in zip([0, *bounds], [*bounds, len(raw)], strict=True)]
    assert [offset for piece in pieces for offset in reader.take(piece)] == expected


def test_a_token_that_is_left_out_of_the_text_takes_no_room() -> None:
    assert offsets().take([256, 65, 257, 66]) == [0, 0, 1, 1]
    shown = TextOffsets(IncrementalDetokenizer(TOKENIZER, skip_special_tokens=False))
    assert shown.take([256, 65]) == [0, len("<bos>")]


def offsets(start: int = 0) -> TextOffsets:
    return TextOffsets(IncrementalDetokenizer(TOKENIZER), start)


class FallbackTokenizer:
    """Two bytes spelled as a byte-fallback vocabulary spells them, and a word; only what a view needs."""

    is_byte_level = False

    def __init__(self) -> None:
        self.tokens = ("<0xC3>", "<0x84>", "▁word")

    def is_byte_token(self, token_id: int) -> bool:
        return token_id < 2

    def token(self, token_id: int) -> str:
        return self.tokens[token_id]

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        assert not skip_special_tokens
        return "".join(" word" if i == 2 else "\ufffd" for i in ids)


def test_bytes_of_byte_fallback_tokens_are_those_they_stand_for() -> None:
    read = byte_reader(cast("Tokenizer", FallbackTokenizer()))
    assert [read(entry(i, -1.0)) for i in range(3)] == [b"\xc3", b"\x84", b" word"]


def read_strictly(reply: httpx.Response) -> Any:
    def refuse(name: str) -> None:
        raise ValueError(name)

    assert reply.status_code == 200, reply.text
    return json.loads(reply.text, parse_constant=refuse)


def test_sam_09_a_chat_without_top_logprobs_has_an_entry_a_token_and_empty_tops(server: Running) -> None:
    body = read_strictly(server.chat("hi", logprobs=True))
    entries = body["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [*"Hello", "<eos>"]
    assert len(entries) == body["usage"]["completion_tokens"]
    assert all(entry["top_logprobs"] == [] and entry["logprob"] < 0 for entry in entries)


def test_sam_09_zero_logprobs_of_a_completion_are_the_sampled_tokens_own(server: Running) -> None:
    columns = read_strictly(server.complete("hi", logprobs=0))["choices"][0]["logprobs"]
    assert columns["tokens"] == [*"Hello", "<eos>"]
    assert columns["text_offset"] == [0, 1, 2, 3, 4, 5]
    for token, value, top in zip(columns["tokens"], columns["token_logprobs"], columns["top_logprobs"], strict=True):
        assert top == {token: value}


@pytest.mark.parametrize("stream", [False, True])
def test_sam_09_echo_with_top_k_1_is_strict_json(server: Running, stream: bool) -> None:
    reply = server.complete("hi", echo=True, logprobs=2, top_k=1, stream=stream)
    if stream:
        chunks = [json.loads(line[6:]) for line in reply.text.split("\n\n")[:-2]]
        values = [
            value for chunk in chunks for value in (chunk["choices"][0]["logprobs"] or {}).get("token_logprobs", [])
        ]
    else:
        values = read_strictly(reply)["choices"][0]["logprobs"]["token_logprobs"]
    assert len(values) == len("hi") + len("Hello") + 1
    assert values[0] is None
    assert all(isinstance(value, float) for value in values[1:])


@pytest.mark.parametrize("path", ["chat", "complete"])
def test_sam_10_prompt_logprobs_are_whole_also_where_the_prompt_is_cached(server: Running, path: str) -> None:
    text = "thirty-three tokens, one a byte!!" if path == "complete" else "with two turn marks: 33 tokens."
    tables: list[Any] = []
    for _ in range(2):
        body = read_strictly(getattr(server, path)(text, prompt_logprobs=1))
        tables.append(body["prompt_logprobs"] if path == "chat" else body["choices"][0]["prompt_logprobs"])
    assert tables[0] == tables[1]
    assert len(tables[0]) == 33
    assert tables[0][0] is None
    ids = [258, *text.encode(), 259] if path == "chat" else text.encode()
    for token_id, entries in zip(ids[1:], tables[0][1:], strict=True):
        assert next(iter(entries)) == str(token_id)
        assert len(entries) in (1, 2)


def test_prompt_logprobs_leave_the_answer_as_it_is(server: Running) -> None:
    plain, scored = server.chat("hi").json(), server.chat("hi", prompt_logprobs=0).json()
    assert plain["choices"] == scored["choices"]
    assert plain["usage"]["completion_tokens"] == scored["usage"]["completion_tokens"]


@pytest.mark.parametrize("stream", [False, True])
def test_asked_ids_are_shown_of_every_token(server: Running, stream: bool) -> None:
    fields = {"logprobs": True, "logprob_token_ids": [7, 5], "return_tokens_as_token_ids": True, "stream": stream}
    reply = server.chat("hi", **fields)
    if stream:
        choices = [json.loads(line[6:])["choices"][0] for line in reply.text.split("\n\n")[:-2]]
        entries = [entry for choice in choices for entry in (choice["logprobs"] or {"content": []})["content"]]
    else:
        entries = read_strictly(reply)["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [f"token_id:{i}" for i in (*b"Hello", 257)]
    assert {tuple(top["token"] for top in entry["top_logprobs"]) for entry in entries} == {("token_id:7", "token_id:5")}
