"""Workloads on a small engine that is modelled by two numbers."""

from __future__ import annotations

from dataclasses import dataclass

from jaxllm.config.engine import CacheConfig, SchedulerConfig
from jaxllm.sim.replica import EngineSetup
from jaxllm.sim.simulator import simulate
from jaxllm.sim.workload_spec import make_workload


@dataclass(frozen=True)
class Steps:
    """So long a step, and so long a token."""

    step_s: float = 0.01
    token_s: float = 0.0001

    def step_seconds(self, plan):
        return self.step_s + self.token_s * plan.total_tokens


def setup(**scheduler):
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=256, max_model_len=4096, **scheduler)
    return EngineSetup(scheduler=config, cache=CacheConfig(page_size=16, num_pages=2000))


def run(spec, *, seed=0, cost=None, **scheduler):
    return simulate(setup(**scheduler), cost or Steps(), make_workload(spec, seed, "test: workload"), keep_prompts=True)


def arrivals(result):
    return {served.arrival.request_id: served.arrival for served in result.served}
