"""Columns of numbers to entries with texts: itself first, the others by rank, cut where the text was cut."""

from __future__ import annotations

from typing import Any

import pytest

from jaxllm.engine.engine import Engine
from jaxllm.engine.inputs import TokensPrompt
from jaxllm.engine.logprobs import PromptPositions, TokenTexts, position_of
from jaxllm.testing.byte_tokenizer import ByteLevelTokenizer
from jaxllm.testing.logprobs import scripted_columns, scripted_logprob, scripted_rank, scripted_top
from jaxllm.types.outputs import RequestOutput, TokenLogprob
from jaxllm.types.request import FinishReason
from jaxllm.types.sampling import OutputKind, SamplingParams
from jaxllm.types.step import Logprobs, PromptLogprobs
from tests.engine.caller import EOS, Caller
from tests.helpers.scripted_engine import Settings, make_parts, script, scripted

TEXTS = TokenTexts(ByteLevelTokenizer())


def columns(own: int, top: list[tuple[int, float]], value: float, rank: int, *, is_ranked: bool = True) -> Logprobs:
    return Logprobs([own], [value], [rank], [[t for t, _ in top]], [[v for _, v in top]], is_ranked)


def test_a_token_outside_the_top_comes_first_and_the_top_follows_by_rank() -> None:
    position = position_of(columns(100, [(97, -1.0), (98, -2.0)], -9.0, 41), 0, TEXTS)
    assert position == (
        TokenLogprob(100, -9.0, 41, "d"),
        TokenLogprob(97, -1.0, 1, "a"),
        TokenLogprob(98, -2.0, 2, "b"),
    )


def test_a_token_of_the_top_is_not_repeated() -> None:
    position = position_of(columns(98, [(97, -1.0), (98, -2.0), (99, -3.0)], -2.0, 2), 0, TEXTS)
    assert [(entry.token_id, entry.rank) for entry in position] == [(98, 2), (97, 1), (99, 3)]


def test_equally_likely_tokens_share_a_rank() -> None:
    position = position_of(columns(1, [(5, -1.0), (6, -1.0), (7, -2.0), (8, -2.0), (9, -3.0)], -3.0, 5), 0, TEXTS)
    assert [(entry.token_id, entry.rank) for entry in position[1:]] == [(5, 1), (6, 1), (7, 3), (8, 3), (9, 5)]


def test_tokens_of_ones_own_choice_have_no_rank() -> None:
    position = position_of(columns(97, [(98, -2.0), (97, -1.0), (99, -0.5)], -1.0, 2, is_ranked=False), 0, TEXTS)
    assert [(entry.token_id, entry.rank) for entry in position] == [(97, 2), (98, None), (99, None)]


def test_tokens_are_spelled_also_special_ones_and_parts_of_characters() -> None:
    position = position_of(columns(EOS, [(0xF0, -1.0)], -2.0, 2), 0, TEXTS)
    assert [entry.decoded_token for entry in position] == ["<eos>", "\ufffd"]
    assert [entry.decoded_token for entry in position_of(columns(EOS, [(97, -1.0)], -2.0, 2), 0, None)] == [None, None]


@pytest.mark.parametrize("kind", list(OutputKind))
def test_entries_go_with_their_tokens(kind: OutputKind) -> None:
    caller = Caller(logprobs=2, output_kind=kind).feed(b"a", b"bc", EOS, finish=FinishReason.STOP)
    completions = [output.outputs[0] for output in caller.outputs]
    assert all(c.logprobs is not None and len(c.logprobs) == len(c.token_ids) for c in completions)
    entries = [position for c in completions for position in c.logprobs or ()]
    ids = [token_id for c in completions for token_id in c.token_ids]
    assert [position[0].token_id for position in entries] == ids
    assert [position[0].logprob for position in entries] == [scripted_logprob(i) for i in ids]
    assert completions[-1].cumulative_logprob == sum(scripted_logprob(i) for i in [*b"abc", EOS])


def test_sam_09_zero_asks_for_the_token_alone() -> None:
    caller = Caller(logprobs=0, output_kind=OutputKind.FINAL_ONLY).feed(b"ab", finish=FinishReason.LENGTH)
    assert caller.outputs[0].outputs[0].logprobs == tuple(
        (TokenLogprob(t, scripted_logprob(t), scripted_rank(t), chr(t)),) for t in b"ab"
    )


