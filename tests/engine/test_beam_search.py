"""Beam search against an enumeration of all sequences, and against the plainest form of itself."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.engine.async_engine import AsyncEngine
from jaxllm.engine.beam_run import BeamLimits, BeamRun
from jaxllm.engine.beam_search import BeamSearch
from jaxllm.engine.engine import Engine
from jaxllm.engine.executor import Ticket
from jaxllm.engine.inputs import InputProcessor, TokensPrompt
from jaxllm.engine.parts import EngineParts
from jaxllm.errors import CapacityError, EngineDead, RequestError
from jaxllm.testing.faults import Fault, FaultKind, FaultyExecutor
from jaxllm.types.outputs import CompletionOutput, RequestOutput, TokenLogprob
from jaxllm.types.sampling import BeamSearchParams
from jaxllm.types.service import ServiceParams
from jaxllm.types.step import Logprobs, SchedulerOutput, StepOutput
from tests.engine.caller import check_idle
from tests.helpers.scripted_engine import EOS, TOKENIZER, Settings, make_parts

Next = Callable[[tuple[int, ...]], dict[int, float]]  # log probabilities of the next token, by token


def random_language(seed: int, tokens: Sequence[int]) -> Next:
    """A distribution of its own after every sequence, always the same for the same seed."""

    def after(ids: tuple[int, ...]) -> dict[int, float]:
        rng = random.Random(f"{seed}/{ids}")
        weights = {token: rng.uniform(0.05, 1.0) for token in tokens}
        total = sum(weights.values())
        return {token: math.log(weight / total) for token, weight in weights.items()}

    return after


def likely(choices: dict[int, float], num: int) -> list[tuple[int, float]]:
    return sorted(choices.items(), key=lambda item: (-item[1], item[0]))[:num]


def search(params: BeamSearchParams, language: Next, eos_ids: frozenset[int]) -> list[tuple[tuple[int, ...], float]]:
    beams = BeamSearch(params, max_tokens=params.max_tokens, eos_ids=eos_ids)
    while wanted := beams.wanted():
        beams.advance([likely(language(beam.token_ids), 2 * params.beam_width) for beam in wanted])
    return [(beam.token_ids, beam.cumulative_logprob) for beam in beams.best()]


def every_sequence(language: Next, eos: int | None, length: int) -> dict[tuple[int, ...], float]:
    """The log probability of each sequence that ends in `eos` or has `length` tokens."""
    found: dict[tuple[int, ...], float] = {}
    for end in range(1, length + 1):
        for ids in itertools.product(language(()), repeat=end):
            if eos in ids[:-1] or (end < length and ids[-1] != eos):
                continue
            found[ids] = sum(language(ids[:i])[ids[i]] for i in range(end))
    return found


def score(ids: tuple[int, ...], total: float, penalty: float) -> float:
    return total / len(ids) ** penalty


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("penalty", [-1.0, 0.0, 0.6, 1.0, 2.0])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_width_that_holds_all_beams_finds_the_best_of_all_sequences(
    seed: int, penalty: float, ignore_eos: bool
) -> None:
    language = random_language(seed, tokens=(0, 1, 2))
    params = BeamSearchParams(beam_width=27, max_tokens=4, length_penalty=penalty, ignore_eos=ignore_eos)
    everything = every_sequence(language, None if ignore_eos else 2, 4)
    expected = sorted(everything.items(), key=lambda item: -score(*item, penalty))[:27]
    found = search(params, language, frozenset({2}))
    assert [ids for ids, _ in found] == [ids for ids, _ in expected]
    assert [total for _, total in found] == pytest.approx([total for _, total in expected])


def plainest(params: BeamSearchParams, language: Next, eos_ids: frozenset[int]) -> list[tuple[tuple[int, ...], float]]:
    """The same search without keeping few and stopping early: as its description reads."""
    live: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    finished: list[tuple[tuple[int, ...], float]] = []
    for _ in range(params.max_tokens):
        options = [
            ((*ids, token), total + logprob)
            for ids, total in live
            for token, logprob in likely(language(ids), 2 * params.beam_width)
        ]
        finished += [option for option in options if not params.ignore_eos and option[0][-1] in eos_ids]
        going = [option for option in options if params.ignore_eos or option[0][-1] not in eos_ids]
        live = sorted(going, key=lambda option: -option[1])[: params.beam_width]
    ranked = sorted([*finished, *live], key=lambda option: -score(*option, params.length_penalty))
    return ranked[: params.beam_width]


@given(
    seed=st.integers(0, 10**6),
    width=st.integers(1, 5),
    max_tokens=st.integers(1, 6),
    penalty=st.sampled_from([-1.5, 0.0, 0.5, 1.0, 3.0]),
    ignore_eos=st.booleans(),
)
def test_stopping_early_changes_nothing(
    seed: int, width: int, max_tokens: int, penalty: float, ignore_eos: bool
) -> None:
    params = BeamSearchParams(beam_width=width, max_tokens=max_tokens, length_penalty=penalty, ignore_eos=ignore_eos)
    language = random_language(seed, tokens=range(6))
    assert search(params, language, frozenset({4, 5})) == plainest(params, language, frozenset({4, 5}))


def test_a_width_of_one_is_greedy() -> None:
    language = random_language(3, tokens=range(6))
    greedy: tuple[int, ...] = ()
    for _ in range(5):
        greedy = (*greedy, likely(language(greedy), 1)[0][0])
    (found,) = search(BeamSearchParams(beam_width=1, max_tokens=5), language, frozenset())
    assert found[0] == greedy


def test_it_stops_once_no_running_beam_can_win() -> None:
    """The end is nearly certain at once: a second round could change nothing."""
    rounds = 0

    def language(ids: tuple[int, ...]) -> dict[int, float]:
        return {0: math.log(0.98), 1: math.log(0.01), 2: math.log(0.01)}

    beams = BeamSearch(BeamSearchParams(beam_width=1, max_tokens=100), max_tokens=100, eos_ids=frozenset({0}))
    while wanted := beams.wanted():
        rounds += 1
        beams.advance([likely(language(beam.token_ids), 2) for beam in wanted])
    assert rounds < 100
    assert beams.best()[0].token_ids == (0,)


# On the whole engine: real scheduler and front end, an executor that knows the distribution.


@dataclass
class LanguageExecutor:
    """Answers every request by a known distribution over what follows the last tokens of its sequence."""

    language: Next
    prompt_length: int
    num_steps: int = 0
    known: dict[str, list[int]] = field(default_factory=dict[str, list[int]])

    def submit(self, plan: SchedulerOutput) -> Ticket:
        self.num_steps += 1
        output = StepOutput(plan.step_id, {})
        new = {each.request_id: each for each in plan.new}
        for request_id, samples in zip(plan.rows.request_ids, plan.rows.samples.tolist(), strict=True):
            if request_id in new:
                self.known[request_id] = list(new[request_id].token_ids)
                self.params = new[request_id].params
            if not samples:
                continue
            options = self.language(tuple(self.known[request_id][self.prompt_length :]))
            num = self.params.logprobs
            assert num is not None
            top = likely(options, num)
            token = top[0][0]
            output.tokens[request_id] = (token,)
            output.logprobs[request_id] = Logprobs(
                [token], [options[token]], [1], [[t for t, _ in top]], [[v for _, v in top]]
            )
        return Ticket(plan.step_id, output)

    def collect(self, ticket: Ticket) -> StepOutput:
        return ticket.handle

    def close(self) -> None:
        pass


LETTERS = tuple(b"abcdef")
PROMPTS = [TokensPrompt(list(b"first prompt"), "first"), TokensPrompt(list(b"other prompt"), "other")]


def parts_of(seed: int = 1, settings: Settings | None = None, **overrides: Any) -> EngineParts:
    executor = LanguageExecutor(random_language(seed, (*LETTERS, EOS)), len(PROMPTS[0].token_ids))
    return make_parts(executor, settings or Settings(max_num_seqs=16, max_num_batched_tokens=128), **overrides)


@pytest.mark.parametrize("width", [1, 3, 10])
def test_an_engine_finds_what_the_description_finds(width: int) -> None:
    params = BeamSearchParams(beam_width=width, max_tokens=6)
    with Engine(parts_of()) as engine:
        outputs = engine.beam_search(PROMPTS, params)
        expected = plainest(params, random_language(1, (*LETTERS, EOS)), frozenset({EOS}))
        for output, prompt in zip(outputs, PROMPTS, strict=True):
            assert output.prompt == prompt.text
            assert output.prompt_token_ids == tuple(prompt.token_ids)
            assert output.finished
            assert [c.index for c in output.outputs] == list(range(len(expected)))
            assert [c.token_ids for c in output.outputs] == [ids for ids, _ in expected]
            assert [c.cumulative_logprob for c in output.outputs] == pytest.approx([total for _, total in expected])
            for completion in output.outputs:
                has_ended = completion.token_ids[-1] == EOS
                assert completion.finish_reason == ("stop" if has_ended else "length")
                assert completion.text == bytes(i for i in completion.token_ids if i != EOS).decode()
            assert output.num_generated_tokens == sum(len(ids) for ids, _ in expected)
        check_idle(engine)


def test_met_01_a_search_is_counted_as_one_request() -> None:
    with Engine(parts_of()) as engine:
        (output,) = engine.beam_search(PROMPTS[:1], BeamSearchParams(beam_width=4, max_tokens=5, ignore_eos=True))
        totals = engine.stats().totals
        assert totals.finished == {"stop": 0, "length": 1, "abort": 0, "error": 0}
        assert (totals.prompt_tokens, totals.generation_tokens) == (12, output.usage.completion_tokens) == (12, 20)


def test_the_text_of_the_end_is_shown_if_asked_for() -> None:
    params = {"beam_width": 6, "max_tokens": 2, "length_penalty": 0.0}
    with Engine(parts_of()) as engine:
        (hidden,) = engine.beam_search(PROMPTS[:1], BeamSearchParams(**params))
        (shown,) = engine.beam_search(PROMPTS[:1], BeamSearchParams(**params, include_stop_str_in_output=True))
    assert any(c.finish_reason == "stop" for c in hidden.outputs)
    for one, other in zip(hidden.outputs, shown.outputs, strict=True):
        assert other.token_ids == one.token_ids
        assert other.text == one.text + ("<eos>" if one.finish_reason == "stop" else "")


def test_max_tokens_are_cut_to_what_fits() -> None:
    with Engine(parts_of(settings=Settings(max_model_len=15))) as engine:
        (output,) = engine.beam_search(PROMPTS[:1], BeamSearchParams(beam_width=2, max_tokens=999, ignore_eos=True))
        assert [len(c.token_ids) for c in output.outputs] == [3, 3]


@pytest.mark.parametrize(
    ("params", "overrides", "word", "param"),
    [
        ({"beam_width": 11}, {}, "22 log probabilities .* max_logprobs=20; accepted: at most 10", "beam_width"),
        ({"beam_width": 2}, {"logprobs_mode": "raw_logits"}, "cannot add up logits", "beam_width"),
        ({"beam_width": 2, "temperature": 0.7}, {}, "processed_logprobs", "temperature"),
    ],
)
def test_what_an_engine_cannot_search_is_refused_by_name(
    params: dict[str, Any], overrides: dict[str, Any], word: str, param: str
) -> None:
    with Engine(parts_of(**overrides)) as engine:
        with pytest.raises(RequestError, match=word) as caught:
            engine.beam_search(PROMPTS, BeamSearchParams(**params, max_tokens=3))
        assert caught.value.param == param
        assert engine.stats().core.num_steps == 0
        with pytest.raises(RequestError, match=r"prompts\[1\]: prompt is empty"):
            engine.beam_search(["fine", ""], BeamSearchParams(beam_width=2, max_tokens=3))
        assert sum(engine.stats().totals.finished.values()) == 0


def test_sec_02_more_beams_than_the_queue_takes_are_refused_and_nothing_stays() -> None:
    with Engine(parts_of(settings=Settings(max_num_queued_reqs=2))) as engine:
        with pytest.raises(CapacityError):
            engine.beam_search(PROMPTS[:1], BeamSearchParams(beam_width=5, max_tokens=3))
        check_idle(engine)


def run(coroutine: Any, **overrides: Any) -> None:
    async def main() -> None:
        engine = AsyncEngine(parts_of(**overrides))
        try:
            await coroutine(engine)
        finally:
            await engine.close()

    asyncio.run(main())


def test_an_asynchronous_engine_finds_the_same_beside_others() -> None:
    async def ask(engine: AsyncEngine) -> None:
        params = BeamSearchParams(beam_width=3, max_tokens=6)
        searches = [engine.beam_search(p, params, request_id=f"b{i}") for i, p in enumerate(PROMPTS)]
        found = await asyncio.gather(*searches)
        expected = plainest(params, random_language(1, (*LETTERS, EOS)), frozenset({EOS}))
        for index, output in enumerate(found):
            assert output.request_id == f"b{index}"
            assert [c.token_ids for c in output.outputs] == [ids for ids, _ in expected]
        assert engine.stats().totals.finished["length"] + engine.stats().totals.finished["stop"] == 2

    run(ask)


@pytest.mark.parametrize("how", ["cancel", "abort"])
def test_sch_01_a_search_that_is_left_gives_everything_back(how: str) -> None:
    async def leave(engine: AsyncEngine) -> None:
        params = BeamSearchParams(beam_width=4, max_tokens=100, ignore_eos=True)
        for number in range(10):
            task = asyncio.create_task(engine.beam_search(PROMPTS[0], params, request_id=f"b{number}"))
            while engine.stats().core.num_steps < 3 * (number + 1):
                await asyncio.sleep(0.001)
            with pytest.raises(RequestError, match="in use"):
                await engine.beam_search(PROMPTS[0], params, request_id=f"b{number}")
            if how == "cancel":
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            else:
                while not task.done():
                    await engine.abort(f"b{number}")
                    await asyncio.sleep(0)
                assert {c.finish_reason for c in task.result().outputs} == {"abort"}
            for _ in range(2000):
                stats = engine.stats()
                if (stats.core.num_running, stats.core.num_free_pages, stats.num_open_requests) == (0, 64, 0):
                    break
                await asyncio.sleep(0.001)
            else:
                pytest.fail(f"not given back: {engine.stats()}")
        assert engine.stats().totals.finished["abort"] == 10

    run(leave)


def test_hlt_01_a_dead_engine_ends_a_search() -> None:
    parts = parts_of()
    executor = FaultyExecutor(parts.executor, [Fault(3, FaultKind.RAISE)])
    with Engine(make_parts(executor)) as engine:
        with pytest.raises(EngineDead):
            engine.beam_search(PROMPTS, BeamSearchParams(beam_width=2, max_tokens=9, ignore_eos=True))
        assert engine.stats().totals.finished["error"] == 2


def test_every_step_of_a_beam_search_is_served_on_its_terms_and_counts_from_its_arrival() -> None:
    service = ServiceParams(tenant="alice", deadline_s=9.0)
    inputs = InputProcessor(TOKENIZER, max_model_len=64, vocab_size=260, eos_ids=frozenset({EOS}), seed=0)
    limits = BeamLimits(
        max_model_len=64, vocab_size=260, eos_ids=frozenset({EOS}), max_logprobs=20, logprobs_mode="raw_logprobs"
    )
    params = BeamSearchParams(beam_width=2, max_tokens=3, ignore_eos=True)
    terms: dict[str, Any] = {"priority": -4, "cache_salt": "salt", "service": service}
    run = BeamRun(inputs.tokenize("abc"), params, limits, inputs, request_id="a", arrival_s=5.0, **terms)
    (first,) = run.wanted()
    scored = tuple(TokenLogprob(65 + i, -1.0 - i, i + 1) for i in range(4))
    step = CompletionOutput(0, "", (65,), logprobs=(scored,), finish_reason="length")
    run.take([RequestOutput("b", None, (1,), (step,), True)], 6.0)
    for message in (first, *run.wanted()):
        assert {name: getattr(message, name) for name in terms} == terms
        assert message.arrival_s == 5.0
    late = CompletionOutput(0, "", (), finish_reason="abort", stop_reason="deadline")
    run.take([RequestOutput("b", None, (1,), (late,), True)] * 2, 14.0)
    assert run.wanted() == []
    ends = {(each.finish_reason, each.stop_reason) for each in run.output(TOKENIZER, 14.0).outputs}
    assert ends == {("abort", "deadline")}
