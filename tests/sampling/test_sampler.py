"""Which token comes out: greedy rows, drawn rows, and that a row's draw is its own affair."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import stats

from jaxllm.sampling.state import NUM_COLUMNS
from jaxllm.types.sampling import SamplingParams
from tests.sampling import reference
from tests.sampling.drawing import draw, draw_many, rows_of, run
from tests.sampling.reference import Row, softmax

VOCAB = 64
LOGITS = np.random.default_rng(0).normal(size=VOCAB).astype(np.float32) * 2
GREEDY = SamplingParams(temperature=0.0)


def assert_drawn_from(ids: np.ndarray, probabilities: np.ndarray) -> None:
    """Nothing outside the support, and a chi-square test inside it; rare tokens are pooled."""
    counts = np.bincount(ids, minlength=len(probabilities))
    assert counts[probabilities == 0].sum() == 0
    expected = probabilities * len(ids)
    common = expected >= 10
    observed, expected = counts[common], expected[common]
    rest = len(ids) - expected.sum()
    if rest > 10:
        observed, expected = np.append(observed, len(ids) - observed.sum()), np.append(expected, rest)
    if len(expected) > 1:
        assert stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue > 1e-3


PROMPT, OUTPUT = (1, 2, 3, 3), (3, 5, 5, 5, 7)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=2.0),
        SamplingParams(top_k=5),
        SamplingParams(top_p=0.7),
        SamplingParams(min_p=0.05),
        SamplingParams(temperature=0.8, top_k=20, top_p=0.9),
        SamplingParams(temperature=1.3, top_k=25, top_p=0.95, min_p=0.02),
        SamplingParams(presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.2),
        SamplingParams(presence_penalty=-1.5, repetition_penalty=0.8, top_k=30, top_p=0.9, min_p=0.01),
        SamplingParams(logit_bias={3: 2.0, 40: 3.0, 5: -1.0}, allowed_token_ids=tuple(range(2, 50)), top_p=0.95),
    ],
    ids=["plain", "cool", "hot", "top_k", "top_p", "min_p", "two", "three", "penalties", "filtered", "masked"],
)
def test_20000_draws_follow_the_filtered_softmax(params: SamplingParams) -> None:
    row = Row(logits=LOGITS, params=params, tokens=PROMPT + OUTPUT, num_prompt_tokens=len(PROMPT), seed=123)
    expected = reference.filtered(reference.shaped(row), params)
    assert_drawn_from(draw_many(row, 20_000), softmax(expected))


def test_draws_of_one_seed_at_different_positions_are_independent() -> None:
    rows = rows_of([SamplingParams()] * 20_000, seeds=[123] * 20_000, positions=range(20_000))
    assert_drawn_from(draw(np.broadcast_to(LOGITS, (20_000, VOCAB)), rows), softmax(LOGITS))


def test_draws_of_different_seeds_at_one_position_are_independent() -> None:
    rows = rows_of([SamplingParams()] * 20_000, seeds=range(20_000), positions=[7] * 20_000)
    assert_drawn_from(draw(np.broadcast_to(LOGITS, (20_000, VOCAB)), rows), softmax(LOGITS))


def test_mixed_rows_of_one_batch_each_follow_their_own_distribution() -> None:
    """The whole batch path: 8 requests that ask for different things, drawn side by side."""
    asked = [
        SamplingParams(),
        SamplingParams(top_k=7),
        SamplingParams(presence_penalty=2.0),
        SamplingParams(min_p=0.2),
        SamplingParams(top_p=0.6, temperature=1.5),
        SamplingParams(repetition_penalty=1.8, top_k=12),
        SamplingParams(logit_bias={9: 4.0}),
        SamplingParams(temperature=0.0),
    ]
    tokens = {"tokens": PROMPT + OUTPUT, "num_prompt_tokens": len(PROMPT)}
    drawn = [run([Row(logits=LOGITS, params=p, seed=s, **tokens) for p in asked], greedy=False)[0] for s in range(300)]
    for ids, params in zip(np.array(drawn).T, asked, strict=True):
        expected = reference.filtered(reference.shaped(Row(logits=LOGITS, params=params, **tokens)), params)
        if params.is_greedy:
            assert set(ids.tolist()) == {expected.argmax()}
        else:
            assert_drawn_from(ids, softmax(expected))


def test_greedy_ties_go_to_the_lowest_id() -> None:
    logits = np.zeros((2, VOCAB), np.float32)
    logits[1, [9, 30, 31]] = 5.0
    for greedy in (True, False):
        assert draw(logits, rows_of([GREEDY, GREEDY]), greedy=greedy).tolist() == [0, 9]


def test_a_row_of_zeros_is_greedy() -> None:
    padding = np.zeros((2, NUM_COLUMNS), np.int32)
    assert draw(np.stack([LOGITS, -LOGITS]), padding).tolist() == [LOGITS.argmax(), LOGITS.argmin()]


@pytest.mark.parametrize("temperature", [1e-3, 1e-4, 1e-5, 1e-6])
def test_sam_03_tiny_temperatures_are_greedy_in_every_program(temperature: float) -> None:
    rng = np.random.default_rng(1)
    scales = np.array([1.0, 1e2, 1e4, 1e30, 1e38], np.float32)
    logits = rng.uniform(-1, 1, size=(5, VOCAB)).astype(np.float32) * scales[:, None]
    params = SamplingParams(temperature=temperature)
    for neighbour in (params, SamplingParams(temperature=1.5)):
        rows = rows_of([params] * 4 + [neighbour])
        ids = draw(logits, rows)
        np.testing.assert_array_equal(ids[:4], logits[:4].argmax(axis=1))
        assert (ids >= 0).all() and (ids < VOCAB).all()


def test_sam_04_off_means_off_for_each_row_alone() -> None:
    logits = np.random.default_rng(2).normal(size=VOCAB).astype(np.float32)
    mixed = rows_of([GREEDY, SamplingParams(top_k=50, top_p=0.9)])
    assert draw(np.stack([logits, logits]), mixed)[0] == logits.argmax()
    seeds = range(20)
    drawn = {
        k: draw(np.broadcast_to(logits, (20, VOCAB)), rows_of([SamplingParams(top_k=k)] * 20, seeds=seeds)).tolist()
        for k in (VOCAB + 1, VOCAB, 2**31, 0, -1, 1)
    }
    absent = draw(np.broadcast_to(logits, (20, VOCAB)), rows_of([SamplingParams()] * 20, seeds=seeds)).tolist()
    for k in (VOCAB + 1, VOCAB, 2**31, 0, -1):
        assert drawn[k] == absent
    assert set(absent) != {logits.argmax()}
    assert set(drawn[1]) == {logits.argmax()}


NEIGHBOURS = (
    SamplingParams(),
    GREEDY,
    SamplingParams(top_k=3),
    SamplingParams(top_p=0.3, temperature=1.7),
    SamplingParams(min_tokens=5, stop_token_ids=(1, 2)),
    SamplingParams(presence_penalty=2.0, frequency_penalty=-1.0, repetition_penalty=1.5, min_p=0.3),
    SamplingParams(logit_bias={1: 9.0}, allowed_token_ids=(1, 2, 3), bad_words=("x",)),
)


@pytest.mark.parametrize(
    "params",
    [SamplingParams(temperature=0.8), SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01)],
    ids=["plain", "filtered"],
)
def test_sam_05_a_draw_depends_on_seed_and_position_alone(params: SamplingParams) -> None:
    """Alone, in every row of batches of several sizes, beside every kind of neighbour: one id."""
    rng = np.random.default_rng(3)
    for position in (0, 1, 1000):
        alone = draw(LOGITS[None], rows_of([params], seeds=[42], positions=[position]), padded=False)[0]
        for size, shift in itertools.product((2, 8), (0, 1, 3, 4)):
            row = shift % size
            logits = rng.normal(size=(size, VOCAB)).astype(np.float32) * 3
            logits[row] = LOGITS
            batch = [NEIGHBOURS[(i + shift) % len(NEIGHBOURS)] for i in range(size)]
            batch[row] = params
            seeds = [int(s) for s in rng.integers(0, 2**63, size)]
            seeds[row] = 42
            positions = rng.integers(0, 2000, size)
            positions[row] = position
            packed = rows_of(batch, seeds=seeds, positions=positions.tolist())
            assert draw(logits, packed, padded=False)[row] == alone


def test_all_64_bits_of_the_seed_count_whatever_its_sign() -> None:
    logits = np.zeros((3, 4096), np.float32)

    def ids(seed: int) -> list[int]:
        packed = rows_of([SamplingParams()] * 3, seeds=[seed] * 3, positions=range(3))
        return draw(logits, packed).tolist()

    seeds = [0, 1, 2**31, 2**32, 2**40, 2**63 - 1, -(2**63), -1]
    assert len({tuple(ids(seed)) for seed in seeds}) == len(seeds)
    assert ids(-1) == ids(2**64 - 1)


def test_sam_07_min_tokens_holds_back_every_eos_and_stop_id() -> None:
    """Prompt of 10, min_tokens 4: positions 10 to 13 are held back, 14 is free."""
    params = SamplingParams(temperature=0.0, min_tokens=4, max_tokens=9, stop_token_ids=(8,))
    logits = LOGITS.copy()
    logits[[3, 5, 8]] = [90.0, 80.0, 70.0]
    positions = list(range(10, 16))
    for chosen, greedy in ((params, True), (params, False)):
        rows = rows_of([chosen] * 6, positions=positions, eos_ids=(3, 5), num_prompt_tokens=10)
        best_allowed = np.argsort(logits)[-4]
        assert draw(np.tile(logits, (6, 1)), rows, greedy=greedy).tolist() == [best_allowed] * 4 + [3, 3]


def test_min_tokens_holds_back_in_drawn_rows_too() -> None:
    params = SamplingParams(min_tokens=1, max_tokens=9)
    logits = LOGITS.copy()
    logits[3] = 50.0
    rows = rows_of([params] * 2, seeds=[1, 1], positions=[10, 11], eos_ids=(3,), num_prompt_tokens=10)
    ids = draw(np.stack([logits, logits]), rows)
    assert ids[0] != 3 and ids[1] == 3


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=2.0)], ids=["greedy", "drawn"])
def test_padding_of_the_vocabulary_is_never_chosen(params: SamplingParams) -> None:
    logits = np.zeros((300, VOCAB), np.float32)
    logits[:, 50:] = 100.0
    rows = rows_of([params] * 300)
    assert draw(logits, rows, vocab_size=50).max() < 50


def test_top_k_1_draws_the_best_for_every_seed() -> None:
    """With one token left its clock must still run: an infinite one would leave no winner."""
    rows = rows_of([SamplingParams(top_k=1, temperature=2.0)] * 500, seeds=range(500))
    assert set(draw(np.tile(LOGITS, (500, 1)), rows).tolist()) == {LOGITS.argmax()}
