"""Time that passes only when somebody says so."""

from __future__ import annotations


class VirtualClock:
    """The clock of one simulated engine: implements `Clock`. Mutable; owned by its replica."""

    __slots__ = ("_now_s",)

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def advance_to(self, at_s: float) -> None:
        """Nothing happens if that moment has passed."""
        self._now_s = max(self._now_s, at_s)
