"""Log probabilities of sampled and of prompt tokens, against a log-softmax of the oracle's arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxllm.config.engine import LogprobsConfig, SchedulerConfig
from jaxllm.runner.runner import Runner
from jaxllm.types.request import Request
from jaxllm.types.sampling import SamplingParams
from jaxllm.types.step import PromptLogprobs, StepOutput
from tests.runner.drive import PAGE_SIZE, Piece, Planner
from tests.runner.oracle_model import VOCAB, greedy_continuation, next_logits
from tests.runner.traffic import TOLERANCE, Answer, Service, check_answer, check_columns, check_prompt, row_before
from tests.sampling.reference import filtered, log_softmax, shaped

MAX_MODEL_LEN = 160
PAGES = list(range(1, MAX_MODEL_LEN // PAGE_SIZE + 1))


@pytest.fixture(scope="module")
def long_runner(start: Callable[..., Runner]) -> Iterator[Runner]:
    """Steps of up to 160 tokens: more than two slices of scored rows."""
    runner = start(num_pages=100, max_num_seqs=3, max_num_batched_tokens=160, max_model_len=MAX_MODEL_LEN)
    yield runner
    assert runner.compilations_after_ready == 0
    runner.close()


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def step(runner: Runner, planner: Planner, pieces: Sequence[Piece], *args: object) -> StepOutput:
    return runner.collect(runner.submit(planner.plan(pieces, *args)))  # type: ignore[arg-type]


def score(runner: Runner, ids: list[int], chunks: Sequence[int], num_top: int = 5, slot: int = 1) -> Answer:
    """Compute `ids` in `chunks`, alone, all steps in flight at once."""
    params = SamplingParams(temperature=0.0, prompt_logprobs=num_top, max_tokens=1)
    planner, tickets, first = Planner(), [], 0
    new, pages = [planner.new("a", slot, ids, params=params)], {slot: PAGES}
    for count in chunks:
        is_last = first + count == len(ids)
        tickets.append(runner.submit(planner.plan([Piece("a", slot, first, count, samples=is_last)], new, pages)))
        new, pages, first = [], {}, first + count
    request = Request("a", tuple(ids), params, arrival_s=0.0)
    outputs = [runner.collect(t) for t in tickets]
    request.output_ids = list(outputs[-1].tokens["a"])
    return Answer(request, prompt=[o.prompt_logprobs["a"] for o in outputs if o.prompt_logprobs])


def flat(answer: Answer) -> list[tuple[object, ...]]:
    """Every position of a prompt's log probabilities, whatever pieces they came in."""
    rows = []
    for piece in answer.prompt:
        c = piece.columns
        rows += zip(c.token_ids, c.values, c.ranks, c.top_ids, c.top_values, strict=True)
    return rows


@pytest.mark.parametrize("size", [1, 2, 63, 64, 65, 128, 160])
def test_a_prompt_in_chunks_of_any_size_gets_the_log_probabilities_of_its_tokens(
    long_runner: Runner, size: int
) -> None:
    ids = prompt(MAX_MODEL_LEN if size > 2 else 23, size)
    chunks = [min(size, len(ids) - start) for start in range(0, len(ids), size)]
    answer = score(long_runner, ids, chunks)
    assert sum(len(piece.columns.values) for piece in answer.prompt) == len(ids) - 1
    check_prompt(answer)
    assert answer.tokens == greedy_continuation(ids, 1)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_chunks_change_nothing(long_runner: Runner, data: st.DataObject) -> None:
    ids = prompt(data.draw(st.integers(1, 150)), 7)
    chunks, left = [], len(ids)
    while left:
        chunks.append(data.draw(st.integers(1, left)))
        left -= chunks[-1]
    assert flat(score(long_runner, ids, chunks)) == flat(score(long_runner, ids, [len(ids)], slot=2))


@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_as_many_top_entries_come_as_were_asked_for(long_runner: Runner, num_top: int) -> None:
    check_prompt(score(long_runner, prompt(12), [12], num_top=num_top))


def test_a_prompt_that_fills_the_model_is_scored_without_touching_its_neighbours(long_runner: Runner) -> None:
    """The token after it has no position, and none is made up for it."""
    long, other, planner = prompt(MAX_MODEL_LEN, 1), prompt(6, 2), Planner()
    penalty = SamplingParams(temperature=0.0, frequency_penalty=2.0)
    step(long_runner, planner, [Piece("b", 2, 0, 6)], [planner.new("b", 2, other, params=penalty)], {2: [60, 61]})
    before = np.array(long_runner._state.history)
    answer = score(long_runner, long, [MAX_MODEL_LEN], slot=1)
    check_prompt(answer)
    after = np.asarray(long_runner._state.history)
    assert np.array_equal(after[:-1], before[:-1]), "only the spare slot, which padding writes to, may change"
    assert not np.asarray(long_runner._state.page_table)[-1].any()


