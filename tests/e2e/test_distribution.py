"""Tokens drawn through the whole engine follow the model's own probabilities, filtered as asked."""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt
import pytest

from jaxllm.engine.inputs import TokensPrompt
from jaxllm.types.sampling import MAX_LOGPROB_TOKEN_IDS, SamplingParams
from tests.helpers.tiny_engine import TINY_LLAMA, TinyEngine

FEW_DRAWS, MANY_DRAWS = 2_000, 20_000
VOCAB = TINY_LLAMA.vocab_size
PROMPT = TokensPrompt([72, 101, 108, 108, 111])
Floats = npt.NDArray[np.float64]


@pytest.fixture(scope="module")
def probabilities(tiny_engine: TinyEngine) -> Floats:
    """What the model says of each token after the prompt, at temperature 1."""
    found = np.zeros(VOCAB)
    for first in range(0, VOCAB, MAX_LOGPROB_TOKEN_IDS):
        ids = tuple(range(first, min(first + MAX_LOGPROB_TOKEN_IDS, VOCAB)))
        params = SamplingParams(max_tokens=1, temperature=0, logprob_token_ids=ids)
        (output,) = tiny_engine.engine.generate([PROMPT], [params])
        assert output.outputs[0].logprobs is not None
        for entry in output.outputs[0].logprobs[0]:
            found[entry.token_id] = np.exp(entry.logprob)
    assert np.count_nonzero(found) == VOCAB and found.sum() == pytest.approx(1, abs=1e-5)
    return found / found.sum()


def draw(tiny_engine: TinyEngine, num_draws: int, **fields: float) -> npt.NDArray[np.int64]:
    """How often each token came, over requests that share steps with requests of every other kind."""
    asked = SamplingParams(max_tokens=1, temperature=1.0, **fields)  # type: ignore[arg-type]
    others = [
        SamplingParams(max_tokens=1, temperature=0.7, top_k=3, presence_penalty=1.0),
        SamplingParams(max_tokens=1, temperature=0.0, logit_bias={5: 3.0}),
    ]
    params = [others[i // 8 % 2] if i % 8 == 7 else asked for i in range(num_draws * 8 // 7)]
    outputs = tiny_engine.engine.generate([PROMPT] * len(params), params)
    tokens = [o.outputs[0].token_ids[0] for o, p in zip(outputs, params, strict=True) if p is asked]
    counts = Counter(tokens)
    return np.array([counts[token] for token in range(VOCAB)])


def check_fit(counts: npt.NDArray[np.int64], expected: Floats) -> None:
    """Pearson's chi-square over tokens expected at least five times, the rest in one bin."""
    assert not counts[expected == 0].any(), "a token outside the set was drawn"
    wanted = expected * counts.sum()
    often = wanted >= 5
    seen = np.append(counts[often], counts[~often].sum())
    mean = np.append(wanted[often], wanted[~often].sum())
    seen, mean = seen[mean > 0], mean[mean > 0]
    degrees = len(mean) - 1
    statistic = float(((seen - mean) ** 2 / mean).sum())
    # Wilson and Hilferty's approximation: under the right distribution z is nearly standard normal.
    z = ((statistic / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / np.sqrt(2 / (9 * degrees)) if degrees else 0.0
    assert z < 4, f"chi-square {statistic:.1f} with {degrees} degrees of freedom"


def filtered(probabilities: Floats, kept: npt.NDArray[np.bool_]) -> Floats:
    chosen = np.where(kept, probabilities, 0)
    return chosen / chosen.sum()


def check_draws(tiny_engine: TinyEngine, probabilities: Floats, num_draws: int) -> None:
    """Plain draws, then each filter: exactly its set, in the right proportions."""
    check_fit(draw(tiny_engine, num_draws), probabilities)
    order = np.argsort(-probabilities, kind="stable")
    rank = np.argsort(order, kind="stable")
    before = np.cumsum(probabilities[order])[rank] - probabilities  # mass of the more likely ones
    sets = {
        "top_k": (20, rank < 20),
        "top_p": (0.3, before < 0.3),
        "min_p": (0.1, probabilities >= 0.1 * probabilities.max()),
    }
    for name, (value, kept) in sets.items():
        assert 2 < kept.sum() < VOCAB - 2, name
        counts = draw(tiny_engine, num_draws, **{name: value})
        assert set(np.flatnonzero(counts)) == set(np.flatnonzero(kept)), name
        check_fit(counts, filtered(probabilities, kept))


def test_draws_follow_the_model_and_keep_exactly_their_set(tiny_engine: TinyEngine, probabilities: Floats) -> None:
    check_draws(tiny_engine, probabilities, FEW_DRAWS)


@pytest.mark.slow
def test_many_draws_follow_the_model_and_keep_exactly_their_set(tiny_engine: TinyEngine, probabilities: Floats) -> None:
    check_draws(tiny_engine, probabilities, MANY_DRAWS)
