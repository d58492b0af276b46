"""Notices a core that froze or died without a word."""

from __future__ import annotations

import math
from collections.abc import Callable

from jaxllm.engine.clock import Clock

DEFAULT_WATCHDOG_S = 60.0


_LATE_S = 1.0  # an event loop under load may ask this much later than it meant to


class Heartbeat:
    """When the core last moved on. Written by the core thread alone, read by the watchdog.

    The core beats at every turn of its loop and around each executor call, so the time since the
    last beat is the time spent inside one such call (or in a scheduler that hangs).
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._busy_since_s: float | None = None

    def beat(self) -> None:
        self._busy_since_s = self.clock.now_s()

    def rest(self) -> None:
        """The core goes to sleep until a message comes: silence is fine."""
        self._busy_since_s = None

    def silent_for_s(self) -> float:
        since = self._busy_since_s
        return 0.0 if since is None else self.clock.now_s() - since


class Watchdog:
    """Judges the core from the front end. Mutable; owned by it.

    A process that was stopped for a while (a debugger, Ctrl-Z, a frozen container) finds an old last
    beat when it goes on. The watchdog stood still with it: where it was asked much later than it had
    been promised, only the silence after that counts.
    """

    def __init__(self, heartbeat: Heartbeat, is_alive: Callable[[], bool], limit_s: float) -> None:
        self._heartbeat = heartbeat
        self._is_alive = is_alive
        self._limit_s = limit_s
        self._asked_by_s = math.inf  # the promise; infinite where there is none
        self._counts_from_s = -math.inf

    @property
    def interval_s(self) -> float:
        """How often to ask for a verdict while requests are open."""
        return min(1.0, self._limit_s / 4)

    def verdict(self, *, asks_again: bool = False) -> str | None:
        """Why the core counts as dead, or None. `asks_again` promises a next call after `interval_s`."""
        if not self._is_alive():
            return "the engine thread died"
        now_s = self._heartbeat.clock.now_s()
        if now_s > self._asked_by_s:
            self._counts_from_s = now_s
        self._asked_by_s = now_s + self.interval_s + _LATE_S if asks_again else math.inf
        silent_s = min(self._heartbeat.silent_for_s(), now_s - self._counts_from_s)
        if silent_s > self._limit_s:
            return f"the engine is frozen: one step has taken {silent_s:.1f} s, and the limit is {self._limit_s:g} s"
        return None
