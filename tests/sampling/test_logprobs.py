"""Log probabilities against NumPy in float64."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from jaxllm.sampling.logprobs import DeviceLogprobs, LogprobsSpec, logprobs_of
from jaxllm.types.sampling import SamplingParams
from tests.sampling import reference
from tests.sampling.drawing import run
from tests.sampling.reference import Row

VOCAB = 333
logprobs_jit = jax.jit(logprobs_of, static_argnums=2, static_argnames="vocab_size")
MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")


def random_logits(num_rows: int, seed: int = 0) -> np.ndarray:
    """A quarter of the logits are equal to others."""
    logits = np.random.default_rng(seed).normal(size=(num_rows, VOCAB)).astype(np.float32) * 5
    logits[:, ::4] = np.round(logits[:, ::4])
    return logits


def compute(
    logits: np.ndarray, tokens: Any, spec: LogprobsSpec, chosen: np.ndarray | None = None, **options: Any
) -> DeviceLogprobs:
    chosen = np.full((len(logits), 4), -1, np.int32) if chosen is None else chosen
    return jax.tree.map(np.asarray, logprobs_jit(logits, np.asarray(tokens, np.int32), spec, chosen, **options))


@pytest.mark.parametrize("num_top", [0, 1, 20, VOCAB])
def test_values_ranks_and_tops_equal_a_sorted_log_softmax(num_top: int) -> None:
    logits = random_logits(6)
    tokens = np.array([logits[0].argmax(), logits[1].argmin(), 0, 4, 100, VOCAB - 1])
    result = compute(logits, tokens, LogprobsSpec(num_top))
    for i, token in enumerate(tokens):
        expected = reference.log_softmax(logits[i])
        np.testing.assert_allclose(result.values[i], expected[token], atol=1e-5, rtol=1e-5)
        assert result.ranks[i] == 1 + (logits[i] > logits[i, token]).sum()
        order = reference.descending(logits[i])[:num_top]
        assert result.top_ids[i].tolist() == order.tolist()
        np.testing.assert_allclose(result.top_values[i], expected[order], atol=1e-5, rtol=1e-5)


def test_equal_tokens_share_a_rank_and_stand_in_order_of_ids() -> None:
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, [200, 50, 7]] = 3.0
    result = compute(logits, [200], LogprobsSpec(5))
    assert result.ranks.tolist() == [1]
    assert result.top_ids.tolist() == [[7, 50, 200, 0, 1]]
    assert compute(logits, [332], LogprobsSpec(5)).ranks.tolist() == [4]


def test_chosen_ids_come_in_their_order_and_missing_ones_are_minus_infinity() -> None:
    logits = random_logits(2)
    chosen = np.array([[9, 3, VOCAB - 1, -1], [-1, -1, -1, -1]], np.int32)
    result = compute(logits, [0, 0], LogprobsSpec(1), chosen)
    expected = reference.log_softmax(logits[0])[[9, 3, VOCAB - 1]]
    np.testing.assert_allclose(result.chosen_values[0, :3], expected, atol=1e-5, rtol=1e-5)
    assert (result.chosen_values[0, 3], *result.chosen_values[1]) == (-np.inf,) * 5


def test_padding_of_the_vocabulary_has_no_share() -> None:
    logits = np.pad(random_logits(2), ((0, 0), (0, 51)), constant_values=80.0)
    padded = compute(logits, [5, 6], LogprobsSpec(VOCAB), vocab_size=VOCAB)
    exact = compute(logits[:, :VOCAB], [5, 6], LogprobsSpec(VOCAB))
    jax.tree.map(np.testing.assert_array_equal, padded, exact)


@pytest.mark.parametrize("scale", [1.0, 1e4, 1e30])
def test_forbidden_tokens_are_minus_infinity_and_nothing_is_nan(scale: float) -> None:
    logits = random_logits(3) * np.float32(scale)
    logits[0, 1:] = -np.inf  # one token left
    logits[1, :] = -np.inf  # none
    for mode in MODES:
        result = compute(logits, [0, 3, 3], LogprobsSpec(4, mode))
        assert not any(np.isnan(x).any() for x in jax.tree.leaves(result))
        assert result.top_values[0].tolist()[1:] == [-np.inf] * 3
        if mode.endswith("logprobs"):
            assert result.values[:2].tolist() == [0.0, -np.inf]


def rows_of_all_kinds() -> list[Row]:
    tokens = {"tokens": (1, 2, 3, 4, 4), "num_prompt_tokens": 2}
    asked = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.0, repetition_penalty=1.5, logit_bias={8: 3.0}),
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.6, top_k=30, top_p=0.9, min_p=0.001, presence_penalty=1.0),
        SamplingParams(allowed_token_ids=(5, 80, 81), logprob_token_ids=(80, 7)),
    ]
    logits = random_logits(len(asked), seed=4)
    return [Row(logits=x, params=p, seed=i, **tokens) for i, (x, p) in enumerate(zip(logits, asked, strict=True))]


@pytest.mark.parametrize("mode", MODES)
def test_modes_show_the_logits_before_everything_or_after(mode: Any) -> None:
    """Processed: what is drawn from; of greedy rows, before temperature."""
    rows = rows_of_all_kinds()
    ids, result = run(rows, greedy=False, logprobs=LogprobsSpec(VOCAB, mode))
    assert result is not None
    for i, row in enumerate(rows):
        is_raw = mode.startswith("raw")
        expected = row.logits if is_raw else reference.filtered(reference.shaped(row), row.params)
        expected = expected if mode.endswith("logits") else reference.log_softmax(expected)
        order = result.top_ids[i]
        assert sorted(order.tolist()) == list(range(VOCAB))
        np.testing.assert_allclose(result.top_values[i], expected[order], atol=2e-5, rtol=1e-5)
        np.testing.assert_allclose(result.values[i], expected[ids[i]], atol=2e-5, rtol=1e-5)
    asked = result.chosen_values[4, :3]
    shown = {int(t): v for t, v in zip(result.top_ids[4], result.top_values[4], strict=True)}
    assert asked.tolist() == [shown[80], shown[7], -np.inf]


def test_processed_greedy_rows_are_equal_in_both_programs() -> None:
    rows = rows_of_all_kinds()[:2]
    spec = LogprobsSpec(VOCAB, "processed_logprobs")
    (ids, one), (others, two) = (run(rows, greedy=greedy, logprobs=spec) for greedy in (True, False))
    assert ids.tolist() == others.tolist()
    jax.tree.map(np.testing.assert_array_equal, one, two)


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_log_probabilities_of_a_row_are_the_same_alone_and_in_a_batch(mode: Any) -> None:
    rows = rows_of_all_kinds()
    spec = LogprobsSpec(VOCAB, mode)
    alone = [run([row], size=1, greedy=False, logprobs=spec) for row in rows]
    order = [3, 1, 4, 0, 2]
    ids, together = run([rows[i] for i in order], greedy=False, logprobs=spec)
    for place, index in enumerate(order):
        expected_ids, expected = alone[index]
        assert ids[place] == expected_ids[0]
        for got, want in zip(jax.tree.leaves(together), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(got[place], want[0])
