"""What a request asks of its logits, through the whole sampler, against NumPy."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from jaxllm.errors import ConfigError
from jaxllm.types.processors import MAX_PROCESSORS, LogitsProcessor
from jaxllm.types.sampling import MAX_BAD_SEQUENCES, MAX_FORBIDDEN, MAX_LOGIT_BIAS, SamplingParams
from tests.sampling import drawing, reference
from tests.sampling.drawing import MAX_MODEL_LEN, run
from tests.sampling.reference import Row

VOCAB = 151  # no whole number of words, nor of vector lanes
PLAIN = SamplingParams(temperature=0.0)
SHIFT = LogitsProcessor("shift", lambda logits, by: logits + by[:, None])
SCALE = LogitsProcessor("scale", lambda logits, by: logits * by[:, None])
PROCESSORS = (SHIFT, SCALE)
REFERENCES: reference.Processors = {"shift": lambda logits, by: logits + by, "scale": lambda logits, by: logits * by}


def sampled(rows: Sequence[Row], **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Every test with the same processors: few programs are compiled."""
    return drawing.sampled(rows, **{"processors": PROCESSORS, **options})


def processed_logits(rows: Sequence[Row], **options: Any) -> np.ndarray:
    return sampled(rows, **options)[1]


def greedy(**fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, **fields)


def random_row(params: SamplingParams, seed: int = 0, *, num_tokens: int = 60, **fields: Any) -> Row:
    """Few different tokens, so that many repeat."""
    rng = np.random.default_rng(seed)
    return Row(
        logits=rng.normal(size=VOCAB).astype(np.float32) * 4,
        params=params,
        tokens=tuple(rng.integers(0, 40, num_tokens).tolist()),
        num_prompt_tokens=num_tokens // 2,
        seed=seed,
        **fields,
    )


ONE_OF_EACH = {
    "presence": greedy(presence_penalty=1.25),
    "negative presence": greedy(presence_penalty=-2.0),
    "frequency": greedy(frequency_penalty=0.75),
    "repetition": greedy(repetition_penalty=1.7),
    "low repetition": greedy(repetition_penalty=0.3),
    "all penalties": greedy(presence_penalty=-0.5, frequency_penalty=0.4, repetition_penalty=1.3),
    "bias": greedy(logit_bias={0: 5.0, 7: -100.0, VOCAB - 1: 100.0}),
    "full bias": greedy(logit_bias={i: i / 50 for i in range(VOCAB)}),
    "allowed": greedy(allowed_token_ids=(0, 31, 32, 63, 64, VOCAB - 1)),
    "bad words": greedy(bad_words=("x",)),
    "min tokens": greedy(min_tokens=31, max_tokens=99, stop_token_ids=(3,)),
    "min tokens that are out": greedy(min_tokens=30, max_tokens=99, stop_token_ids=(3,)),
    "processor": greedy(extra_args={"shift": 2.5}),
    "processors": greedy(extra_args={"scale": -0.5, "shift": 1.0}),
}


@pytest.mark.parametrize("all_greedy", [True, False])
def test_each_transform_alone_changes_its_row_as_numpy_does_and_no_other(all_greedy: bool) -> None:
    """Each in a batch of rows that ask for nothing: those come back bit for bit."""
    for seed, (name, params) in enumerate(ONE_OF_EACH.items()):
        asking = random_row(params, seed, eos_ids=(5, 9), bad_word_ids=((4,), (17, 2)) if params.bad_words else ())
        others = [random_row(PLAIN, 100 + seed + i) for i in range(3)]
        rows = [*others[:2], asking, others[2]]
        result = processed_logits(rows, slots=[6, 0, 3, 5], greedy=all_greedy)
        expected = reference.shaped(asking, REFERENCES)
        np.testing.assert_allclose(result[2], expected, rtol=1e-5, atol=1e-5, err_msg=name)
        assert name == "min tokens that are out" or not np.array_equal(result[2], asking.logits), name
        for i in (0, 1, 3):
            np.testing.assert_array_equal(result[i].view(np.int32), rows[i].logits.view(np.int32), err_msg=name)


