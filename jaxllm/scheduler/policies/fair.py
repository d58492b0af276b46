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

    What a tenant's requests compute, prompt and output, is taken from its credit, as often as somebody is
    to be chosen. Whose credit is above 0 may start a request, tenants in turn; if nobody's is, all who wait
    are given `quantum_tokens`, as often as it takes. A tenant without requests is forgotten, so credit is
    not saved up. Requests without a tenant are one tenant together. Inside a tenant: first come, first served.
    """

    def __init__(self, quantum_tokens: float = 512) -> None:
        self._quantum = positive("quantum_tokens", quantum_tokens)
        self._credit: dict[Tenant, float] = {}  # in the order of their turns
        self._computed: dict[Request, int] = {}  # of each request that may have computed since, as last seen

    def order(self, view: SchedulerView) -> Iterator[Request]:
        """What an admitted request will compute of its prompt counts against its tenant at once."""
        self._charge(view)
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
            self._computed.setdefault(request, -1)  # it may have ended when somebody is chosen next
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
        """Take what was computed since the last time from the credit of its tenants."""
        for request, before in self._computed.items():
            served = _computed(request) - (request.num_cached if before < 0 else before)
            tenant = request.service.tenant
            if tenant in self._credit and served > 0:
                self._credit[tenant] -= served
        self._computed = {request: _computed(request) for request in view.running}


def _computed(request: Request) -> int:
    return request.num_computed + request.num_in_flight - request.num_placeholders
