"""Several sequences of one request: heard of together, ended each by itself, counted once."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from jaxllm.engine.async_engine import AsyncEngine
from jaxllm.engine.engine import Engine
from jaxllm.engine.messages import AddRequest, ErrorKind, RequestFailure, StepDeltas, TokenDelta
from jaxllm.engine.siblings import sibling_seed, split_siblings
from jaxllm.errors import CapacityError
from jaxllm.metrics.stats import CoreStats
from jaxllm.testing.scripted import Script
from jaxllm.types.outputs import RequestOutput
from jaxllm.types.request import FinishReason
from jaxllm.types.sampling import OutputKind, SamplingParams
from jaxllm.types.service import ServiceParams
from tests.engine.caller import EOS, Caller, check_idle
from tests.helpers.scripted_engine import Settings, make_parts, scripted

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def choices(*texts: str, **conditions: object) -> Script:
    return Script(choices=tuple(tuple(text.encode()) for text in texts), **conditions)  # type: ignore[arg-type]


def test_a_request_becomes_one_of_each_sequence_with_a_seed_of_its_own() -> None:
    params = SamplingParams(n=3, prompt_logprobs=2, stop=("x",))
    message = AddRequest("mine", (1, 2), params, 0.5, seed=42, cache_salt="s", bad_word_ids=((1,),))
    first, *others = split_siblings(message, "mine#7")
    assert [each.request_id for each in (first, *others)] == ["mine#7", "mine#7/1", "mine#7/2"]
    assert [each.fork_of for each in (first, *others)] == [None, "mine#7", "mine#7"]
    assert (first.params, first.seed) == (replace(params, n=1), 42)
    assert [each.params for each in others] == [replace(params, n=1, prompt_logprobs=None)] * 2
    assert all((each.cache_salt, each.bad_word_ids, each.prompt_ids) == ("s", ((1,),), (1, 2)) for each in others)


def test_sibling_seeds_follow_from_the_requests_alone_and_differ() -> None:
    seeds = [sibling_seed(seed, index) for seed in (-5, 0, 1, 2**62) for index in range(50)]
    assert len(set(seeds)) == len(seeds)
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
    assert sibling_seed(7, 3) == sibling_seed(7, 3)


def test_a_step_is_one_output_that_holds_those_with_news() -> None:
    caller = Caller(n=3)
    caller.step({0: b"a"}).step({0: b"b", 2: b"x", 1: b"m"}).step({1: b"n"}, {1: STOP})
    caller.step({0: b"c", 2: b"y"}, {0: LENGTH}).step({2: EOS}, {2: STOP})
    shown = [[(c.index, c.text, c.finish_reason) for c in output.outputs] for output in caller.outputs]
    assert shown == [
        [(0, "a", None)],
        [(0, "b", None), (1, "m", None), (2, "x", None)],
        [(1, "n", "stop")],
        [(0, "c", "length"), (2, "y", None)],
        [(2, "", "stop")],
    ]
    assert [o.finished for o in caller.outputs] == [False] * 4 + [True]
    assert [o.num_generated_tokens for o in caller.outputs] == [1, 4, 5, 7, 8]


@pytest.mark.parametrize("kind", [OutputKind.CUMULATIVE, OutputKind.FINAL_ONLY])
def test_other_kinds_show_every_sequence(kind: OutputKind) -> None:
    caller = (
        Caller(n=2, output_kind=kind).step({0: b"a"}).step({0: b"b", 1: b"x"}, {0: STOP}).step({1: b"y"}, {1: STOP})
    )
    last = caller.outputs[-1]
    assert [(c.index, c.text, c.token_ids) for c in last.outputs] == [(0, "ab", tuple(b"ab")), (1, "xy", tuple(b"xy"))]
    assert len(caller.outputs) == (3 if kind is OutputKind.CUMULATIVE else 1)
    assert last.finished and not any(o.finished for o in caller.outputs[:-1])


def test_str_03_a_stop_string_ends_one_sequence_and_the_core_drops_that_one() -> None:
    caller = Caller(n=2, stop=("q;r",)).step({0: b"a", 1: b"b"}).step({0: b"q;", 1: b"q"}).step({0: b"ra", 1: b"x"})
    assert caller.dropped == ["a#1"]
    assert not caller.outputs[-1].finished
    caller.step({1: b"y"}, {1: LENGTH})
    assert (caller.text(0), caller.text(1)) == ("a", "bqxy")
    assert caller.dropped == ["a#1"]  # the core ended the other by itself


def test_str_04_each_siblings_held_text_is_flushed_at_its_own_end() -> None:
    caller = Caller(n=2, stop=("three\nzzz",))
    caller.step({0: b"one thr", 1: b"two three"}).step({0: b"ee"}, {0: STOP}).step({1: b"\n"}, {1: LENGTH})
    assert (caller.text(0), caller.text(1)) == ("one three", "two three\n")


def test_str_07_two_sequences_that_end_on_their_first_token() -> None:
    caller = Caller(n=2).step({0: EOS, 1: EOS}, {0: STOP, 1: STOP})
    (output,) = caller.outputs
    assert [(c.index, c.text, c.finish_reason) for c in output.outputs] == [(0, "", "stop"), (1, "", "stop")]
    assert (output.finished, output.usage.completion_tokens) == (True, 2)


def test_an_interval_counts_the_tokens_of_each_sequence() -> None:
    caller = Caller(n=2, stream_interval=2).step({0: b"a"}).step({0: b"b", 1: b"x"}).step({0: b"c", 1: b"y"})
    caller.step({1: b"z"}).step({}, {0: STOP, 1: STOP})
    shown = [[(c.index, c.text) for c in output.outputs] for output in caller.outputs]
    assert shown == [[(0, "a")], [(1, "x")], [(0, "bc")], [(1, "yz")], [(0, ""), (1, "")]]


def test_met_01_a_request_of_several_sequences_is_counted_once() -> None:
    caller = Caller(n=2, prompt_ids=(1, 2, 3))
    caller.step({0: b"a"}, now_s=1.0).step({0: b"b", 1: b"x"}, {0: STOP}, now_s=1.5).step({1: b"y"}, now_s=1.75)
    caller.step({1: b"z"}, {1: LENGTH}, now_s=2.25)
    totals, observer = caller.processor.totals, caller.observer
    assert (totals.prompt_tokens, totals.cached_prompt_tokens, totals.generation_tokens) == (3, 1, 5)
    assert totals.finished == {"stop": 0, "length": 1, "abort": 0, "error": 0}  # that of the last to end
    assert observer.first_tokens == [1.0]
    assert observer.inter_tokens == [0.5, 0.25, 0.5]
    (ended,) = observer.ended
    assert (ended.num_sequences, ended.num_generation_tokens, ended.longest_generation_tokens) == (2, 5, 3)
    assert (ended.first_token_s, ended.last_token_s, ended.num_cached_tokens) == (1.0, 2.25, 1)


def test_abort_ends_the_sequences_that_run() -> None:
    caller = Caller(n=3).step({0: b"a", 1: b"x", 2: b"m"}, {1: STOP})
    assert caller.processor.abort(("a",), 2.0) == {0: ["a#1", "a#1/2"]}
    last = caller.outputs[-1]
    assert [(c.index, c.finish_reason) for c in last.outputs] == [(0, "abort"), (2, "abort")]
    assert last.finished
    assert caller.processor.loads == [0]
    assert (caller.processor.num_open, caller.processor.totals.finished["abort"]) == (0, 1)
    caller.step({0: b"b"})
    assert caller.outputs[-1] is last


@pytest.mark.parametrize("index", [0, 1])
def test_a_refused_sibling_refuses_the_request_once(index: int) -> None:
    caller = Caller(n=3)
    refusal = TokenDelta(
        caller.core_ids[index], finish_reason=FinishReason.ERROR, error=RequestFailure(ErrorKind.CAPACITY, "full")
    )
    others = tuple(TokenDelta(core_id, tuple(b"a")) for core_id in caller.core_ids)
    dropped = caller.processor.process(StepDeltas((others[0], refusal, *others[1:]), CoreStats(), 1), 1.0)
    assert [type(error) for error in caller.errors] == [CapacityError]
    assert caller.outputs == []
    assert sorted(dropped) == sorted(set(caller.core_ids) - {caller.core_ids[index]})
    assert (caller.processor.num_open, caller.processor.loads) == (0, [0])
    assert sum(caller.processor.totals.finished.values()) == 0


def test_the_engine_is_dead_is_said_once() -> None:
    caller = Caller(n=4).step({0: b"a"})
    caller.processor.fail_all("gone", 2.0)
    assert [str(error) for error in caller.errors] == ["gone"]
    assert caller.processor.totals.finished["error"] == 1


# On the whole engine.


def test_every_sibling_answers_in_its_place() -> None:
    executor = scripted(default=choices("red", "green!", "blue"))
    with Engine(make_parts(executor)) as engine:
        (output,) = engine.generate(["a colour, please"], [SamplingParams(n=3, max_tokens=None)])
        assert [(c.index, c.text, c.finish_reason) for c in output.outputs] == [
            (0, "red", "stop"),
            (1, "green!", "stop"),
            (2, "blue", "stop"),
        ]
        assert output.num_generated_tokens == 4 + 7 + 5
        check_idle(engine)
        assert engine.stats().totals.prompt_tokens == len("a colour, please")


@pytest.mark.parametrize("params", [{}, {"stop": ["een", "ue"]}, {"logprobs": 2}])
def test_str_01_the_streams_of_siblings_join_to_the_whole(params: dict[str, object]) -> None:
    executor = scripted(default=choices("naïve 🫠", "green green", "你好 blue"))
    seen: list[RequestOutput] = []
    with Engine(make_parts(executor)) as engine:
        streamed = SamplingParams(n=3, max_tokens=None, output_kind=OutputKind.DELTA, **params)  # type: ignore[arg-type]
        (joined,) = engine.generate(["abc"], [streamed], seen.append)
        (whole,) = engine.generate(["abc"], [streamed])
    assert joined.outputs == whole.outputs
    for completion in whole.outputs:
        pieces = [c for output in seen for c in output.outputs if c.index == completion.index]
        assert "".join(piece.text for piece in pieces) == completion.text
        assert sum((piece.token_ids for piece in pieces), ()) == completion.token_ids
        assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + [completion.finish_reason]
        assert not any("\ufffd" in piece.text for piece in pieces)


def test_a_full_queue_refuses_all_siblings_and_the_engine_lives() -> None:
    with Engine(make_parts(scripted(), Settings(max_num_queued_reqs=2, max_num_seqs=2))) as engine:
        with pytest.raises(CapacityError, match="max_num_queued_reqs=2"):
            engine.generate(["abc"], [SamplingParams(n=8)])
        (output,) = engine.generate(["abc"], [SamplingParams(n=2)])
        assert [c.text for c in output.outputs] == ["Hello", "Hello"]
        check_idle(engine)


def test_more_siblings_than_slots_and_pages_take_turns() -> None:
    settings = Settings(num_pages=9, max_num_seqs=3, max_model_len=24)
    texts = [f"text {index}" for index in range(7)]
    with Engine(make_parts(scripted(default=choices(*texts)), settings)) as engine:
        outputs = engine.generate(["a prompt", "another"], [SamplingParams(n=7, max_tokens=None)] * 2)
        for output in outputs:
            assert [c.text for c in output.outputs] == texts
        check_idle(engine, num_pages=8)


def test_a_slow_reader_of_siblings_loses_nothing() -> None:
    async def main() -> None:
        engine = AsyncEngine(make_parts(scripted(default=choices("one", "two two"), step_s=0.001)))
        params = SamplingParams(n=2, max_tokens=None, output_kind=OutputKind.DELTA, logprobs=1)
        texts = ["", ""]
        num_positions = [0, 0]
        async for output in engine.stream("abc", params, request_id="a"):
            for completion in output.outputs:
                texts[completion.index] += completion.text
                assert completion.logprobs is not None
                num_positions[completion.index] += len(completion.logprobs)
            await asyncio.sleep(0.004)
        assert texts == ["one", "two two"]
        assert num_positions == [4, 8]
        await engine.close()

    asyncio.run(main())


def test_every_sibling_is_served_on_the_terms_of_its_request() -> None:
    service = ServiceParams(tenant="alice", deadline_s=2.0)
    message = AddRequest("a", (1, 2), SamplingParams(n=3), 5.0, 1, priority=-4, cache_salt="salt", service=service)
    terms = [(each.priority, each.cache_salt, each.service, each.arrival_s) for each in split_siblings(message, "a#1")]
    assert terms == [(-4, "salt", service, 5.0)] * 3
