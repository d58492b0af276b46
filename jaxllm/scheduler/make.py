"""One way from settings to a scheduler and its memory, for all that schedule: serving, replay, simulation."""

from __future__ import annotations

from collections.abc import Collection

from jaxllm.config.engine import CacheConfig, SchedulerConfig
from jaxllm.memory.manager import KVManager
from jaxllm.memory.plan import KVCachePlan
from jaxllm.scheduler.registry import create_policy
from jaxllm.scheduler.scheduler import Scheduler
from jaxllm.scheduler.stop import StopRules


def make_scheduler(
    config: SchedulerConfig,
    cache: CacheConfig,
    plan: KVCachePlan,
    *,
    eos_ids: Collection[int] = (),
    events: bool = False,
) -> tuple[Scheduler, KVManager]:
    """Equal settings make schedulers that decide alike. `events`: see `KVManager`.

    Raises:
        ConfigError: the policy is not here, or not with these options.
    """
    kv = KVManager(
        plan,
        enable_prefix_caching=cache.enable_prefix_caching,
        enable_partial_page_reuse=cache.enable_partial_page_reuse,
        events=events,
    )
    policy = create_policy(config.policy, config.policy_options)
    return Scheduler(config, kv, policy, StopRules(frozenset(eos_ids), config.max_model_len)), kv
