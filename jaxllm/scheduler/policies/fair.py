"""Between tenants, by tokens served."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator

from jaxllm.scheduler.policies.fcfs import FirstComeFirstServed
from jaxllm.scheduler.policies.ranked import positive
from jaxllm.scheduler.policy import SchedulerView
from jaxllm.types.request import Request

Tenant = str | None


class Fair(FirstComeFirstServed):
    """Deficit round robin (Shreedhar and Varghese, 1995) over the tokens that each tenant was served.

    What a tenant's running requests compute, prompt and output, is taken from its credit. Whose credit is
    above 0 may start a request, tenants in turn; if nobody's is, all who wait are given `quantum_tokens`,
    as often as it takes. A tenant without requests is forgotten, so credit is not saved up. Requests
    without a tenant are one tenant together. Inside a tenant: first come, first served.
    """

    def __init__(self, quantum_tokens: float = 512) -> None:
        self._quantum = positive("quantum_tokens", quantum_tokens)
        self._credit: dict[Tenant, float] = {}  # in the order of their turns
        self._computed: dict[Request, int] = {}  # of each running request, as last seen

    def token_budget(self, view: SchedulerView) -> int:
        self._charge(view)
        return view.token_cap

    def order(self, view: SchedulerView) -> Iterator[Request]:
        """What an admitted request will compute of its prompt counts against its tenant at once."""
        queues: dict[Tenant, deque[Request]] = {}
        for request in view.waiting:
            queues.setdefault(request.service.tenant, deque()).append(request)
        self._enter(queues.keys() | self._credit.keys(), {r.service.tenant for r in view.running} | queues.keys())
        spent = dict.fromkeys(queues, 0.0)
        while queues:
            tenant = self._next(queues, spent)
            request = queues[tenant].popleft()
            if not queues[tenant]:
                del queues[tenant]
            spent[tenant] += request.num_tokens
            yield request

    def _next(self, queues: dict[Tenant, deque[Request]], spent: dict[Tenant, float]) -> Tenant:
        """Whose turn it is; it goes to the end of the round."""
        left = {tenant: self._credit[tenant] - spent[tenant] for tenant in self._credit if tenant in queues}
        most = max(left.values())
        if most <= 0:
            given = (math.floor(-most / self._quantum) + 1) * self._quantum
            for tenant in left:
                self._credit[tenant] += given
                left[tenant] += given
        chosen = next(tenant for tenant in left if left[tenant] > 0)
        self._credit[chosen] = self._credit.pop(chosen)
        return chosen

    def _enter(self, named: set[Tenant], present: set[Tenant]) -> None:
        for tenant in sorted(named - self._credit.keys(), key=str):
            self._credit[tenant] = 0.0
        for tenant in named - present:
            del self._credit[tenant]

    def _charge(self, view: SchedulerView) -> None:
        """Take what was computed since the last step from the credit of its tenants."""
        before = self._computed
        self._computed = {}
        for request in view.running:
            num_computed = request.num_computed + request.num_in_flight
            served = num_computed - before.get(request, request.num_cached)
            self._computed[request] = num_computed
            tenant = request.service.tenant
            if tenant in self._credit and served > 0:
                self._credit[tenant] -= served