def random_params(rng: np.random.Generator) -> SamplingParams:
    """Any combination; each field is off half of the time."""

    def maybe(value: Any, off: Any = None) -> Any:
        return value if rng.random() < 0.5 else off

    def ids(low: int, high: int) -> tuple[int, ...]:
        return tuple(rng.choice(VOCAB, int(rng.integers(low, high)), replace=False).tolist())

    names = [name for name in REFERENCES if rng.random() < 0.5]
    return SamplingParams(
        temperature=maybe(float(rng.uniform(0.1, 2.0)), 0.0),
        presence_penalty=maybe(float(rng.uniform(-2, 2)), 0.0),
        frequency_penalty=maybe(float(rng.uniform(-2, 2)), 0.0),
        repetition_penalty=maybe(float(rng.uniform(0.5, 2)), 1.0),
        logit_bias=maybe({i: float(rng.uniform(-8, 8)) for i in ids(1, 30)}),
        allowed_token_ids=maybe(ids(10, 120)),
        bad_words=maybe(("x",), ()),
        min_tokens=maybe(int(rng.integers(1, 40)), 0),
        max_tokens=99,
        stop_token_ids=ids(0, 5),
        min_p=maybe(float(rng.uniform(0.001, 0.3)), 0.0),
        top_k=maybe(int(rng.integers(1, VOCAB)), 0),
        top_p=maybe(float(rng.uniform(0.2, 0.99)), 1.0),
        extra_args={name: float(rng.uniform(0.5, 2)) for name in names},
    )


def random_rows(count: int, seed: int) -> list[Row]:
    rng = np.random.default_rng(seed)
    rows: list[Row] = []
    for index in range(count):
        row = random_row(random_params(rng), seed * 1000 + index, num_tokens=int(rng.integers(0, MAX_MODEL_LEN)))
        # Sequences that match, that match in the prompt only, and that do not match.
        recent = row.output[-1:]
        bad = ((*recent, 2), (*row.tokens[:1], 3), (200, 4), (5,)) if row.params.bad_words else ()
        rows.append(dataclasses.replace(row, eos_ids=(11, 12), bad_word_ids=bad))
    return rows


def test_all_together_in_random_combinations() -> None:
    """200 rows in batches of 8: shaped and filtered logits, the kept sets exactly."""
    for seed in range(25):
        rows = random_rows(8, seed)
        result = processed_logits(rows, greedy=False)
        for got, row in zip(result, rows, strict=True):
            expected = reference.filtered(reference.shaped(row, REFERENCES), row.params)
            np.testing.assert_array_equal(np.isfinite(got), np.isfinite(expected), err_msg=str(row.params))
            finite = np.isfinite(expected)
            np.testing.assert_allclose(got[finite], expected[finite], rtol=2e-5, atol=2e-5, err_msg=str(row.params))


def test_a_row_is_the_same_alone_and_in_any_batch_order_and_padding() -> None:
    """Tokens, logits and kept sets, bit for bit."""
    rows = random_rows(8, 77)
    alone = [sampled([row], slots=[slot], size=1, greedy=False) for slot, row in enumerate(rows)]
    for seed, size in ((0, 8), (1, 8), (2, 11)):
        order = np.random.default_rng(seed).permutation(8)
        slots = np.random.default_rng(seed + 10).permutation(8).tolist()
        ids, logits = sampled([rows[i] for i in order], slots=slots, size=size, greedy=False)
        assert ids.tolist() == [alone[i][0][0] for i in order]
        expected = np.concatenate([alone[i][1] for i in order])
        np.testing.assert_array_equal(logits.view(np.int32), expected.view(np.int32), err_msg=str(order))


@pytest.mark.parametrize("all_greedy", [True, False])
def test_sam_08_penalties_count_the_right_tokens(all_greedy: bool) -> None:
    """Prompt of three equal tokens: repetition counts it at once, presence and frequency only in the output."""
    logits = np.random.default_rng(3).normal(size=VOCAB).astype(np.float32)
    red, blue = 20, 21
    first = {"tokens": (red, red, red), "num_prompt_tokens": 3}
    later = {"tokens": (red, red, red, blue, blue), "num_prompt_tokens": 3}
    repetition, presence = greedy(repetition_penalty=2.0), greedy(presence_penalty=2.0)
    frequency = greedy(frequency_penalty=1.5)
    rows = [Row(logits=logits, params=p, **t) for p in (repetition, presence, frequency) for t in (first, later)]
    for order in (list(range(7)), list(range(6, -1, -1))):
        batch = [[*rows, Row(logits=logits, params=PLAIN, **first)][i] for i in order]
        result = np.empty((7, VOCAB), np.float32)
        result[order] = processed_logits(batch, greedy=all_greedy)
        halved = np.where(logits > 0, logits / 2, logits * 2)
        expected = np.tile(logits, (7, 1))
        expected[0, red] = halved[red]
        expected[1, [red, blue]] = halved[[red, blue]]
        expected[3, blue] -= 2.0  # presence: row 2 has no output yet
        expected[5, blue] -= 3.0  # frequency: twice
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(result[[2, 4, 6]], np.tile(logits, (3, 1)))


