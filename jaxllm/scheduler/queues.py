"""Waiting requests, and the device rows they wait for."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Collection, Iterable

from jaxllm.types.request import Request


class WaitingQueue:
    """Requests in order of arrival, preempted ones in front. Each operation is O(1)."""

    __slots__ = ("_requests", "num_changes", "num_prompt_tokens")

    def __init__(self) -> None:
        self._requests: OrderedDict[Request, Request] = OrderedDict()
        self.num_changes = 0
        self.num_prompt_tokens = 0  # of all that wait

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: Request) -> bool:
        return request in self._requests

    def view(self) -> Collection[Request]:
        """A read-only, live view; whether a request is in it costs O(1)."""
        return self._requests.keys()

    def push_back(self, request: Request) -> None:
        self._requests[request] = request
        self.num_changes += 1
        self.num_prompt_tokens += request.num_prompt_tokens

    def push_front(self, request: Request) -> None:
        self._requests[request] = request
        self._requests.move_to_end(request, last=False)
        self.num_changes += 1
        self.num_prompt_tokens += request.num_prompt_tokens

    def remove(self, requests: Iterable[Request]) -> None:
        for request in requests:
            del self._requests[request]
            self.num_changes += 1
            self.num_prompt_tokens -= request.num_prompt_tokens


class FreeSlots:
    """Device rows nobody uses, smallest first."""

    __slots__ = ("_heap",)

    def __init__(self, num_slots: int) -> None:
        self._heap = list(range(num_slots))  # sorted, and so a heap

    def __len__(self) -> int:
        return len(self._heap)

    def take(self) -> int:
        return heapq.heappop(self._heap)

    def give_back(self, slot: int) -> None:
        heapq.heappush(self._heap, slot)
