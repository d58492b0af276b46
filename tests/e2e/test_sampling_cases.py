"""Field failures of sampling, replayed on a whole engine with a tiny model."""

from __future__ import annotations

import random
from typing import Any

import pytest

from jaxllm.engine.inputs import TokensPrompt
from jaxllm.types.outputs import RequestOutput
from jaxllm.types.sampling import SamplingParams
from tests.helpers.tiny_engine import EOS_IDS, TINY_LLAMA, TinyEngine

VOCAB = TINY_LLAMA.vocab_size
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


def prompt(length: int, seed: int = 0) -> TokensPrompt:
    rng = random.Random(seed)
    return TokensPrompt([rng.randrange(256) for _ in range(length)])


def answer(tiny: TinyEngine, given: TokensPrompt, **params: Any) -> tuple[int, ...]:
    (output,) = tiny.engine.generate([given], [SamplingParams(**params)])
    return output.outputs[0].token_ids


def prompt_values(output: RequestOutput) -> list[list[float]]:
    assert output.prompt_logprobs is not None
    return [[entry.logprob for entry in position or ()] for position in output.prompt_logprobs]


@pytest.mark.parametrize("temperature", [1e-3, 1e-4, 1e-5, 1e-6])
def test_sam_03_tiny_temperatures_are_greedy(tiny_engine: TinyEngine, temperature: float) -> None:
    params = {"max_tokens": 7, "ignore_eos": True}
    expected = answer(tiny_engine, prompt(9), temperature=0.0, **params)
    assert answer(tiny_engine, prompt(9), temperature=temperature, **params) == expected
    assert max(expected) < VOCAB


def test_sam_04_every_spelling_of_no_top_k_is_the_same_and_one_is_greedy(tiny_engine: TinyEngine) -> None:
    given, seeds = prompt(6), range(20)
    greedy = answer(tiny_engine, given, max_tokens=3, **GREEDY)

    def draws(**top_k: int) -> list[tuple[int, ...]]:
        each = [SamplingParams(temperature=1.0, seed=s, max_tokens=3, ignore_eos=True, **top_k) for s in seeds]
        return [o.outputs[0].token_ids for o in tiny_engine.engine.generate([given] * len(each), each)]

    absent = draws()
    assert any(drawn != greedy for drawn in absent)
    for off in (VOCAB + 1, VOCAB, 0, -1):
        assert draws(top_k=off) == absent
    assert draws(top_k=1) == [greedy] * len(seeds)


def test_sam_05_a_seeded_request_is_the_same_beside_anybody(tiny_engine: TinyEngine) -> None:
    seeded = SamplingParams(temperature=0.8, seed=42, max_tokens=8, ignore_eos=True)
    unseeded = SamplingParams(temperature=0.8, max_tokens=8, ignore_eos=True)
    alone = answer(tiny_engine, prompt(5), temperature=0.8, seed=42, max_tokens=8, ignore_eos=True)
    for place in (0, 1, 5, 11):
        prompts, params = [prompt(7, seed=s) for s in range(12)], [unseeded] * 12
        prompts[place], params[place] = prompt(5), seeded
        for count in (place + 1, 12):
            outputs = tiny_engine.engine.generate(prompts[:count], params[:count])
            assert outputs[place].outputs[0].token_ids == alone


def test_sam_07_no_end_before_min_tokens_and_none_at_all_if_ignored(tiny_engine: TinyEngine) -> None:
    favoured = dict.fromkeys(EOS_IDS, 100.0)
    given = prompt(5)
    assert answer(tiny_engine, given, max_tokens=20, temperature=0, logit_bias=favoured)[0] in EOS_IDS
    held = answer(tiny_engine, given, max_tokens=20, min_tokens=10, temperature=0, logit_bias=favoured)
    assert not EOS_IDS & set(held[:10]) and len(held) == 11 and held[10] in EOS_IDS
    assert len(answer(tiny_engine, given, max_tokens=20, logit_bias=favoured, **GREEDY)) == 20


@pytest.mark.parametrize("penalty", [{"repetition_penalty": 2.0}, {"presence_penalty": 2.0}])
def test_sam_08_penalties_are_the_same_cold_cached_and_in_either_order(
    tiny_engine: TinyEngine, penalty: dict[str, float]
) -> None:
    red = TokensPrompt([*b"red red red red red red red"])
    penalised, plain = SamplingParams(max_tokens=10, **GREEDY, **penalty), SamplingParams(max_tokens=10, **GREEDY)  # type: ignore[arg-type]
    tiny_engine.forget_prefixes()
    (cold,) = tiny_engine.engine.generate([red], [penalised])
    assert cold.num_cached_tokens == 0
    (cached,) = tiny_engine.engine.generate([red], [penalised])
    assert cached.num_cached_tokens > 0
    first = tiny_engine.engine.generate([red, prompt(9)], [penalised, plain])
    second = tiny_engine.engine.generate([prompt(9), red], [plain, penalised])
    assert cold.outputs[0].token_ids == cached.outputs[0].token_ids
    assert first[0].outputs[0].token_ids == second[1].outputs[0].token_ids == cold.outputs[0].token_ids
    assert first[1].outputs[0].token_ids == second[0].outputs[0].token_ids


def test_sam_10_prompt_logprobs_twice_and_of_overlapping_prompts(tiny_engine: TinyEngine) -> None:
    long, short = prompt(33), TokensPrompt(prompt(33).token_ids[:20])
    params = SamplingParams(max_tokens=1, prompt_logprobs=1, **GREEDY)
    tiny_engine.forget_prefixes()
    (cold,) = tiny_engine.engine.generate([long], [params])
    assert cold.prompt_logprobs is not None and len(cold.prompt_logprobs) == 33 and cold.prompt_logprobs[0] is None
    assert all(position is not None for position in cold.prompt_logprobs[1:])
    for order in ([long, short], [short, long], [long, long]):
        for output in tiny_engine.engine.generate(order, [params] * 2):
            length = len(output.prompt_token_ids)
            found, wanted = prompt_values(output), prompt_values(cold)[:length]
            assert len(found) == len(wanted)
            for mine, theirs in zip(found, wanted, strict=True):
                assert mine == pytest.approx(theirs, abs=1e-4)
            assert output.num_cached_tokens == 0


def test_a_bad_word_never_leaves_a_row_without_tokens(tiny_engine: TinyEngine) -> None:
    """Where only "a" is allowed, a ban of "aa" yields: the alternative is a token nobody allowed."""
    params = {"max_tokens": 6, "allowed_token_ids": [97, 98], "logit_bias": {98: 50.0}, **GREEDY}
    assert answer(tiny_engine, prompt(4), **params) == (98,) * 6
    only_a = {**params, "allowed_token_ids": [97]}
    assert answer(tiny_engine, prompt(4), bad_words=["aa"], **only_a) == (97,) * 6