def test_scored_prompts_samples_and_plain_requests_share_a_step(long_runner: Runner) -> None:
    ids = {name: prompt(length, length) for name, length in (("a", 70), ("b", 40), ("c", 9))}
    params = {
        "a": SamplingParams(temperature=0.0, prompt_logprobs=2, logprobs=3),
        "b": SamplingParams(temperature=0.0, prompt_logprobs=0),
        "c": SamplingParams(temperature=0.0),
    }
    planner, slots = Planner(), {"a": 2, "b": 0, "c": 1}
    new = [planner.new(name, slots[name], ids[name], params=params[name]) for name in ids]
    pages = {2: PAGES[:20], 0: PAGES[20:31], 1: PAGES[31:35]}
    pieces = [Piece("a", 2, 0, 70), Piece("b", 0, 0, 33, samples=False), Piece("c", 1, 0, 9)]
    output = step(long_runner, planner, pieces, new, pages)
    assert output.tokens == {name: tuple(greedy_continuation(ids[name], 1)) for name in "ac"}
    assert {name: (p.start, len(p.columns.values)) for name, p in output.prompt_logprobs.items()} == {
        "a": (1, 69),
        "b": (1, 33),
    }
    for name, piece in output.prompt_logprobs.items():
        for i in range(len(piece.columns.values)):
            num_top = params[name].prompt_logprobs or 0
            check_columns(piece.columns, i, next_logits(ids[name][: i + 1]), num_top)
    assert set(output.logprobs) == {"a"}
    check_columns(output.logprobs["a"], 0, next_logits(ids["a"]), 3)


@pytest.mark.parametrize(
    "asked",
    [{"logprobs": 0}, {"logprobs": 3}, {"logprobs": 20}, {"logprob_token_ids": (7, 200, 7, 0)}],
    ids=lambda asked: next(iter(asked.items())),
)
@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_sampled_tokens_get_the_log_probabilities_that_were_asked_for(
    runner: Runner, asked: dict[str, int], temperature: float
) -> None:
    service = Service(runner, SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=32, max_model_len=64))
    params = SamplingParams(temperature=temperature, max_tokens=12, ignore_eos=True, **asked)
    plain = SamplingParams(temperature=temperature, max_tokens=20, ignore_eos=True)
    requests = [Request(f"r{i}", tuple(prompt(5 + i, i)), (params, plain)[i % 2], 0.0, seed=i) for i in range(4)]
    for answer in service.run(requests).values():
        check_answer(answer)
        assert len(answer.tokens) == answer.request.params.max_tokens


def one_token(runner: Runner, params: SamplingParams, ids: list[int]) -> StepOutput:
    planner = Planner()
    new = [planner.new("a", 0, ids, params=params)]
    return step(runner, planner, [Piece("a", 0, 0, len(ids))], new, {0: PAGES[:10]})


def test_all_of_the_vocabulary_can_be_asked_for(start: Callable[..., Runner]) -> None:
    runner = start(max_num_seqs=1, max_num_batched_tokens=16, logprobs=LogprobsConfig(max_logprobs=-1))
    ids = prompt(7)
    output = one_token(runner, SamplingParams(temperature=0.0, logprobs=-1, prompt_logprobs=-1), ids)
    check_columns(output.logprobs["a"], 0, next_logits(ids), -1)
    for i in range(6):
        check_columns(output.prompt_logprobs["a"].columns, i, next_logits(ids[: i + 1]), -1)
    runner.close()


def test_the_mode_says_which_kind_comes_back(start: Callable[..., Runner]) -> None:
    """Prompt tokens are not sampled, so that processed and raw are the same there."""
    ids = prompt(9)
    params = SamplingParams(temperature=0.5, top_k=30, logit_bias={3: 4.0}, logprobs=5, prompt_logprobs=2)
    raw = next_logits(ids)
    request = Request("a", tuple(ids), params, 0.0)
    processed = filtered(shaped(row_before(request, 0)), params)
    expected = {
        "raw_logits": (raw, next_logits(ids[:4])),
        "processed_logprobs": (log_softmax(processed), log_softmax(next_logits(ids[:4]))),
        "processed_logits": (processed, next_logits(ids[:4])),
    }
    for mode, (sampled, scored) in expected.items():
        runner = start(max_num_seqs=1, max_num_batched_tokens=16, logprobs=LogprobsConfig(mode=mode))  # type: ignore
        output = one_token(runner, params, ids)
        columns = output.logprobs["a"]
        assert columns.values == pytest.approx([sampled[columns.token_ids[0]]], abs=TOLERANCE), mode
        assert columns.top_values[0] == pytest.approx(sampled[columns.top_ids[0]].tolist(), abs=TOLERANCE), mode
        piece: PromptLogprobs = output.prompt_logprobs["a"]
        assert piece.columns.values[3] == pytest.approx(scored[ids[4]], abs=TOLERANCE), mode
        runner.close()


def test_a_step_that_asks_for_log_probabilities_still_waits_once(runner: Runner) -> None:
    before = runner.stats()
    output = one_token(runner, SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1), prompt(9))
    after = runner.stats()
    assert output.logprobs
    assert output.prompt_logprobs
    assert after.num_syncs - before.num_syncs == 1
    assert after.num_host_to_device - before.num_host_to_device == 2  # the step and one slice of scored rows
