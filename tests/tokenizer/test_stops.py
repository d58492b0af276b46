"""Stop strings in pieces of text, against a reading of the whole text."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.tokenizer.stops import StopMatcher


def whole_text_oracle(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Read the text one character further at a time until a stop string ends there."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def run(pieces: list[str], stops: list[str], include: bool = False) -> tuple[list[str], str | None]:
    matcher = StopMatcher(stops, include)
    deltas: list[str] = []
    for piece in pieces:
        delta, stop = matcher.push(piece)
        deltas.append(delta)
        if stop is not None:
            assert matcher.push("more") == ("", stop)
            assert matcher.finish() == ""
            return deltas, stop
    return [*deltas, matcher.finish()], None


_TEXT = st.text(alphabet="abc", max_size=40)
_STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4)


@settings(max_examples=400, deadline=None)
@given(text=_TEXT, stops=_STOPS, cuts=st.lists(st.integers(0, 40), max_size=8), include=st.booleans())
def test_any_cutting_gives_the_whole_text_answer(text: str, stops: list[str], cuts: list[int], include: bool) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(edges)]
    deltas, stop = run(pieces, stops, include)
    assert ("".join(deltas), stop) == whole_text_oracle(text, stops, include)


@settings(max_examples=200, deadline=None)
@given(text=_TEXT, stops=_STOPS)
def test_text_is_held_only_while_it_may_begin_a_stop_string(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    for end, char in enumerate(text, 1):
        delta, stop = matcher.push(char)
        if stop is not None:
            return
        shown += delta
        longest = max((n for s in stops for n in range(len(s)) if text[:end].endswith(s[:n])), default=0)
        assert shown == text[: end - longest]


@pytest.mark.parametrize("pieces", [["see q", ";", "r and"], ["see q;", "r and"], ["see q;r and"], list("see q;r and")])
def test_str_03_stop_across_tokens_keeps_the_text_before_it(pieces: list[str]) -> None:
    deltas, stop = run(pieces, ["q;r"])
    assert "".join(deltas) == "see "
    assert stop == "q;r"
    assert not any("q" in delta for delta in deltas)


def test_str_03_stop_text_is_shown_when_asked_for() -> None:
    assert run(["see q", ";r and"], ["q;r"], include=True) == (["see ", "q;r"], "q;r")


def test_str_04_held_beginning_of_a_stop_is_flushed_at_the_end() -> None:
    assert run(["one two ", "three\n"], ["three\nzzz"]) == (["one two ", "", "three\n"], None)


def test_long_repetitive_stops_cost_linear_time() -> None:
    start = time.process_time()
    run(["a" * 1000] * 50, ["a" * 999 + "b", "a" * 500 + "c"])
    assert time.process_time() - start < 2
