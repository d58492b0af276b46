"""Log probabilities in answers: values, order, spelling, offsets; whole, streamed and of echoed prompts."""

from __future__ import annotations

import json
import math
from typing import Any, cast

import msgspec
import numpy as np
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
