"""Where each step's time went: the last few thousand steps one by one, and sums over all."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from jaxllm.types.profile import PHASES, PhaseClock, StepProfile
from jaxllm.types.step import ScheduledRows, StepOutput

MAX_KEPT = 8192  # steps; older ones are forgotten, though not in the sums


@dataclass(slots=True)
class StepTimes:
    """A step on its way. Moments are those of `time.perf_counter`."""

    started_s: float  # planning began
    planned_s: float
    dispatched_s: float
    build_s: float  # of the time between the two, as the executor says
    collected_s: float = 0.0


class StepRecorder:
    """Always on, since a step costs it about 3 µs. Mutable; owned by the core's thread.

    Other threads may `take` what is kept: whatever they take is theirs alone.
    """

    def __init__(self, phases: PhaseClock | None = None) -> None:
        self._phases = phases or PhaseClock()
        self._kept: deque[tuple[int, int, bool, tuple[float, ...]]] = deque(maxlen=MAX_KEPT)
        self._sums = [0.0] * len(PHASES)
        self._ended_s: float | None = None  # when the step before was taken in; None after a rest

    @property
    def phase_seconds(self) -> tuple[float, ...]:
        """Sums over all steps, in the order of `PHASES`."""
        return tuple(self._sums)

    def rest(self) -> None:
        """There is nothing to do: what passes until the next step begins belongs to none."""
        self._ended_s = None

    def record(self, rows: ScheduledRows, num_tokens: int, output: StepOutput, times: StepTimes) -> None:
        """A step has been taken in just now."""
        ended_s = time.perf_counter()
        is_first = self._ended_s is None
        before_s = times.started_s if self._ended_s is None else self._ended_s
        self._ended_s = ended_s
        detokenise_s, send_s = self._phases.take()
        seconds = (
            times.planned_s - times.started_s,
            times.build_s,
            times.dispatched_s - times.planned_s - times.build_s,
            output.device_s,
            output.copy_back_s,
            output.sample_s,
            ended_s - times.collected_s,
            detokenise_s,
            send_s,
        )
        sums = self._sums
        for phase, value in enumerate(seconds):
            sums[phase] += value
        more = (ended_s - before_s, 0.0 if is_first else output.idle_s)
        self._kept.append((num_tokens, rows.num_rows, rows.num_decode == rows.num_rows, more + seconds))

    def take(self) -> list[StepProfile]:
        """The steps recorded since the last call, oldest first, as far as they are kept."""
        profiles: list[StepProfile] = []
        while self._kept:
            num_tokens, num_rows, is_decode, seconds = self._kept.popleft()
            profiles.append(StepProfile(num_tokens, num_rows, is_decode, *seconds))
        return profiles
