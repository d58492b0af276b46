"""Ends a running generation from outside: the client left, the drain is over, or the engine died."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

from starlette.types import Receive

from jaxllm.server.errors import Interrupted


class Guard:
    """Async context manager around one generation, in the manner of `asyncio.timeout`.

    The first interruption cancels the body of the ``with`` block, so that whatever it awaits is
    closed properly (closing an engine stream aborts the request and frees its pages), and leaves
    the block as `Interrupted`. `receive` must have delivered the whole body before.
    """

    def __init__(self, receive: Receive, running: set[Guard], check: Callable[[], None]) -> None:
        self._receive = receive
        self._running = running
        self._check = check
        self._reason: Interrupted | None = None
        self._num_cancels_before = 0

    async def __aenter__(self) -> Guard:
        self._check()
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a Guard needs to run inside a task")
        self._task = task
        self._num_cancels_before = task.cancelling()
        self._running.add(self)
        self._watch = asyncio.create_task(self._watch_client())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._running.discard(self)
        self._watch.cancel()
        if self._reason is None:
            return
        is_ours = self._task.uncancel() <= self._num_cancels_before
        if is_ours and kind is asyncio.CancelledError:
            raise self._reason from None

    def interrupt(self, why: str, *, client_left: bool = False) -> None:
        """Cancel the body once; later calls change nothing."""
        if self._reason is None and self in self._running:
            self._reason = Interrupted(why, client_left=client_left)
            self._task.cancel()

    async def _watch_client(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.interrupt("the client closed the connection", client_left=True)
