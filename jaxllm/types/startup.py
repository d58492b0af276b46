"""What starting up cost: phases with their seconds, and what takes memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StartupPhase:
    """One named part of start-up. Phases may overlap; then each counts the CPU time of both."""

    name: str
    wall_s: float
    cpu_s: float  # of the whole process, all its threads
    overlaps: bool = False  # another phase ran at the same time


PhaseListener = Callable[[StartupPhase], None]


@dataclass(slots=True)
class StartupReport:
    """Collects phases while an engine is built. Mutable; owned by whoever starts it; threads may share it."""

    on_phase: PhaseListener | None = None  # called at the end of each phase, in the thread that ran it
    phases: list[StartupPhase] = field(default_factory=list[StartupPhase])
    plan_rows: tuple[tuple[str, str], ...] = ()  # the memory plan as (what, how much), for people
    started_s: float = field(default_factory=time.monotonic)
    _open: set[str] = field(default_factory=set[str])
    _overlapped: set[str] = field(default_factory=set[str])
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Measure what runs inside. A phase that fails is not reported."""
        with self._lock:
            if self._open:
                self._overlapped |= {name, *self._open}
            self._open.add(name)
        wall_s, cpu_s = time.monotonic(), time.process_time()
        try:
            yield
        except BaseException:
            self._open.discard(name)
            raise
        self._finish(name, time.monotonic() - wall_s, time.process_time() - cpu_s)

    def _finish(self, name: str, wall_s: float, cpu_s: float) -> None:
        with self._lock:
            self._open.discard(name)
            phase = StartupPhase(name, wall_s, cpu_s, name in self._overlapped)
            self.phases.append(phase)
            if self.on_phase is not None:
                self.on_phase(phase)

    @property
    def wall_s(self) -> float:
        """Seconds since the report was made."""
        return time.monotonic() - self.started_s

    @property
    def cpu_s(self) -> float:
        """CPU seconds of the process since it began, all threads."""
        return time.process_time()

    @property
    def import_jax_cpu_s(self) -> float:
        return sum(phase.cpu_s for phase in self.phases if phase.name == "import jax")
