from __future__ import annotations

from typing import Any

import pytest

from jaxllm.scheduler.stop import StopRules
from jaxllm.types.request import FinishReason, Request
from jaxllm.types.sampling import SamplingParams

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
RULES = StopRules(frozenset({2, 3}), max_model_len=10)


def ended(
    output: list[int], num_prompt: int = 4, *, repeats: bool = False, **params: Any
) -> tuple[FinishReason, int | str | None] | None:
    request = Request("r", (1,) * num_prompt, SamplingParams(**params), 0.0)
    request.output_ids.extend(output)
    stop = RULES.check(request, repeats=repeats)
    return None if stop is None else (stop.reason, stop.cause)


@pytest.mark.parametrize(
    ("output", "params", "expected"),
    [
        ([9], {}, None),
        ([9, 2], {}, (STOP, None)),
        ([9, 3], {}, (STOP, None)),
        ([9, 2], {"ignore_eos": True}, None),
        ([9, 5], {"stop_token_ids": (5, 6)}, (STOP, 5)),
        ([5, 9], {"stop_token_ids": (5, 6)}, None),
        ([2], {"stop_token_ids": (2,)}, (STOP, None)),
        ([2], {"stop_token_ids": (2,), "ignore_eos": True}, (STOP, 2)),
        ([9, 9, 9], {"max_tokens": 3}, (LENGTH, None)),
        ([9, 9], {"max_tokens": 3}, None),
        ([9, 9, 2], {"max_tokens": 3}, (STOP, None)),
        ([9, 9, 5], {"max_tokens": 3, "stop_token_ids": (5,)}, (STOP, 5)),
        ([2], {"min_tokens": 2}, None),
        ([9, 2], {"min_tokens": 2}, (STOP, None)),
        ([5], {"min_tokens": 2, "stop_token_ids": (5,)}, None),
        ([9, 5], {"min_tokens": 2, "stop_token_ids": (5,)}, (STOP, 5)),
        ([9, 2], {"min_tokens": 2, "max_tokens": 2, "ignore_eos": True}, (LENGTH, None)),
        ([9] * 6, {"max_tokens": None}, (LENGTH, None)),
        ([9] * 5, {"max_tokens": None}, None),
        ([9] * 6, {"max_tokens": 100}, (LENGTH, None)),
        ([2] * 6, {"max_tokens": 100, "min_tokens": 50}, (LENGTH, None)),
    ],
)
def test_what_ends_a_request(output: list[int], params: dict[str, Any], expected: object) -> None:
    assert ended(output, **params) == expected


@pytest.mark.parametrize(("num_prompt", "max_tokens", "total"), [(4, 3, 7), (4, 6, 10), (4, 7, 10), (9, None, 10)])
def test_full_length_counts_prompt_and_output(num_prompt: int, max_tokens: int | None, total: int) -> None:
    request = Request("r", (1,) * num_prompt, SamplingParams(max_tokens=max_tokens), 0.0)
    assert RULES.max_tokens(request) == total


@pytest.mark.parametrize(
    ("output", "params", "expected"),
    [
        ([9, 9], {}, (STOP, "repetition")),
        ([9, 9], {"min_tokens": 3}, None),
        ([9, 9], {"max_tokens": 2}, (LENGTH, None)),
        ([2, 2], {}, (STOP, None)),
        ([5, 5], {"stop_token_ids": (5,)}, (STOP, 5)),
    ],
)
def test_repetition_counts_last(output: list[int], params: dict[str, Any], expected: object) -> None:
    assert ended(output, repeats=True, **params) == expected


@pytest.mark.parametrize("num_prompt", [4, 10])
def test_a_prompt_that_is_only_scored_is_full_once_something_was_sampled(num_prompt: int) -> None:
    request = Request("r", (1,) * num_prompt, SamplingParams(max_tokens=0, prompt_logprobs=0), 0.0)
    assert not RULES.is_full(request, num_prompt)
    assert RULES.is_full(request, num_prompt + 1)
    assert ended([], num_prompt, max_tokens=0, prompt_logprobs=0) == (LENGTH, None)
