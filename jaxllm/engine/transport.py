"""How messages travel between front end and core: two mailboxes in one process."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from jaxllm.engine.messages import ToCore, ToFrontEnd

T = TypeVar("T")


class Mailbox(Generic[T]):
    """A thread-safe queue whose reader takes everything at once and can sleep until there is something.

    Mailboxes of one reader may share a condition, so that it can sleep on all of them: see `wait_for_any`.
    """

    def __init__(self, ready: threading.Condition | None = None) -> None:
        self._messages: deque[T] = deque()
        self._ready = ready or threading.Condition()
        self._on_first: Callable[[], None] | None = None

    def wake_with(self, on_first: Callable[[], None] | None) -> None:
        """Call `on_first`, in the writer's thread, whenever the empty mailbox gets a message."""
        self._on_first = on_first

    def put(self, *messages: T) -> None:
        with self._ready:
            was_empty = not self._messages
            self._messages.extend(messages)
            self._ready.notify_all()
        on_first = self._on_first
        if was_empty and messages and on_first is not None:
            on_first()

    def take(self) -> list[T]:
        """All messages, oldest first; does not wait."""
        with self._ready:
            messages = list(self._messages)
            self._messages.clear()
            return messages

    def wait(self, timeout_s: float | None = None) -> bool:
        """Sleep until there is a message; False after `timeout_s` seconds without one."""
        with self._ready:
            return self._ready.wait_for(lambda: bool(self._messages), timeout_s)

    def __bool__(self) -> bool:
        """Whether there is a message."""
        return bool(self._messages)


def wait_for_any(ready: threading.Condition, boxes: Sequence[Mailbox[Any]], timeout_s: float) -> bool:
    """Sleep until one of the mailboxes that share `ready` has a message; False after `timeout_s` seconds."""
    with ready:
        return ready.wait_for(lambda: any(boxes), timeout_s)


class InProcessTransport:
    """Both directions. Another transport (sockets between processes) needs the same two ends."""

    def __init__(self, front_ready: threading.Condition | None = None) -> None:
        """`front_ready` wakes a front end that reads from several cores."""
        self.to_core: Mailbox[ToCore] = Mailbox()
        self.to_front: Mailbox[ToFrontEnd] = Mailbox(front_ready)
