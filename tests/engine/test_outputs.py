"""Ids to text: nothing lost, nothing shown that must not be, streamed equal to whole."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from jaxllm.engine.merge import merge_outputs
from jaxllm.engine.messages import StepDeltas, TokenDelta
from jaxllm.metrics.stats import CoreStats
from jaxllm.testing.byte_tokenizer import ByteLevelTokenizer
from jaxllm.tokenizer.detokenize import IncrementalDetokenizer
from jaxllm.types.request import FinishReason
from jaxllm.types.sampling import OutputKind
from tests.engine.caller import EOS, Caller


def each_byte(text: str) -> list[bytes]:
    return [bytes([b]) for b in text.encode()]


def test_str_01_a_character_over_several_tokens_is_never_shown_in_parts() -> None:
    text = "a\U0001fae0b\u010f!"
    caller = Caller().feed(*each_byte(text), EOS, finish=FinishReason.STOP)
    assert "".join(caller.texts) == text
    assert not any("\ufffd" in t for t in caller.texts)
    assert [len(o.outputs[0].token_ids) for o in caller.outputs] == [1] * (len(text.encode()) + 1)


def test_str_01_half_a_character_at_the_end_is_one_replacement() -> None:
    caller = Caller().feed(b"a", b"\xf0", b"\x9f", finish=FinishReason.LENGTH)
    assert "".join(caller.texts) == "a\ufffd"


@pytest.mark.parametrize("steps", [[b"say q", b";", b"r and on"], [b"say q;r and on"], each_byte("say q;r and on")])
def test_str_03_a_stop_string_over_tokens_is_cut_out_exactly(steps: list[bytes]) -> None:
    caller = Caller(stop=("q;r",)).feed(*steps)
    assert "".join(caller.texts) == "say "
    assert caller.end == ("stop", "q;r")
    assert caller.dropped == ["a#1"]


def test_str_03_the_stop_string_is_kept_if_asked_for() -> None:
    caller = Caller(stop=("q;r",), include_stop_str_in_output=True).feed(b"say q", b";r!")
    assert "".join(caller.texts) == "say q;r"


def test_str_03_tokens_after_the_one_that_completes_the_stop_do_not_count() -> None:
    caller = Caller(stop=("ab",)).feed(b"xabyz")
    assert caller.outputs[-1].num_generated_tokens == 3
    assert caller.processor.totals.generation_tokens == 3


@pytest.mark.parametrize("finish", [FinishReason.STOP, FinishReason.LENGTH])
def test_str_04_held_text_is_flushed_at_the_end(finish: FinishReason) -> None:
    steps: list[bytes | int] = [b"one two thr", b"ee"]
    if finish is FinishReason.STOP:
        steps.append(EOS)
    streamed = Caller(stop=("three\nzzz",)).feed(*steps, finish=finish)
    whole = Caller(stop=("three\nzzz",), output_kind=OutputKind.FINAL_ONLY).feed(*steps, finish=finish)
    assert "".join(streamed.texts) == whole.texts[0] == "one two three"
    assert streamed.end == whole.end == (finish.value, None)
    assert len(whole.outputs) == 1


def test_min_tokens_delays_stop_strings() -> None:
    caller = Caller(stop=("ab",), min_tokens=4).feed(*each_byte("ababxab!"))
    assert "".join(caller.texts) == "ababx"
    assert caller.end == ("stop", "ab")


def test_a_stop_string_and_the_last_token_together_are_a_stop() -> None:
    caller = Caller(stop=("ab",)).feed(b"xab", finish=FinishReason.LENGTH)
    assert caller.end == ("stop", "ab")
    assert caller.dropped == []  # the core has ended it already


@pytest.mark.parametrize(("skip", "text"), [(True, "hi"), (False, "hi<eos>")])
def test_the_text_of_eos_is_hidden_with_the_special_tokens(skip: bool, text: str) -> None:
    caller = Caller(skip_special_tokens=skip).feed(b"hi", EOS, finish=FinishReason.STOP)
    assert "".join(caller.texts) == text
    assert caller.outputs[-1].outputs[0].token_ids == (EOS,)


def test_output_kinds() -> None:
    def feed(kind: OutputKind) -> Caller:
        return Caller(output_kind=kind).feed(b"a", b"b", b"c", finish=FinishReason.LENGTH)

    assert feed(OutputKind.DELTA).texts == ["a", "b", "c"]
    assert feed(OutputKind.CUMULATIVE).texts == ["a", "ab", "abc"]
    assert feed(OutputKind.CUMULATIVE).outputs[-1].outputs[0].token_ids == tuple(b"abc")
    final = feed(OutputKind.FINAL_ONLY)
    assert final.texts == ["abc"]
    assert (final.outputs[0].usage.prompt_tokens, final.outputs[0].usage.total_tokens) == (2, 5)
    assert final.outputs[0].usage.cached_tokens == 1


def test_stream_interval_shows_the_first_and_the_last_at_once() -> None:
    caller = Caller(stream_interval=3).feed(*each_byte("abcdefgh"), finish=FinishReason.LENGTH)
    assert caller.texts == ["a", "bcd", "efg", "h"]


def test_without_detokenising_there_are_only_ids() -> None:
    caller = Caller(detokenize=False).feed(b"ab", finish=FinishReason.LENGTH)
    assert (caller.texts, caller.outputs[0].outputs[0].token_ids) == ([""], (97, 98))


def test_what_comes_after_the_end_is_ignored() -> None:
    caller = Caller(stop=("b",)).feed(b"ab", b"cd", b"e", finish=FinishReason.LENGTH)
    assert len(caller.outputs) == 1
    assert caller.processor.totals.finished == {"stop": 1, "length": 0, "abort": 0, "error": 0}


def test_abort_ends_once_with_what_there_is() -> None:
    caller = Caller(stop=("bz",)).feed(b"ab")
    assert caller.processor.abort(("a", "b"), 2.0) == {0: ["a#1"]}
    assert caller.processor.abort(("a",), 2.0) == {}
    assert "".join(caller.texts) == "ab"
    assert caller.end == ("abort", None)
    assert caller.processor.num_open == 0


def test_a_fault_in_one_requests_text_ends_that_request_alone() -> None:
    class Broken(IncrementalDetokenizer):
        def push(self, ids: Sequence[int]) -> str:
            raise ValueError(f"no text for {ids}")

    caller = Caller()
    caller.processor._sequences["a#1"].text._detokenizer = Broken(ByteLevelTokenizer())
    caller.feed(b"a")
    assert [type(e) for e in caller.errors] == [ValueError]
    assert caller.dropped == ["a#1"]
    assert caller.processor.totals.finished["error"] == 1


def test_moments_are_kept() -> None:
    caller = Caller(output_kind=OutputKind.FINAL_ONLY)
    caller.feed(b"a", now_s=1.5).feed(b"b", now_s=2.0, finish=FinishReason.LENGTH)
    metrics = caller.outputs[0].metrics
    assert metrics is not None
    assert (metrics.arrival_s, metrics.first_token_s, metrics.finished_s) == (0.0, 1.5, 2.0)


def test_unread_deltas_merge_without_loss() -> None:
    caller = Caller().feed(b"a", b"b", b"c", finish=FinishReason.LENGTH)
    merged = caller.outputs[0]
    for later in caller.outputs[1:]:
        merged = merge_outputs(merged, later, OutputKind.DELTA)
    assert (merged.outputs[0].text, merged.outputs[0].token_ids, merged.finished) == ("abc", tuple(b"abc"), True)


def test_str_06_special_tokens_side_by_side_get_no_spaces() -> None:
    ids = [258, 259, *b"word", EOS]
    streamed = Caller(skip_special_tokens=False).feed(*ids, finish=FinishReason.STOP)
    whole = Caller(skip_special_tokens=False, output_kind=OutputKind.FINAL_ONLY).feed(*ids, finish=FinishReason.STOP)
    expected = ByteLevelTokenizer().decode(ids, skip_special_tokens=False)
    assert "".join(streamed.texts) == whole.texts[0] == expected == "<|user|><|assistant|>word<eos>"


@pytest.mark.parametrize("kind", list(OutputKind))
def test_str_07_a_run_that_ends_on_its_first_token_is_one_output_with_its_usage(kind: OutputKind) -> None:
    caller = Caller(output_kind=kind).feed(EOS, finish=FinishReason.STOP)
    (output,) = caller.outputs
    assert (output.finished, output.outputs[0].text, output.outputs[0].finish_reason) == (True, "", "stop")
    assert (output.usage.prompt_tokens, output.usage.completion_tokens, output.usage.total_tokens) == (2, 1, 3)


def test_a_prompt_that_is_only_scored_ends_without_a_token() -> None:
    caller = Caller(max_tokens=0, prompt_logprobs=0).step({}, {0: FinishReason.LENGTH})
    (output,) = caller.outputs
    assert (output.finished, output.outputs[0].token_ids, output.outputs[0].finish_reason) == (True, (), "length")
    assert caller.observer.first_tokens == []
    assert (caller.processor.totals.prompt_tokens, caller.processor.totals.generation_tokens) == (2, 0)
    assert caller.processor.totals.finished["length"] == 1


def expire(caller: Caller, index: int) -> None:
    delta = TokenDelta(caller.core_ids[index], finish_reason=FinishReason.ABORT, stop_reason="deadline")
    caller.dropped += caller.processor.process(StepDeltas((delta,), CoreStats(), 1), 1.0)


def test_a_request_that_waits_past_its_deadline_ends_without_a_token_and_is_counted() -> None:
    caller = Caller()
    expire(caller, 0)
    assert caller.end == ("abort", "deadline")
    assert (caller.errors, caller.outputs[-1].num_generated_tokens, caller.dropped) == ([], 0, [])
    assert caller.processor.totals.finished["abort"] == 1
    assert caller.processor.loads == [0]


def test_a_sibling_that_waits_past_its_deadline_leaves_the_others_what_they_have() -> None:
    caller = Caller(n=2).step({0: b"he"})
    expire(caller, 1)
    caller.step({0: b""}, {0: FinishReason.ABORT})
    assert (caller.text(0), caller.text(1), caller.errors) == ("he", "", [])
    ends = {c.index: c.finish_reason for o in caller.outputs for c in o.outputs if c.finish_reason is not None}
    assert ends == {0: "abort", 1: "abort"}
