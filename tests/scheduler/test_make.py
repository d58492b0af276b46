"""Settings reach the scheduler and the memory that are made of them."""

from __future__ import annotations

import pytest

from jaxllm.config.engine import CacheConfig, SchedulerConfig
from jaxllm.errors import ConfigError
from jaxllm.memory.plan import KVCachePlan, KVGroup
from jaxllm.memory.spec import FullKV
from jaxllm.scheduler.make import make_scheduler
from jaxllm.types.request import Request
from jaxllm.types.sampling import SamplingParams

PLAN = KVCachePlan((KVGroup((0,), FullKV(4, 1, 1)),), 20, 4)


def found_again(num_prompt: int, num_common: int, **cache: bool) -> int:
    """Tokens that a second request need not compute, which begins as the first did."""
    _, kv = make_scheduler(SchedulerConfig(), CacheConfig(**cache), PLAN)
    prompts = (tuple(range(num_prompt)), tuple(range(num_common)) + tuple(range(100, 100 + num_prompt - num_common)))
    first, second = (Request(f"r{i}", prompt, SamplingParams(), 0.0) for i, prompt in enumerate(prompts))
    kv.adopt_prefix(first)
    assert kv.grow(first, num_prompt) is not None
    first.num_computed = num_prompt
    kv.commit(first)
    kv.adopt_prefix(second)
    return second.num_cached


@pytest.mark.parametrize(
    ("cache", "num_cached"),
    [
        ({}, 6),
        ({"enable_partial_page_reuse": False}, 4),
        ({"enable_prefix_caching": False}, 0),
    ],
)
def test_the_memory_reuses_what_the_settings_say(cache: dict[str, bool], num_cached: int) -> None:
    assert found_again(12, 6, **cache) == num_cached


def test_a_policy_that_is_not_here_is_refused() -> None:
    with pytest.raises(ConfigError, match="policy='fastest' is unknown"):
        make_scheduler(SchedulerConfig(policy="fastest"), CacheConfig(), PLAN)


def test_changes_of_the_cache_are_kept_for_those_who_ask() -> None:
    for events in (True, False):
        _, kv = make_scheduler(SchedulerConfig(), CacheConfig(), PLAN, events=events)
        kv.reset_prefix_cache()
        assert bool(kv.take_events()) == events
