"""Sampling parameters refuse what they cannot mean, by name, whatever kind of value it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from jaxllm.errors import RequestError
from jaxllm.types.sampling import BIAS_LIMIT, BeamSearchParams, RepetitionDetection, SamplingParams

HUGE = 10**400  # an integer that no float holds
Make = Callable[..., Any]


def beams(**fields: Any) -> BeamSearchParams:
    return BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, **fields})


@pytest.mark.parametrize(
    ("make", "fields"),
    [
        *((SamplingParams, {name: HUGE}) for name in ("temperature", "top_p", "min_p", "presence_penalty")),
        *((SamplingParams, {name: HUGE}) for name in ("frequency_penalty", "repetition_penalty")),
        *(
            (SamplingParams, {"logit_bias": bias})
            for bias in ({1: HUGE}, {1: float("nan")}, {-1: 0.0}, {"1": 0.0}, [1])
        ),
        (SamplingParams, {"allowed_token_ids": []}),
        (SamplingParams, {"logprob_token_ids": list(range(129))}),
        (SamplingParams, {"logprob_token_ids": [1, 2], "logprobs": 3}),
        (SamplingParams, {"max_tokens": 0}),
        *(
            (SamplingParams, {"repetition_detection": {"max_pattern_size": n}})
            for n in (False, True, 0.0, "3", -1, HUGE)
        ),
        (SamplingParams, {"repetition_detection": {"max_pattern_size": 0, "min_count": -5}}),
        (SamplingParams, {"repetition_detection": {"max_pattern_size": 2, "min_pattern_size": 3}}),
        (SamplingParams, {"repetition_detection": {"min_count": 3}}),
        *((beams, {"length_penalty": value}) for value in (HUGE, 1000, -10.5, float("inf"))),
        *((beams, {"temperature": value}) for value in (HUGE, -1, 2.5, True)),
        *((beams, {"beam_width": value}) for value in (0, 65, 1.5, HUGE)),
        (beams, {"ignore_eos": "x"}),
    ],
)
def test_a_wrong_value_is_a_request_error_that_names_its_field(make: Make, fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="accepted") as refused:
        make(**fields)
    assert refused.value.param in fields


@pytest.mark.parametrize("name", ["structured_outputs", "thinking_token_budget"])
def test_what_is_not_served_yet_is_refused_before_anything_runs(name: str) -> None:
    for value in ({"regex": "a"}, "a", 3, 0, [1]):
        with pytest.raises(RequestError) as refused:
            SamplingParams(**{name: value})  # type: ignore[arg-type]
        assert refused.value.param == name
        assert "accepted" in str(refused.value)
        assert repr(value) in str(refused.value)
    assert getattr(SamplingParams(**{name: None}), name) is None  # type: ignore[arg-type]


def test_a_bias_is_cut_to_its_limits() -> None:
    assert SamplingParams(logit_bias={3: 1e300, 4: -101, 5: 1}).logit_bias == {3: BIAS_LIMIT, 4: -BIAS_LIMIT, 5: 1.0}


def test_repetition_detection_takes_a_mapping_and_can_be_off() -> None:
    given = SamplingParams(repetition_detection={"max_pattern_size": 3})  # type: ignore[arg-type]
    assert given.repetition_detection == RepetitionDetection(max_pattern_size=3)
    off = SamplingParams(repetition_detection={"max_pattern_size": 0, "min_count": 4})  # type: ignore[arg-type]
    assert off.repetition_detection is None


def test_a_prompt_may_be_scored_without_generating() -> None:
    assert SamplingParams(max_tokens=0, prompt_logprobs=0).max_tokens == 0