def test_nothing_is_there_unless_asked_for() -> None:
    completion = Caller().feed(b"a", finish=FinishReason.LENGTH).outputs[0].outputs[0]
    assert (completion.logprobs, completion.cumulative_logprob) == (None, None)


def test_str_03_entries_end_with_the_token_that_completes_the_stop() -> None:
    caller = Caller(stop=("ab",), logprobs=1, output_kind=OutputKind.FINAL_ONLY).feed(b"xabyz")
    completion = caller.outputs[0].outputs[0]
    assert completion.logprobs is not None
    assert [position[0].token_id for position in completion.logprobs] == list(b"xab")
    assert completion.cumulative_logprob == sum(map(scripted_logprob, b"xab"))


def test_each_sibling_has_its_own() -> None:
    caller = Caller(n=2, logprobs=1, output_kind=OutputKind.FINAL_ONLY).step({0: b"a", 1: b"xy"})
    caller.step({0: EOS, 1: EOS}, {0: FinishReason.STOP, 1: FinishReason.STOP})
    for completion, ids in zip(caller.outputs[0].outputs, ([97, EOS], [*b"xy", EOS]), strict=True):
        assert [position[0].token_id for position in completion.logprobs or ()] == ids
        assert completion.cumulative_logprob == sum(map(scripted_logprob, ids))


PROMPT = tuple(b"prompt")


def pieces(*cuts: int) -> list[PromptLogprobs]:
    starts, ends = (1, *cuts), (*cuts, len(PROMPT))
    return [PromptLogprobs(s, scripted_columns(PROMPT[s:e], 1)) for s, e in zip(starts, ends, strict=True)]


def test_sam_10_a_prompt_has_an_entry_a_token_and_none_for_the_first() -> None:
    caller = Caller(PROMPT, prompt_logprobs=1, output_kind=OutputKind.FINAL_ONLY)
    first, second, third = pieces(3, 5)
    caller.step({0: b""}, scored=first).step({0: b""}, scored=second).step({0: b"a"}, scored=third)
    caller.step({}, {0: FinishReason.LENGTH})
    (output,) = caller.outputs
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert [position and position[0].token_id for position in output.prompt_logprobs[1:]] == list(PROMPT[1:])
    assert all(
        position and position[-1].rank in (1, scripted_rank(t))
        for position, t in zip(output.prompt_logprobs[1:], PROMPT[1:], strict=True)
    )


def test_a_stream_shows_the_prompts_entries_once_with_the_first_output() -> None:
    caller = Caller(PROMPT, n=2, prompt_logprobs=1)
    first, second = pieces(4)
    caller.step({0: b""}, scored=first).step({0: b"a"}, scored=second).step({0: b"b", 1: b"x"})
    shown = [output.prompt_logprobs for output in caller.outputs]
    assert shown[0] is not None and len(shown[0]) == len(PROMPT) and None not in shown[0][1:]
    assert shown[1:] == [None]


def test_what_a_preempted_request_computes_again_changes_nothing() -> None:
    positions = PromptPositions(len(PROMPT), TEXTS)
    for piece in [*pieces(2), *pieces(3, 4)]:
        positions.push(piece)
    whole = PromptPositions(len(PROMPT), TEXTS)
    whole.push(pieces()[0])
    assert positions.all() == whole.all()


# On the whole engine, with the scripted executor's rule as the reference.


def ask(prompt: str = "abc", settings: Settings | None = None, **params: Any) -> RequestOutput:
    with Engine(make_parts(scripted(default=script("Hello")), settings)) as engine:
        return engine.generate([prompt], [SamplingParams(max_tokens=None, **params)])[0]


def expected(token: int, ids: list[int]) -> set[tuple[int, float]]:
    return {(i, scripted_logprob(token, i)) for i in [token, *ids]}


