"""Summaries of step profiles against numbers worked out by hand, and the front end's seconds taken once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from typing import Any

import pytest

from jaxllm.types.profile import PHASES, PhaseClock, ProfileSummary, StepProfile


def profile(**seconds: float) -> StepProfile:
    zeros: dict[str, Any] = {f.name: 0.0 for f in fields(StepProfile)}
    return StepProfile(**{**zeros, "num_tokens": 3, "num_requests": 3, "is_decode": True, **seconds})


def test_every_phase_has_its_seconds_in_order() -> None:
    given = {f"{name}_s": float(number) for number, name in enumerate(PHASES, 1)}
    assert profile(**given).seconds == tuple(given.values())


def test_summary_gives_mean_percentiles_and_shares_of_the_wall_time() -> None:
    steps = [profile(wall_s=0.010, device_s=ms / 1e3, sample_s=0.001) for ms in (1, 2, 3, 10)]
    summary = ProfileSummary.of(steps)
    device = next(phase for phase in summary.phases if phase.name == "device")
    assert (summary.count, summary.num_tokens, summary.wall_s) == (4, 12, pytest.approx(0.040))
    assert (device.mean_s, device.p50_s, device.p99_s) == pytest.approx((0.004, 0.002, 0.010))
    assert device.share == pytest.approx(0.4)
    assert summary.busy_share == pytest.approx(0.5)
    assert summary.rows()[1 + PHASES.index("device")] == ("device", "4.000", "2.000", "10.000", "40.0%")
    assert summary.as_dict()["phases"]["wall"]["mean_s"] == pytest.approx(0.010)


def test_no_steps_are_summed_up_as_zeros() -> None:
    summary = ProfileSummary.of([])
    assert (summary.count, summary.wall_s, summary.busy_share) == (0, 0.0, 0.0)
    assert {phase.name for phase in summary.phases} == {*PHASES, "wall", "idle"}
    assert all(phase.mean_s == phase.p99_s == phase.share == 0.0 for phase in summary.phases)


def test_seconds_of_the_front_end_are_taken_once_whoever_asks() -> None:
    clock = PhaseClock()
    clock.detokenise_s += 1.5
    assert clock.take() == (1.5, 0.0)
    clock.send_s += 0.25
    assert clock.take() == (0.0, 0.25)
    clock.detokenise_s += 64.0
    with ThreadPoolExecutor(4) as pool:
        taken = [f.result() for f in [pool.submit(clock.take) for _ in range(64)]]
    assert sum(detokenise for detokenise, _ in taken) == 64.0
