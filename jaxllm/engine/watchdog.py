"""Notices a core that froze or died without a word."""

from __future__ import annotations

from collections.abc import Callable

from jaxllm.engine.clock import Clock

DEFAULT_WATCHDOG_S = 60.0


class Heartbeat:
    """When the core last moved on. Written by the core thread alone, read by the watchdog.

    The core beats at every turn of its loop and around each executor call, so the time since the
    last beat is the time spent inside one such call (or in a scheduler that hangs).
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._busy_since_s: float | None = None

    def beat(self) -> None:
        self._busy_since_s = self._clock.now_s()

    def rest(self) -> None:
        """The core goes to sleep until a message comes: silence is fine."""
        self._busy_since_s = None

    def silent_for_s(self) -> float:
        since = self._busy_since_s
        return 0.0 if since is None else self._clock.now_s() - since


class Watchdog:
    """Judges the core from the front end."""

    def __init__(self, heartbeat: Heartbeat, is_alive: Callable[[], bool], limit_s: float) -> None:
        self._heartbeat = heartbeat
        self._is_alive = is_alive
        self._limit_s = limit_s

    @property
    def interval_s(self) -> float:
        """How often to ask for a verdict while requests are open."""
        return min(1.0, self._limit_s / 4)

    def verdict(self) -> str | None:
        """Why the core counts as dead, or None."""
        if not self._is_alive():
            return "the engine thread died"
        silent_s = self._heartbeat.silent_for_s()
        if silent_s > self._limit_s:
            return f"the engine is frozen: one step has taken {silent_s:.1f} s, and the limit is {self._limit_s:g} s"
        return None
