"""Nothing compiles after ready: count what does, and say so."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

_log = logging.getLogger(__name__)
BACKEND_COMPILE = "/jax/core/compile/backend_compile_duration"


class CompileGuard:
    """Counts compilations that happen while its owner is at work. Mutable; owned by one Runner.

    jax reports a compilation on the thread that asked for it, and says not for whom. So the guard
    counts only inside `watching()`, on that thread: another Runner's warm-up in the same process,
    or its user's own jax code, is none of its business.
    """

    def __init__(self) -> None:
        self.num_compilations = 0
        self._armed = False
        self._watched = threading.local()

    def arm(self) -> None:
        """Count from here on. Called when the Runner is ready."""
        if not self._armed:
            jax.monitoring.register_event_duration_secs_listener(self._on_event)
            self._armed = True

    def disarm(self) -> None:
        if self._armed:
            jax.monitoring.unregister_event_duration_listener(self._on_event)
            self._armed = False

    @contextmanager
    def watching(self, what: str = "a step") -> Iterator[None]:
        self._watched.what = what
        try:
            yield
        finally:
            self._watched.what = None

    def _on_event(self, event: str, duration_secs: float, **details: Any) -> None:
        what = getattr(self._watched, "what", None)
        if event != BACKEND_COMPILE or what is None:
            return
        self.num_compilations += 1
        _log.error(
            "compiled after ready, in %s: %.3f s, %s; a shape was not warmed up",
            what,
            duration_secs,
            details or "no details",
        )
