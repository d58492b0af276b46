"""By what is cached already."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice

from jaxllm.scheduler.policies.fcfs import FirstComeFirstServed
from jaxllm.scheduler.policies.ranked import positive
from jaxllm.scheduler.policy import SchedulerView
from jaxllm.types.request import Request


class CacheAware(FirstComeFirstServed):
    """The longest cached prefix first, so that it is used before it is evicted.

    Looks at the first `window` waiting requests, the others follow as they came; and who has waited for
    `patience_s` seconds goes before all who have not. One whose prefix somebody is computing is passed
    over until that is done.
    """

    def __init__(self, window: float = 128, patience_s: float = 30.0) -> None:
        self._window = int(positive("window", window))
        self._patience_s = positive("patience_s", patience_s)

    def order(self, view: SchedulerView) -> Iterator[Request]:
        looked_at = list(islice(view.waiting, self._window))
        late = [r for r in looked_at if view.now_s - r.arrival_s >= self._patience_s]
        cached = {r: view.cached_prefix(r) for r in looked_at if view.now_s - r.arrival_s < self._patience_s}
        by_prefix = sorted(cached, key=lambda r: -cached[r])  # stable: equal ones keep their order
        return chain(late, by_prefix, islice(view.waiting, self._window, None))

    def admit(self, request: Request, view: SchedulerView) -> bool:
        return view.pending_prefix(request) == 0
