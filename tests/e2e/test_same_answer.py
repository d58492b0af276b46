"""A request's tokens do not depend on its company: alone or among 64, cold or warm, preempted or not."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from jaxllm.engine.inputs import TokensPrompt
from jaxllm.types.outputs import RequestOutput
from jaxllm.types.sampling import SamplingParams
from tests.e2e.conftest import MAX_MODEL_LEN, RunningModel

VOCAB_SIZE = 49152


@dataclass(frozen=True)
class Workload:
    prompts: list[TokensPrompt]
    params: list[SamplingParams]


def workload(count: int, longest_prompt: int, longest_output: int, *, seed: int) -> Workload:
    """Greedy and seeded requests in turn; a third begin with one of two shared prefixes."""
    rng = random.Random(seed)
    shared = [[rng.randrange(3, VOCAB_SIZE) for _ in range(longest_prompt // 2)] for _ in range(2)]
    prompts, params = [], []
    for index in range(count):
        length = (1, longest_prompt)[index] if index < 2 else rng.randint(1, longest_prompt)
        own = [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]
        prefix = shared[index % 2][: length - 1] if index % 3 == 0 else []
        prompts.append(TokensPrompt([*prefix, *own[len(prefix) :]]))
        num_output = (1, longest_output)[index] if index < 2 else rng.randint(1, longest_output)
        chosen = {"temperature": 0.0} if index % 2 else {"temperature": 0.8, "top_p": 0.95, "top_k": 50, "seed": index}
        params.append(SamplingParams(max_tokens=num_output, ignore_eos=True, **chosen))
    return Workload(prompts, params)


def token_ids(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    return [output.outputs[0].token_ids for output in outputs]


def alone(model: RunningModel, work: Workload) -> list[tuple[int, ...]]:
    """Each request by itself, with nothing in the prefix cache."""
    answers = []
    for prompt, params in zip(work.prompts, work.params, strict=True):
        model.forget_prefixes()
        answers += token_ids(model.engine.generate([prompt], [params]))
    return answers


def check_everything_is_back(model: RunningModel) -> None:
    model.wait_until_idle()
    kv, scheduler = model.parts.kv, model.parts.scheduler
    kv.check()
    assert kv.num_free_pages == kv.num_pages - 1  # free or cached: all but the null page
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.requests) == (0, 0, {})
    assert model.engine.stats().compilations_after_ready == 0


def check_same_answers(model: RunningModel, work: Workload, *, min_preemptions: int) -> None:
    expected = alone(model, work)
    model.forget_prefixes()
    before = model.parts.scheduler.num_preemptions
    cold = model.engine.generate(work.prompts, work.params)
    assert model.parts.scheduler.num_preemptions - before >= min_preemptions
    hits_before = model.parts.scheduler.prefix_hits
    warm = model.engine.generate(work.prompts, work.params)
    assert model.parts.scheduler.prefix_hits > hits_before
    assert token_ids(cold) == expected
    assert token_ids(warm) == expected
    assert [o.usage.completion_tokens for o in cold] == [p.max_tokens for p in work.params]
    check_everything_is_back(model)


def test_mixed_requests_answer_as_they_do_alone(smollm2: RunningModel) -> None:
    check_same_answers(smollm2, workload(16, 150, 40, seed=1), min_preemptions=1)


@pytest.mark.slow
def test_64_mixed_requests_answer_as_they_do_alone(smollm2: RunningModel) -> None:
    check_same_answers(smollm2, workload(64, 600, 128, seed=0), min_preemptions=5)


def test_sch_02_two_requests_in_seven_pages_preempt_and_answer_the_same(smollm2: RunningModel) -> None:
    """A third request, admitted first, holds all but seven pages while the two grow to ten."""
    rng = random.Random(2)
    filler = TokensPrompt([rng.randrange(3, VOCAB_SIZE) for _ in range(MAX_MODEL_LEN - 36)])
    two = Workload(
        [TokensPrompt([rng.randrange(3, VOCAB_SIZE) for _ in range(34)]) for _ in range(2)],
        [SamplingParams(max_tokens=35, temperature=0.0, ignore_eos=True)] * 2,
    )
    expected = alone(smollm2, two)
    before = smollm2.parts.scheduler.num_preemptions
    outputs = smollm2.engine.generate(
        [filler, *two.prompts], [SamplingParams(max_tokens=36, temperature=0.0, ignore_eos=True), *two.params]
    )
    assert smollm2.parts.scheduler.num_preemptions > before
    assert token_ids(outputs)[1:] == expected
    assert {o.outputs[0].finish_reason for o in outputs} == {"length"}
    check_everything_is_back(smollm2)


@pytest.mark.parametrize(("length", "most_cached"), [(15, 14), (16, 15), (17, 16), (32, 31)])
def test_sch_04_a_fully_cached_prompt_leaves_a_token_to_compute(
    smollm2: RunningModel, length: int, most_cached: int
) -> None:
    rng = random.Random(length)
    prompt = TokensPrompt([rng.randrange(3, VOCAB_SIZE) for _ in range(length)])
    longer = TokensPrompt([*prompt.token_ids, *range(100, 120)])
    params = [SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)]
    cold = alone(smollm2, Workload([prompt], params))
    again = smollm2.engine.generate([prompt], params)
    assert token_ids(again) == cold
    assert again[0].num_cached_tokens == most_cached
    least = length // 16 * 16  # and of the page after those a copy, if a quarter of it or more agrees
    assert smollm2.engine.generate([longer], params)[0].num_cached_tokens == (length if length - least >= 4 else least)


@pytest.mark.parametrize("lengths", [(1, 63, 65), (16, 15, 17)])
def test_tpu_02_a_batch_of_prompts_at_page_borders_answers_as_alone(
    smollm2: RunningModel, lengths: tuple[int, ...]
) -> None:
    rng = random.Random(sum(lengths))
    prompts = [TokensPrompt([rng.randrange(3, VOCAB_SIZE) for _ in range(n)]) for n in lengths]
    work = Workload(prompts, [SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)] * len(prompts))
    expected = alone(smollm2, work)
    smollm2.forget_prefixes()
    assert token_ids(smollm2.engine.generate(work.prompts, work.params)) == expected
