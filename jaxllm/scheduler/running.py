"""Requests that run, and what each of them wants of the next step."""

from __future__ import annotations

from collections.abc import Iterable

from jaxllm.memory.manager import KVManager
from jaxllm.scheduler.decode_rows import DecodeRows
from jaxllm.scheduler.queues import FreeSlots
from jaxllm.scheduler.stop import StopRules
from jaxllm.types.request import Request, RequestStatus


class Running:
    """All that run, in order of admission. Mutable; owned by the scheduler. Dictionaries serve as ordered sets.

    Each is in one of three ways: with tokens left to compute, decoding (those whose last token is on its
    way too), or, where drafts may come, decoding with drafts.
    """

    def __init__(self, kv: KVManager, stop: StopRules, num_slots: int, *, drafts: bool) -> None:
        self.prefilling: dict[Request, None] = {}
        self.drafting: dict[Request, None] = {}
        self.decodes = DecodeRows(kv, stop)
        self.slots = FreeSlots(num_slots)
        self._stop = stop
        self._drafts = drafts
        self._requests: dict[Request, None] = {}
        self._view: tuple[Request, ...] | None = None  # until somebody joins or leaves

    def __len__(self) -> int:
        return len(self._requests)

    def view(self) -> tuple[Request, ...]:
        if self._view is None:
            self._view = tuple(self._requests)
        return self._view

    def start(self, request: Request) -> None:
        request.slot = self.slots.take()
        request.status = RequestStatus.RUNNING
        self._requests[request] = self.prefilling[request] = None
        self._view = None

    def decode(self, requests: Iterable[Request]) -> None:
        """From now on these have nothing to wait for but their next token; some may have had before."""
        joining = [request for request in requests if request in self.prefilling]
        for request in joining:
            del self.prefilling[request]
        if self._drafts:
            self.drafting.update(dict.fromkeys(joining))
        else:
            self.decodes.join(joining)

    def wants_draft_step(self, request: Request) -> bool:
        """Whether all its tokens are known, so that drafts could follow them, and more may come."""
        return not request.num_pending and not self._stop.is_full(request, request.num_tokens)

    def stop(self, request: Request) -> None:
        """Its slot stays its own until `free_slot`."""
        del self._requests[request]
        self._view = None
        self.prefilling.pop(request, None)
        self.drafting.pop(request, None)
        self.decodes.leave(request)

    def free_slot(self, request: Request) -> None:
        if request.slot is not None:
            self.slots.give_back(request.slot)
            request.slot = None
