"""200 random parameter sets answer the same whatever the company, the memory, the chunks or the devices."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest

from jaxllm.engine.inputs import TokensPrompt
from jaxllm.types.outputs import CompletionOutput, RequestOutput, TokenLogprob
from jaxllm.types.sampling import SamplingParams
from tests.helpers.tiny_engine import PROCESSORS, TINY_LLAMA, TinyEngine

NUM_SETS = 200
TOLERANCE = 1e-4  # of log probabilities
VOCAB = TINY_LLAMA.vocab_size
# name -> a random value; each is left out three times in four.
RARE: dict[str, Any] = {
    "presence_penalty": lambda r: r.uniform(-2, 2),
    "frequency_penalty": lambda r: r.uniform(-2, 2),
    "repetition_penalty": lambda r: r.uniform(0.5, 2),
    "min_p": lambda r: r.uniform(0, 0.5),
    "top_k": lambda r: r.choice([1, 2, 5, 40, VOCAB, VOCAB + 7, -1]),
    "top_p": lambda r: r.uniform(0.05, 1),
    "logit_bias": lambda r: {r.randrange(VOCAB): r.uniform(-10, 10) for _ in range(r.randint(1, 9))},
    "allowed_token_ids": lambda r: r.sample(range(VOCAB), r.randint(1, 60)),
    "bad_words": lambda r: ["".join(r.choices("abcdefgh 1", k=r.randint(1, 4))) for _ in range(r.randint(1, 5))],
    "min_tokens": lambda r: r.randint(1, 6),
    "stop_token_ids": lambda r: r.sample(range(VOCAB), 8),
    "stop": lambda r: ["".join(r.choices("abcdefgh", k=r.randint(1, 2))) for _ in range(2)],
    "ignore_eos": lambda r: True,
    "logprobs": lambda r: r.randint(0, 8),
    "prompt_logprobs": lambda r: r.randint(0, 8),
    "logprob_token_ids": lambda r: r.sample(range(VOCAB), r.randint(1, 9)),
    "repetition_detection": lambda r: {"max_pattern_size": r.randint(1, 4), "min_count": r.randint(2, 4)},
    "truncate_prompt_tokens": lambda r: r.randint(1, 50),
    "n": lambda r: r.randint(2, 4),
    "extra_args": lambda r: {r.choice(["scale", "favour_low_ids"]): r.uniform(0.3, 3)},
    "skip_special_tokens": lambda r: False,
}


@dataclass(frozen=True)
class Workload:
    prompts: list[TokensPrompt]
    params: list[SamplingParams]

    def run(self, tiny: TinyEngine) -> list[RequestOutput]:
        return tiny.engine.generate(self.prompts, self.params)

    def run_alone(self, tiny: TinyEngine) -> list[RequestOutput]:
        """Each request by itself, with nothing in the prefix cache."""
        outputs: list[RequestOutput] = []
        for prompt, params in zip(self.prompts, self.params, strict=True):
            tiny.forget_prefixes()
            outputs += tiny.engine.generate([prompt], [params])
        return outputs


def random_params(rng: random.Random) -> SamplingParams:
    chosen = {name: draw(rng) for name, draw in RARE.items() if rng.random() < 0.25}
    if "logprob_token_ids" in chosen:
        chosen.pop("logprobs", None)
    temperature = rng.choice([0.0, 0.0, 0.005, 0.3, 0.8, 1.0, 1.7])
    return SamplingParams(temperature=temperature, seed=rng.getrandbits(62), max_tokens=rng.randint(6, 24), **chosen)


def workload(count: int, seed: int) -> Workload:
    """A third of the prompts begin with one of three shared prefixes."""
    rng = random.Random(seed)
    shared = [[rng.randrange(256) for _ in range(40)] for _ in range(3)]
    prompts = []
    for index in range(count):
        own = [rng.randrange(256) for _ in range(rng.randint(1, 60))]
        prompts.append(TokensPrompt([*shared[index % 9 // 3], *own] if index % 3 == 0 else own))
    return Workload(prompts, [random_params(rng) for _ in range(count)])


@pytest.fixture(scope="module")
def work() -> Workload:
    return workload(NUM_SETS, seed=3)


@pytest.fixture(scope="module")
def expected(tiny_engine: TinyEngine, work: Workload) -> list[RequestOutput]:
    outputs = work.run_alone(tiny_engine)
    tiny_engine.check_everything_is_back()
    return outputs


def entries(found: tuple[tuple[TokenLogprob, ...] | None, ...] | None) -> list[tuple[int, int | None, float]]:
    return [(e.token_id, e.rank, e.logprob) for position in found or () for e in position or ()]


def assert_close(found: Any, wanted: Any, what: str) -> None:
    """Equal tokens; equal log probabilities, but for rounding; ranks may differ only where values tie."""
    mine, theirs = entries(found), entries(wanted)
    assert (found is None) == (wanted is None) and len(mine) == len(theirs), what
    assert [e[2] for e in mine] == pytest.approx([e[2] for e in theirs], abs=TOLERANCE), what
    for (token, rank, value), (other_token, other_rank, _) in zip(mine, theirs, strict=True):
        close = sum(abs(value - e[2]) <= 2 * TOLERANCE for e in theirs)
        assert (token, rank) == (other_token, other_rank) or close > 1, what


def assert_same_completion(mine: CompletionOutput, theirs: CompletionOutput, what: str) -> None:
    assert mine.token_ids == theirs.token_ids, what
    assert (mine.text, mine.index) == (theirs.text, theirs.index), what
    assert (mine.finish_reason, mine.stop_reason) == (theirs.finish_reason, theirs.stop_reason), what
    assert_close(mine.logprobs, theirs.logprobs, what)


def assert_same(found: list[RequestOutput], wanted: list[RequestOutput], work: Workload) -> None:
    for index, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
        what = f"request {index}: {work.params[index]}"
        assert mine.prompt_token_ids == theirs.prompt_token_ids, what
        assert len(mine.outputs) == work.params[index].n, what
        for a, b in zip(mine.outputs, theirs.outputs, strict=True):
            assert_same_completion(a, b, what)
        assert_close(mine.prompt_logprobs, theirs.prompt_logprobs, what)


def test_the_sets_ask_for_everything_often_enough(work: Workload) -> None:
    neutral = SamplingParams()
    for name in RARE:
        num_asking = sum(getattr(p, name) != getattr(neutral, name) for p in work.params)
        assert num_asking >= NUM_SETS // 10, name


def test_answers_hold_what_was_asked_for(expected: list[RequestOutput], work: Workload) -> None:
    for output, params in zip(expected, work.params, strict=True):
        for completion in output.outputs:
            assert params.max_tokens is not None and 1 <= len(completion.token_ids) <= params.max_tokens
            if params.allowed_token_ids is not None and not params.min_tokens:
                assert set(completion.token_ids) <= set(params.allowed_token_ids)
        if params.n > 1 and params.temperature >= 0.8 and params.allowed_token_ids is None and params.top_k != 1:
            assert output.usage.completion_tokens == sum(len(c.token_ids) for c in output.outputs)


def test_batched_cold_then_warm_as_alone(
    tiny_engine: TinyEngine, expected: list[RequestOutput], work: Workload
) -> None:
    tiny_engine.forget_prefixes()
    assert_same(work.run(tiny_engine), expected, work)
    hits = tiny_engine.prefix_hits
    assert_same(work.run(tiny_engine), expected, work)
    assert tiny_engine.prefix_hits > hits
    tiny_engine.check_everything_is_back()


def test_chunked_and_preempted_as_alone(expected: list[RequestOutput], work: Workload) -> None:
    with TinyEngine(processors=PROCESSORS, num_pages=40, max_num_seqs=8, max_num_batched_tokens=20) as tight:
        assert_same(work.run(tight), expected, work)
        assert tight.num_preemptions >= 10
        assert_same(work.run(tight), expected, work)
        tight.check_everything_is_back()


def test_over_two_devices_as_alone(expected: list[RequestOutput], work: Workload) -> None:
    with TinyEngine(processors=PROCESSORS, num_devices=2, max_num_seqs=4, max_num_batched_tokens=32) as tight:
        assert_same(work.run(tight), expected, work)
        assert_same(work.run(tight), expected, work)
        assert all(core.scheduler.prefix_queries for core in tight.cores), "one device had nothing to do"
        tight.check_everything_is_back()
