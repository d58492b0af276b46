"""What the core says of each step's time, and that nothing is counted twice."""

from __future__ import annotations

import numpy as np
import pytest

from jaxllm.engine import step_recorder
from jaxllm.engine.cores import sum_stats
from jaxllm.engine.step_recorder import StepRecorder, StepTimes
from jaxllm.metrics.stats import CoreStats
from jaxllm.types.profile import PHASES, PhaseClock
from jaxllm.types.step import ScheduledRows, StepOutput

NO_ROWS = ScheduledRows((), np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, bool), 0)


class Ticking:
    """A clock that is told the time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr(step_recorder.time, "perf_counter", lambda: self.now_s)

    def record(self, recorder: StepRecorder, start_s: float, end_s: float, **output: float) -> None:
        """Planned for 1 s from `start_s`, submitted for 3, of them 2 to pack, collected 1 s before the end."""
        self.now_s = end_s
        times = StepTimes(start_s, start_s + 1.0, start_s + 4.0, 2.0, end_s - 1.0)
        recorder.record(NO_ROWS, 7, StepOutput(0, {}, **output), times)


def test_each_phase_gets_its_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    phases = PhaseClock()
    recorder = StepRecorder(phases)
    phases.detokenise_s, phases.send_s = 0.5, 0.25
    Ticking(monkeypatch).record(recorder, 10.0, 20.0, device_s=4.0, sample_s=0.75, copy_back_s=0.125)
    (profile,) = recorder.take()
    expected = (1.0, 2.0, 1.0, 4.0, 0.125, 0.75, 1.0, 0.5, 0.25)
    assert profile.seconds == recorder.phase_seconds == expected
    assert (profile.num_tokens, profile.wall_s) == (7, 10.0)


def test_steps_follow_each_other_unless_the_core_rested(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, clock = StepRecorder(), Ticking(monkeypatch)
    clock.record(recorder, 0.0, 10.0, idle_s=100.0)
    clock.record(recorder, 5.0, 14.0, idle_s=3.0)  # planned while the first ran
    recorder.rest()
    clock.record(recorder, 114.0, 120.0, idle_s=100.0)
    profiles = recorder.take()
    assert [p.wall_s for p in profiles] == [10.0, 4.0, 6.0]
    assert [p.idle_s for p in profiles] == [0.0, 3.0, 0.0]


def test_sums_go_on_when_old_steps_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_recorder, "MAX_KEPT", 4)
    recorder, clock = StepRecorder(), Ticking(monkeypatch)
    for number in range(6):
        clock.record(recorder, 10.0 * number, 10.0 * number + 10.0, device_s=1.0)
    assert len(recorder.take()) == 4
    assert recorder.take() == []
    assert recorder.phase_seconds[PHASES.index("device")] == 6.0


def test_sums_of_several_cores_add_up_by_phase() -> None:
    cores = [CoreStats(num_steps=2, phase_seconds=tuple(range(i, i + len(PHASES)))) for i in (0, 10)]
    total = sum_stats(cores)
    assert total.num_steps == 4
    assert total.phase_seconds == tuple(range(10, 10 + 2 * len(PHASES), 2))
