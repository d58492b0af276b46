"""Parameters that mean nothing for a model are refused by name; an engine goes on as if they had not come."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from jaxllm.engine.engine import Engine
from jaxllm.errors import RequestError
from jaxllm.types.sampling import MAX_LOGPROB_TOKEN_IDS, SamplingParams
from tests.engine.caller import check_idle
from tests.helpers.scripted_engine import EOS, make_parts, script, scripted

VOCAB = 260


def refusal(params: dict[str, Any], **overrides: Any) -> RequestError:
    """The error of a request that is refused; the engine must answer the next one."""
    with Engine(make_parts(scripted(), **overrides)) as engine:
        with pytest.raises(RequestError) as caught:
            engine.generate(["abc"], [SamplingParams(**params)])
        assert engine.generate(["abc"], [SamplingParams()])[0].outputs[0].text == "Hello"
        check_idle(engine)
    return caught.value


@pytest.mark.parametrize(
    "params",
    [
        {"logit_bias": {1: 2.0, VOCAB + 5: 1.0}},
        {"allowed_token_ids": (1, VOCAB + 5, 2)},
        {"logprob_token_ids": (VOCAB + 5,)},
        {"stop_token_ids": (VOCAB + 5, 1)},
    ],
    ids=lambda params: next(iter(params)),
)
def test_sam_01_a_token_outside_the_vocabulary_is_named(params: dict[str, Any]) -> None:
    error = refusal(params)
    assert error.param == next(iter(params))
    assert f"{VOCAB + 5}, which is not in the vocabulary; accepted: integers from 0 to {VOCAB - 1}" in str(error)


@pytest.mark.parametrize("key", [-1, "-1", "abc", "5", 1.5, True, None])
def test_sam_01_a_key_that_is_no_token_is_named(key: Any) -> None:
    with pytest.raises(RequestError, match="logit_bias") as caught:
        SamplingParams(logit_bias={key: 1.0})
    assert repr(key) in str(caught.value)
    assert caught.value.param == "logit_bias"


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("value", [-1, 21, 2 * 10**9])
def test_sec_02_more_log_probabilities_than_the_engine_gives_are_refused(name: str, value: int) -> None:
    error = refusal({name: value})
    assert error.param == name
    assert f"{name}={value} is out of range; accepted: 0 to max_logprobs=20" in str(error)


def test_any_number_of_log_probabilities_where_there_is_no_cap() -> None:
    with Engine(make_parts(scripted(), max_logprobs=-1)) as engine:
        for value in (-1, VOCAB, 10**9):
            (output,) = engine.generate(["abc"], [SamplingParams(logprobs=value, max_tokens=1)])
            assert len((output.outputs[0].logprobs or ())[0]) == VOCAB


def test_tokens_of_ones_own_choice_have_a_cap_of_their_own() -> None:
    ids = tuple(range(MAX_LOGPROB_TOKEN_IDS))
    params = SamplingParams(logprob_token_ids=ids, logprobs=len(ids), max_tokens=1)
    with Engine(make_parts(scripted())) as engine:
        (output,) = engine.generate(["abc"], [params])
        assert {entry.token_id for entry in (output.outputs[0].logprobs or ())[0]} == set(ids)


@pytest.mark.parametrize(
    "params",
    [
        {"allowed_token_ids": (EOS,), "min_tokens": 1},
        {"allowed_token_ids": (EOS, 7), "stop_token_ids": (7,), "min_tokens": 2},
        {"allowed_token_ids": (97,), "bad_words": ("a",)},
        {"allowed_token_ids": (97, EOS), "bad_words": ("a",), "min_tokens": 1},
    ],
)
def test_parameters_that_leave_no_token_are_refused(params: dict[str, Any]) -> None:
    error = refusal(params)
    assert error.param == "allowed_token_ids"
    assert "leaves no token" in str(error)


def test_one_token_left_is_enough() -> None:
    with Engine(make_parts(scripted())) as engine:
        for params in (
            {"allowed_token_ids": (EOS,)},
            {"allowed_token_ids": (EOS, 98), "min_tokens": 1},
            {"allowed_token_ids": (97, 98), "bad_words": ("a", "bb")},
        ):
            assert engine.generate(["abc"], [SamplingParams(**params)])[0].finished


@pytest.mark.parametrize(
    ("given", "word"),
    [
        (5, "extra_args=5; accepted: an object"),
        ({"other": 1.0}, "names 'other'; accepted: shift, scale"),
        ({1: 1.0}, "names 1; accepted: shift, scale"),
        ({"shift": "1"}, r"\['shift'\]='1'; accepted: a finite number"),
        ({"shift": True}, "=True; accepted: a finite number"),
        ({"shift": None}, "=None; accepted: a finite number"),
        ({"shift": math.nan}, "=nan; accepted: a finite number"),
        ({"shift": math.inf}, "=inf; accepted: a finite number"),
        ({"shift": 1e39}, "accepted: a finite number"),
        ({"shift": 10**400}, "accepted: a finite number"),
    ],
)
def test_arguments_of_logits_processors_are_numbers_under_declared_names(given: Any, word: str) -> None:
    error = refusal({"extra_args": given}, processor_names=("shift", "scale"))
    assert error.param == "extra_args"
    assert re.search(word, str(error))
    assert len(str(error)) < 300


def test_without_declared_processors_none_can_be_named() -> None:
    assert "none: no logits processor was declared" in str(refusal({"extra_args": {"shift": 1.0}}))
    with Engine(make_parts(scripted(), processor_names=("shift",))) as engine:
        for given in (None, {}, {"shift": 0}, {"shift": -2.5}):
            assert engine.generate(["abc"], [SamplingParams(extra_args=given)])[0].finished


def test_sam_07_ignore_eos_goes_past_every_end_of_sequence_token() -> None:
    executor = scripted(default=script(bytes([65, 66]) + b"C"))
    with Engine(make_parts(executor, eos_ids=frozenset({EOS, 66}))) as engine:
        (output,) = engine.generate(["abc"], [SamplingParams(ignore_eos=True, max_tokens=20)])
        assert len(output.outputs[0].token_ids) == 20
        assert output.outputs[0].finish_reason == "length"
