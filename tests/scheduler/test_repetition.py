"""Repetition found token by token is the one that a search of the whole output finds."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.scheduler.repetition import RepetitionWatches
from jaxllm.types.request import FinishReason, Request
from jaxllm.types.sampling import RepetitionDetection, SamplingParams
from tests.scheduler.driver import Driver
from tests.scheduler.paged_device import repeats


def found_at(output: list[int], rule: RepetitionDetection) -> int | None:
    """Number of tokens after which the watch speaks up."""
    request = Request("r", (1,), SamplingParams(repetition_detection=rule), 0.0)
    watches = RepetitionWatches()
    return next((i + 1 for i, token in enumerate(output) if watches.push(request, token)), None)


@pytest.mark.parametrize(
    ("output", "rule", "expected"),
    [
        ([4, 4], {"max_pattern_size": 1}, 2),
        ([4, 5, 5, 4], {"max_pattern_size": 2}, 3),
        ([4, 5, 4, 5], {"max_pattern_size": 2}, 4),
        ([4, 5, 4, 5], {"max_pattern_size": 1}, None),
        ([1, 2, 3, 1, 2, 3, 1, 2, 3], {"max_pattern_size": 3, "min_count": 3}, 9),
        ([1, 2, 3, 1, 2, 3, 1, 2, 4], {"max_pattern_size": 3, "min_count": 3}, None),
        ([0, 0, 0, 0], {"max_pattern_size": 2, "min_pattern_size": 2}, 4),
        ([0, 0, 0], {"max_pattern_size": 1, "min_count": 3}, 3),
        ([], {"max_pattern_size": 1}, None),
    ],
)
def test_repetition_by_hand(output: list[int], rule: dict[str, int], expected: int | None) -> None:
    assert found_at(output, RepetitionDetection(**rule)) == expected


@settings(max_examples=200, derandomize=True, database=None, deadline=None)
@given(
    output=st.lists(st.integers(0, 2), max_size=40),
    low=st.integers(1, 6),
    more=st.integers(0, 6),
    count=st.integers(2, 5),
)
def test_a_watch_speaks_up_as_soon_as_a_search_of_the_whole_output_does(
    output: list[int], low: int, more: int, count: int
) -> None:
    rule = RepetitionDetection(max_pattern_size=low + more, min_pattern_size=low, min_count=count)
    expected = next((n for n in range(1, len(output) + 1) if repeats(output[:n], rule)), None)
    assert found_at(output, rule) == expected


def test_a_request_ends_by_its_repetition_and_leaves_no_watch() -> None:
    """The pretend device's tokens do repeat for some prompt; the solo run says where."""
    rule = RepetitionDetection(max_pattern_size=3)
    params = SamplingParams(max_tokens=40, ignore_eos=True, repetition_detection=rule)
    driver = Driver(num_pages=60, max_num_seqs=8)
    rng = random.Random(0)
    requests = [driver.add(tuple(rng.randrange(29) for _ in range(4)), params) for _ in range(20)]
    driver.drain()
    ended = [r for r in requests if r.stop_reason == "repetition"]
    assert ended and len(ended) < 20
    assert all(r.finish_reason is FinishReason.STOP and repeats(r.output_ids, rule) for r in ended)
    driver.retire()


def test_a_request_without_the_rule_is_not_watched() -> None:
    watches = RepetitionWatches()
    request = Request("r", (1,), SamplingParams(), 0.0)
    assert not any(watches.push(request, 1) for _ in range(5))
    assert len(watches) == 0
