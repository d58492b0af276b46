"""The command around the host's measurements; how they measure is tested with them."""

from __future__ import annotations

import json

import pytest

from jaxllm.bench.scheduler import SchedulerArgs, SchedulerResult, run_scheduler
from jaxllm.errors import ConfigError


@pytest.fixture(scope="module")
def result() -> SchedulerResult:
    args = SchedulerArgs(num_running="2,4", num_steps=12, num_runs=2, device_ms=0.1, device_requests=2)
    return run_scheduler(args)


def test_each_count_is_measured_and_the_device_with_and_without_overlap(result: SchedulerResult) -> None:
    assert [cost.num_requests for cost in result.costs] == [2, 4]
    assert [busy.async_scheduling for busy in result.busy] == [True, False]
    assert all(busy.num_steps >= 12 for busy in result.busy)
    assert result.prefix_cache is None
    assert result.prefix_rows() == []


def test_tables_and_json_hold_the_same(result: SchedulerResult) -> None:
    figures = json.loads(json.dumps(result.as_dict()))
    first = figures["scheduler"][0]
    assert first["num_requests"] == 2
    shown = result.rows()[1]
    assert shown[0] == "2"
    assert shown[3].startswith(f"{first['total_us']['median']:.1f} (")
    assert result.busy_rows()[2][0] == "one step after the other"
    assert figures["device"][0]["profile"]["num_steps"] == result.busy[0].profile.count


def test_the_device_may_be_left_out_and_the_prefix_cache_asked_for() -> None:
    seen: list[tuple[str, int, int]] = []
    args = SchedulerArgs(num_running="2", num_steps=4, num_runs=1, device_ms=0.0, device_requests=2, prefix_cache=True)
    result = run_scheduler(args, progress=lambda *each: seen.append(each))
    assert result.busy == ()
    assert result.prefix_cache is not None
    assert len(result.prefix_rows()) == 5
    assert seen[-1] == ("measurements", 2, 2)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"num_running": "0"}, "num_running holds 0"),
        ({"num_running": "a"}, "'a' is not a count"),
        ({"num_steps": 0}, "num_steps=0"),
        ({"num_steps": 5000}, "num_steps=5000; accepted: at most 3000"),
        ({"device_ms": -1.0}, "device_ms=-1.0"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, object], word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SchedulerArgs(**settings)  # pyright: ignore[reportArgumentType]
    assert word in str(caught.value)


def test_policies_are_compared_with_fcfs_with_and_without_others_that_wait() -> None:
    args = SchedulerArgs(num_running="4", num_steps=5, num_runs=1, device_ms=0, policies="slo,fair", num_waiting=6)
    result = run_scheduler(args)
    assert [cost.policy for cost in result.policies] == ["fcfs", "slo", "fair"]
    heading, first, *others = result.policy_rows()
    assert (first[0], first[2], first[4]) == ("fcfs", "1.00", "1.00")
    assert len(others) == 2 and all(len(row) == len(heading) for row in others)
    assert [cost["policy"] for cost in result.as_dict()["policies"]] == ["fcfs", "slo", "fair"]


def test_an_unknown_policy_is_refused_by_name_before_anything_is_measured() -> None:
    with pytest.raises(ConfigError, match="policy='best' is unknown; accepted: cache_aware"):
        SchedulerArgs(policies="best")
    assert SchedulerArgs(policies="all").policy_names[:2] == ("fcfs", "priority")