@pytest.mark.parametrize("num", [0, 1, 3, 20])
def test_output_and_prompt_entries_of_an_engine(num: int) -> None:
    output = ask("the prompt", logprobs=num, prompt_logprobs=num)
    completion = output.outputs[0]
    pairs = list(zip(completion.token_ids, completion.logprobs or (), strict=True))
    pairs += list(zip(output.prompt_token_ids[1:], (output.prompt_logprobs or ())[1:], strict=True))  # type: ignore[arg-type]
    assert len(pairs) == 6 + len("the prompt") - 1
    for token, position in pairs:
        assert {(e.token_id, e.logprob) for e in position} == expected(token, scripted_top(token, num))
        assert position[0].token_id == token
        assert all(e.rank == scripted_rank(token, e.token_id) for e in position)
        assert [e.rank for e in position[1:]] == sorted(e.rank or 0 for e in position[1:])


def test_all_of_the_vocabulary_and_tokens_of_ones_own_choice() -> None:
    with Engine(make_parts(scripted(default=script("Hi")), max_logprobs=-1)) as engine:
        every, some = engine.generate(
            ["abc", "abc"],
            [SamplingParams(logprobs=-1), SamplingParams(logprob_token_ids=(5, 200, 72))],
        )
        for position in every.outputs[0].logprobs or ():
            assert sorted(e.token_id for e in position) == list(range(260))
        first = (some.outputs[0].logprobs or ())[0]
        assert [(e.token_id, e.rank is None) for e in first] == [(72, False), (5, True), (200, True)]
        assert [e.logprob for e in first] == [scripted_logprob(72, i) for i in (72, 5, 200)]


@pytest.mark.parametrize("chunk", [7, 64])
def test_sam_10_asked_twice_with_the_prefix_cache_on(chunk: int) -> None:
    settings = Settings(page_size=16, num_pages=16, max_num_batched_tokens=chunk)
    prompt = TokensPrompt(list(range(40, 73)))
    with Engine(make_parts(scripted(), settings)) as engine:
        params = SamplingParams(prompt_logprobs=1)
        first, second = (engine.generate([prompt], [params])[0] for _ in range(2))
        siblings = engine.generate([prompt], [SamplingParams(prompt_logprobs=1, n=3)])[0]
        plain = engine.generate([prompt], [SamplingParams()])[0]
    assert first.prompt_logprobs is not None
    assert len(first.prompt_logprobs) == 33
    assert first.prompt_logprobs[0] is None and None not in first.prompt_logprobs[1:]
    assert first.prompt_logprobs == second.prompt_logprobs == siblings.prompt_logprobs
    assert (second.num_cached_tokens, plain.num_cached_tokens) == (0, 32)  # it skips the cache; it fills it


@pytest.mark.parametrize("length", [1, 127, 128])
def test_api_01_a_prompt_is_scored_alone_up_to_the_whole_context(length: int) -> None:
    with Engine(make_parts(scripted())) as engine:
        prompt = TokensPrompt([65 + i % 50 for i in range(length)])
        (output,) = engine.generate([prompt], [SamplingParams(max_tokens=0, prompt_logprobs=0)])
        assert output.outputs[0].token_ids == ()
        assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("", "length")
        assert (output.usage.prompt_tokens, output.usage.completion_tokens) == (length, 0)
        assert output.prompt_logprobs is not None
        shown = [position and position[0].logprob for position in output.prompt_logprobs]
        assert shown == [None, *[scripted_logprob(t) for t in prompt.token_ids[1:]]]
        assert engine.stats().totals.prompt_tokens == length


def test_entries_survive_preemption() -> None:
    """Two requests in a pool too small for both: one is recomputed, and its entries come once."""
    settings = Settings(num_pages=10, max_num_seqs=2, max_model_len=32)
    responses = [script("x" * 20, prompt_contains="one"), script("y" * 20, prompt_contains="two")]
    with Engine(make_parts(scripted(*responses), settings)) as engine:
        params = SamplingParams(max_tokens=20, logprobs=1, prompt_logprobs=1)
        outputs = engine.generate(["one one one", "two two two"], [params] * 2)
        assert engine.stats().core.num_preemptions >= 1
    for output, letter in zip(outputs, b"xy", strict=True):
        assert [p[0].token_id for p in output.outputs[0].logprobs or ()] == [letter] * 20
        assert [p and p[0].token_id for p in output.prompt_logprobs or ()][1:] == list(output.prompt_token_ids[1:])