@pytest.mark.parametrize("num_tokens", [0, 1, 127, 128, 129, MAX_MODEL_LEN - 1, MAX_MODEL_LEN])
def test_penalties_see_every_token_of_any_length(num_tokens: int) -> None:
    params = greedy(repetition_penalty=1.5, frequency_penalty=0.01)
    row = random_row(params, num_tokens=num_tokens)
    result = processed_logits([row], greedy=True)[0]
    np.testing.assert_allclose(result, reference.shaped(row), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("penalty", [1e-9, 1e38, 1e300])
def test_extreme_repetition_penalties_give_no_nan(penalty: float) -> None:
    logits = np.array([0.0, -0.0, 5.0, -5.0, -np.inf, 1e-30], np.float32)
    row = Row(logits=logits, params=greedy(repetition_penalty=penalty), tokens=(0, 1, 2, 3, 4, 5))
    assert not np.isnan(processed_logits([row], greedy=True)).any()


def test_bad_words_match_the_output_alone() -> None:
    """A sequence that began in the prompt is no match; one token suffices for two, and the mask for one."""
    logits = np.zeros(VOCAB, np.float32)
    bad = ((1, 2), (8, 1, 3), (9, 8, 1, 4), (7, 5), (6,))
    params = greedy(bad_words=("x",))
    forbidden = {
        (9, 8, 1): {6},  # all prompt
        (9, 8, 1, 1): {6, 2},
        (9, 8, 1, 8, 1): {6, 2, 3},
        (9, 8, 1, 9, 8, 1): {6, 2, 3, 4},
        (9, 8, 1, 7): {6, 5},
    }
    rows = [
        Row(logits=logits, params=params, tokens=tokens, num_prompt_tokens=3, bad_word_ids=bad) for tokens in forbidden
    ]
    result = processed_logits(rows, greedy=True)
    assert [set(np.flatnonzero(~np.isfinite(row))) for row in result] == list(forbidden.values())


def test_full_tables_of_bad_words_and_biases_all_count() -> None:
    vocab_size = 2000
    logits = np.random.default_rng(5).normal(size=vocab_size).astype(np.float32)
    bad = tuple((*range(15), 900 + i) for i in range(MAX_BAD_SEQUENCES))
    bias = {2 * i % vocab_size + i // 1000: 3.0 for i in range(MAX_LOGIT_BIAS)}
    params = greedy(bad_words=("x",), logit_bias=bias)
    row = Row(logits=logits, params=params, tokens=tuple(range(15)), bad_word_ids=bad)
    result = processed_logits([row], greedy=True)[0]
    assert len(bias) == MAX_LOGIT_BIAS
    np.testing.assert_allclose(result, reference.shaped(row), rtol=1e-5, atol=1e-5)
    assert np.flatnonzero(~np.isfinite(result)).tolist() == list(range(900, 900 + MAX_BAD_SEQUENCES))


def test_sam_07_min_tokens_holds_back_all_32_ids_until_enough_are_out() -> None:
    """Prompt of 10, min_tokens 4: positions 10 to 13 are held back, 14 is free."""
    stops = tuple(range(100, 100 + MAX_FORBIDDEN - 3))
    params = greedy(min_tokens=4, max_tokens=9, stop_token_ids=stops)
    logits = np.zeros(VOCAB, np.float32)
    rows = [
        Row(logits=logits, params=params, tokens=(1,) * n, num_prompt_tokens=10, eos_ids=(3, 5, 8))
        for n in range(10, 16)
    ]
    result = processed_logits(rows, greedy=True)
    held_back = [set(np.flatnonzero(~np.isfinite(row))) for row in result]
    assert held_back == [{3, 5, 8, *stops}] * 4 + [set(), set()]


@pytest.mark.parametrize("params", [PLAIN, SamplingParams(), SamplingParams(top_k=5, top_p=0.9, min_p=0.1)])
def test_a_row_with_one_token_left_gives_it_and_no_nan(params: SamplingParams) -> None:
    allowed = dataclasses.replace(params, allowed_token_ids=(77,), logit_bias={77: -100.0, 3: 100.0})
    rows = [random_row(allowed, 1), random_row(params, 2), random_row(allowed, 3)]
    for all_greedy in (False, params.is_greedy):
        ids, result = sampled(rows, greedy=all_greedy)
        assert not np.isnan(result).any()
        assert [np.flatnonzero(np.isfinite(result[i])).tolist() for i in (0, 2)] == [[77], [77]]
        assert ids[0] == ids[2] == 77


@pytest.mark.parametrize("params", [PLAIN, SamplingParams(min_p=0.1, top_k=4, top_p=0.5)])
def test_a_row_with_no_token_left_gives_a_token_and_no_nan(params: SamplingParams) -> None:
    nothing = dataclasses.replace(params, allowed_token_ids=(7,), min_tokens=9, stop_token_ids=(7,))
    rows = [Row(logits=np.zeros(VOCAB, np.float32), params=nothing), random_row(params, 2)]
    ids, logits = sampled(rows, greedy=False)
    assert ids[0] == 0
    assert not np.isnan(logits).any()


def test_bias_leaves_what_is_forbidden_forbidden() -> None:
    logits = np.zeros(VOCAB, np.float32)
    logits[9] = -np.inf
    params = greedy(logit_bias={8: 100.0, 9: 100.0}, allowed_token_ids=(4, 9))
    result = processed_logits([Row(logits=logits, params=params)], greedy=True)[0]
    assert np.flatnonzero(np.isfinite(result)).tolist() == [4]


def test_processors_run_in_their_order_and_leave_forbidden_tokens_forbidden() -> None:
    logits = np.random.default_rng(0).normal(size=VOCAB).astype(np.float32)
    params = greedy(extra_args={"shift": 1.0, "scale": 0.0}, allowed_token_ids=(4, 9))
    row = Row(logits=logits, params=params)
    result = processed_logits([row], greedy=True)[0]
    assert np.flatnonzero(np.isfinite(result)).tolist() == [4, 9]
    twice = dataclasses.replace(row, params=greedy(extra_args={"shift": 1.0, "scale": 2.0}))
    for processors, expected in ((PROCESSORS, (logits + 1) * 2), (PROCESSORS[::-1], logits * 2 + 1)):
        result = processed_logits([twice], greedy=True, processors=processors)[0]
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)


def test_as_many_processors_as_a_row_has_room_for() -> None:
    names = [f"p{i}" for i in range(MAX_PROCESSORS)]
    processors = tuple(LogitsProcessor(name, SHIFT.apply) for name in names)
    params = greedy(extra_args={name: float(10**i) for i, name in enumerate(names[:4])})
    last = greedy(extra_args={names[-1]: 7.0})
    rows = [Row(logits=np.zeros(VOCAB, np.float32), params=p) for p in (params, PLAIN, last)]
    result = processed_logits(rows, greedy=True, processors=processors)
    assert [np.unique(row).tolist() for row in result] == [[1111.0], [0.0], [7.0]]


def test_a_processor_that_gives_no_logits_is_named() -> None:
    wrong = LogitsProcessor("narrow", lambda logits, by: logits[:, :3])
    row = Row(logits=np.zeros(VOCAB, np.float32), params=greedy())
    accepted = rf"'narrow' gave float32\[8, 3\]; accepted: float32\[8, {VOCAB}\]"
    with pytest.raises(ConfigError, match=accepted):
        run([row], greedy=True, processors=(wrong,))
    with pytest.raises(ConfigError, match=r"'nothing' gave NoneType; accepted"):
        run([row], greedy=True, processors=(LogitsProcessor("nothing", lambda logits, by: None),))


def test_padding_of_the_vocabulary_stays_out_whatever_is_asked() -> None:
    logits = np.full(VOCAB + 9, 50.0, np.float32)
    params = greedy(allowed_token_ids=(VOCAB - 1,), repetition_penalty=0.5, extra_args={"shift": 3.0})
    rows = [Row(logits=logits, params=p, tokens=(1,)) for p in (params, PLAIN)]
    result = processed_logits(rows, greedy=True, vocab_size=VOCAB)
    assert np.flatnonzero(np.isfinite(result[0])).tolist() == [VOCAB - 1]
    assert np.isfinite(result[1]).all()
