"""Who of the waiting starts in a step, as the policy orders them and as there is room."""

from __future__ import annotations

from collections.abc import Callable

from jaxllm.config.engine import SchedulerConfig
from jaxllm.memory.manager import KVManager
from jaxllm.scheduler.forks import Forks
from jaxllm.scheduler.guard import GuardedPolicy
from jaxllm.scheduler.limits import PromptLimits
from jaxllm.scheduler.policy import SchedulerView
from jaxllm.scheduler.queues import WaitingQueue
from jaxllm.scheduler.running import Running
from jaxllm.scheduler.step_plan import StepPlan
from jaxllm.types.request import Request, RequestStatus


class Admission:
    """Takes requests from those that wait to those that run. Mutable; owned by the scheduler."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVManager,
        policy: GuardedPolicy,
        waiting: WaitingQueue,
        running: Running,
        forks: Forks,
        limits: PromptLimits,
    ) -> None:
        self.prefix_queries = 0  # tokens of requests at their first admission,
        self.prefix_hits = 0  # and those of them found cached
        self._config = config
        self._kv = kv
        self._policy = policy
        self._waiting = waiting
        self._running = running
        self._forks = forks
        self._limits = limits

    def in_order(self, plan: StepPlan, look: Callable[[], SchedulerView]) -> Request | None:
        """Admit who fits; returns the first that finds no slot or no memory, for whom somebody may give way."""
        may_preempt = self._policy.is_preemptive
        if not self._waiting or plan.tokens_for(1) == 0 or not (self._running.slots or may_preempt):
            return None
        admitted: list[Request] = []
        view = look()
        try:
            for request in self._policy.order(view):
                if not self._may_start(request, view, plan):
                    continue
                if not self._running.slots or not self._admit(request, plan):
                    return request if may_preempt and request.num_pending == 0 else None
                admitted.append(request)
                if plan.tokens_for(1) == 0 or not (self._running.slots or may_preempt):
                    break
                view = look()
        finally:
            self._waiting.remove(admitted)  # not earlier: the policy may be reading the queue
        return None

    def _may_start(self, request: Request, view: SchedulerView, plan: StepPlan) -> bool:
        """Whether it is one to choose, and nothing but room is in its way."""
        if request not in self._waiting or request.status is RequestStatus.RUNNING:
            return False
        if self._waits_for_prompt(request, plan) or self._waits_for_prefix(request):
            return False
        return self._policy.admit(request, view) and self._takes_partial(request, plan)

    def _admit(self, request: Request, plan: StepPlan) -> bool:
        """Start a request if its whole sequence fits now; its first piece may be smaller."""
        if request.num_pending > 0:
            return False  # its turn, but tokens sampled before its preemption are not here yet
        first = self._forks.first_of(request)
        is_admitted = self._admit_alone(request, plan) if first is None else self._admit_fork(request, first, plan)
        if is_admitted:
            self._running.start(request)
        return is_admitted

    def _waits_for_prompt(self, request: Request, plan: StepPlan) -> bool:
        first = self._forks.first_of(request)
        # One that waits itself, at first or after a preemption, has nothing computed.
        return first is not None and plan.num_tokens_before(first) < first.num_prompt_tokens

    def _waits_for_prefix(self, request: Request) -> bool:
        """Whether half or more of what it has to compute is on its way, for others, in steps not planned yet."""
        if not self._config.in_batch_prefix_sharing or self._forks.first_of(request) is not None:
            return False
        num_pending = self._kv.pending_prefix(request)
        return num_pending > 0 and 2 * num_pending >= request.num_tokens - self._kv.match_prefix(request)

    def _takes_partial(self, request: Request, plan: StepPlan) -> bool:
        """False if it would be left half computed beside as many as may be."""
        if not self._limits.limits_partial:
            return True
        num_wanted = request.num_tokens - self._kv.match_prefix(request)
        if plan.tokens_for(num_wanted) == num_wanted:
            return True
        return self._limits.takes_partial(request, [r for r in self._running.prefilling if r.num_uncomputed > 0])

    def _admit_fork(self, request: Request, first: Request, plan: StepPlan) -> bool:
        page_copies = self._kv.fork(request, first)
        return page_copies is not None and plan.add(request, 1, is_new=True, page_copies=page_copies)

    def _admit_alone(self, request: Request, plan: StepPlan) -> bool:
        if not self._config.enable_chunked_prefill:
            num_wanted = request.num_tokens - self._kv.match_prefix(request)
            if num_wanted > plan.tokens_for(num_wanted):
                return False
        if not self._kv.can_fit(request, request.num_tokens):
            return False
        page_copies = self._kv.adopt_prefix(request)
        num_tokens = plan.tokens_for(request.num_tokens - request.num_cached)
        if not plan.add(request, num_tokens, is_new=True, page_copies=page_copies):
            plan.withdraw(request)
            return False
        if request.num_preemptions == 0:
            self.prefix_queries += request.num_tokens
            self.prefix_hits += request.num_cached
        return True
