"""The real scheduler and its pages on a device of which only the time of a step is modelled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from jaxllm.config.engine import SchedulerConfig
from jaxllm.memory.manager import KVManager
from jaxllm.memory.plan import KVCachePlan, KVGroup
from jaxllm.memory.spec import FullKV
from jaxllm.scheduler.registry import create_policy
from jaxllm.scheduler.scheduler import RequestUpdate, Scheduler
from jaxllm.scheduler.stop import StopRules
from jaxllm.types.request import Request
from jaxllm.types.step import SchedulerOutput, StepOutput

_TOKEN = 1  # what every request answers


@dataclass
class Modelled:
    """Steps of `step_s` seconds and `token_s` more for each token, one after the other."""

    config: SchedulerConfig
    num_pages: int
    page_size: int = 16
    step_s: float = 0.010
    token_s: float = 0.0001
    now_s: float = 0.0
    scheduler: Scheduler = field(init=False)

    def __post_init__(self) -> None:
        plan = KVCachePlan((KVGroup((0,), FullKV(self.page_size, 1, 1)),), self.num_pages, self.page_size)
        kv = KVManager(plan, enable_prefix_caching=True)
        policy = create_policy(self.config.policy, self.config.policy_options)
        self.scheduler = Scheduler(self.config, kv, policy, StopRules(frozenset(), self.config.max_model_len))

    def step(self) -> tuple[SchedulerOutput, list[RequestUpdate]] | None:
        """One step and what it brought; None if there is nothing to do."""
        plan = self.scheduler.schedule(self.now_s)
        if plan is None:
            return None
        self.now_s += self.step_s + self.token_s * plan.total_tokens
        sampled = zip(plan.rows.request_ids, plan.rows.samples.tolist(), strict=True)
        tokens = {request_id: (_TOKEN,) for request_id, samples in sampled if samples}
        return plan, self.scheduler.update(plan, StepOutput(plan.step_id, tokens))

    def run(self, arrivals: Sequence[tuple[float, Callable[[float], Request]]]) -> Iterator[list[Request]]:
        """Add requests as they come, until all have ended; yields the unfinished ones while each step runs."""
        pending = list(reversed(arrivals))
        while pending or self.scheduler.has_unfinished:
            while pending and pending[-1][0] <= self.now_s:
                at_s, make = pending.pop()
                self.scheduler.add(make(at_s))
            if self.step() is None:
                self.now_s = pending[-1][0]
                continue
            yield list(self.scheduler.requests.values())
