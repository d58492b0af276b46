"""The host measurements measure what they say: small runs, their counts, and no time asserted."""

from __future__ import annotations

import math

import pytest

from jaxllm.bench.host import Spread, device_busy_share, prefix_cache_cost, scheduler_cost


def test_a_spread_is_median_and_ends() -> None:
    assert Spread.of([3.0, 1.0, 10.0]) == Spread(3.0, 1.0, 10.0)


def test_scheduler_cost_adds_up() -> None:
    cost = scheduler_cost(4, num_steps=5, num_runs=3)
    assert cost.num_requests == 4
    assert 0 < cost.schedule_us.low <= cost.schedule_us.median <= cost.schedule_us.high
    assert cost.total_us.low >= cost.schedule_us.low + cost.update_us.low


def test_prefix_cache_cost_is_the_difference_of_equal_runs() -> None:
    cost = prefix_cache_cost(3, num_runs=2, prompt_tokens=20, output_tokens=6, page_size=4)
    assert cost.num_steps == 6  # the prompts, then five decodes
    assert math.isfinite(cost.share_of_step)
    assert cost.difference_us.low >= cost.with_us.low - cost.without_us.high


@pytest.mark.parametrize("overlap", [True, False])
def test_busy_share_counts_each_step_once(overlap: bool) -> None:
    busy = device_busy_share(3, step_s=0.001, num_tokens=6, async_scheduling=overlap)
    assert busy.num_steps == busy.profile.count
    assert 0 < busy.busy_share <= 1
    assert busy.wall_s == pytest.approx(busy.num_steps * 0.001 / busy.busy_share)
    assert busy.profile.num_tokens >= 3 * (64 + 5)
