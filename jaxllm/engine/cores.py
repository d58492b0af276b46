"""The cores of an engine, seen from the front end: a thread, two mailboxes and a watchdog each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from jaxllm.engine.clock import Clock
from jaxllm.engine.core import EngineCore
from jaxllm.engine.core_thread import CoreThread
from jaxllm.engine.messages import ToCore
from jaxllm.engine.parts import CoreParts, EngineParts
from jaxllm.engine.transport import InProcessTransport, wait_for_any
from jaxllm.engine.watchdog import Heartbeat, Watchdog
from jaxllm.metrics.stats import CoreStats
from jaxllm.types.profile import PhaseClock, StepProfile

_JOIN_S = 10.0  # how long closing waits for a core that is alive
_JOIN_DEAD_S = 1.0  # and for one that failed (releasing the device) or froze (for ever)


class RunningCore:
    """One core with its thread. Mutable; owned by `Cores`."""

    def __init__(
        self,
        parts: CoreParts,
        engine: EngineParts,
        clock: Clock,
        front_ready: threading.Condition,
        phases: PhaseClock | None,
    ) -> None:
        self.transport = InProcessTransport(front_ready)
        heartbeat = Heartbeat(clock)
        core = EngineCore(
            parts.executor,
            parts.scheduler,
            parts.kv,
            clock,
            async_scheduling=engine.async_scheduling,
            heartbeat=heartbeat,
            phases=phases,
            trace=parts.trace,
            kv_events=parts.kv_events,
        )
        self.recorder = core.recorder
        self.thread = CoreThread(core, self.transport, heartbeat)
        self.watchdog = Watchdog(heartbeat, self.thread.is_alive, engine.watchdog_s)
        self.stats = core.stats()  # the latest that it sent


class Cores:
    """All cores of an engine, numbered from 0. Mutable; owned by one front end."""

    def __init__(self, parts: EngineParts, clock: Clock, phases: PhaseClock | None = None) -> None:
        """`phases`: what the front end spends, to be counted in the cores' steps."""
        first = CoreParts(
            executor=parts.executor,
            scheduler=parts.scheduler,
            kv=parts.kv,
            trace=parts.trace,
            kv_events=parts.kv_events,
        )
        self._ready = threading.Condition()
        self.all = [RunningCore(each, parts, clock, self._ready, phases) for each in (first, *parts.more_cores)]
        self._inboxes = [core.transport.to_front for core in self.all]

    @property
    def watch_interval_s(self) -> float:
        return self.all[0].watchdog.interval_s

    def start(self) -> None:
        for core in self.all:
            core.thread.start()

    def send(self, number: int, *messages: ToCore) -> None:
        self.all[number].transport.to_core.put(*messages)

    def send_all(self, message: ToCore) -> None:
        for core in self.all:
            core.transport.to_core.put(message)

    def wait(self, timeout_s: float) -> bool:
        """Sleep until a core has sent something; False after `timeout_s` seconds without."""
        return wait_for_any(self._ready, self._inboxes, timeout_s)

    def wake_with(self, on_first: Callable[[], None]) -> None:
        for inbox in self._inboxes:
            inbox.wake_with(on_first)

    def verdict(self, *, asks_again: bool) -> str | None:
        """Why the first core that counts as dead does, or None."""
        verdicts = [core.watchdog.verdict(asks_again=asks_again) for core in self.all]
        return next((verdict for verdict in verdicts if verdict is not None), None)

    def stats(self) -> CoreStats:
        return sum_stats([core.stats for core in self.all])

    def step_profiles(self) -> list[StepProfile]:
        """Steps recorded since the last call, core by core."""
        return [profile for core in self.all for profile in core.recorder.take()]

    def join(self, *, dead: bool) -> bool:
        """Wait for all to leave; False if one has not, because it is frozen."""
        deadline_s = time.monotonic() + (_JOIN_DEAD_S if dead else _JOIN_S)
        have_left = [core.thread.join(max(0.0, deadline_s - time.monotonic())) for core in self.all]
        return all(have_left)


def sum_stats(stats: Sequence[CoreStats]) -> CoreStats:
    """The cores as one: counts add up, the share of KV memory in use is that of all their pages."""
    if len(stats) == 1:
        return stats[0]
    names = [field.name for field in fields(CoreStats) if field.name != "phase_seconds"]
    sums: dict[str, Any] = {name: sum(getattr(each, name) for each in stats) for name in names}
    sums["phase_seconds"] = tuple(map(sum, zip(*(each.phase_seconds for each in stats), strict=True)))
    num_pages = sum(each.num_pages for each in stats)
    sums["kv_usage"] = sum(each.kv_usage * each.num_pages for each in stats) / num_pages if num_pages else 0.0
    return CoreStats(**sums)
