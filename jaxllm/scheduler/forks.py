"""Siblings that wait for the prompt of the first of them."""

from __future__ import annotations

from jaxllm.errors import RequestError
from jaxllm.types.request import Request


class Forks:
    """Who takes over whose prompt. Mutable; owned by the scheduler.

    A sibling is like any other request once the first one has ended, or it has output itself (it was
    preempted, and has more to compute than the prompt), or it wants all of its prompt scored.
    """

    def __init__(self) -> None:
        self._firsts: dict[Request, Request] = {}

    def __len__(self) -> int:
        return len(self._firsts)

    def add(self, request: Request, first: Request | None) -> None:
        """Remember the first one of a sibling; None if it is gone.

        Raises:
            RequestError: the two could not share pages: their prompts, adapters or salts differ.
        """
        if first is None or request.params.prompt_logprobs is not None:
            return
        for name in ("prompt_ids", "adapter_id", "cache_salt", "media_keys"):
            if getattr(request, name) != getattr(first, name):
                raise RequestError(
                    f"fork_of={request.fork_of!r} has another {name}; accepted: a request with the same",
                    param="fork_of",
                )
        self._firsts[request] = first

    def first_of(self, request: Request) -> Request | None:
        """The request whose prompt this waiting one takes over; None if it computes its own."""
        first = self._firsts.get(request)
        if first is None or first.is_finished or request.output_ids:
            return None
        return first

    def forget(self, request: Request) -> None:
        self._firsts.pop(request, None)
