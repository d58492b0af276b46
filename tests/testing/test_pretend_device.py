"""The pretended device runs steps one after the other, and says when it had nothing to do."""

from __future__ import annotations

import pytest

from jaxllm.engine.engine import Engine
from jaxllm.engine.inputs import TokensPrompt
from jaxllm.errors import RequestError
from jaxllm.testing import pretend_device
from jaxllm.testing.pretend_device import PretendDevice
from jaxllm.types.profile import StepProfile
from jaxllm.types.sampling import SamplingParams
from tests.helpers.scripted_engine import Settings, make_parts
from tests.scheduler.driver import Driver

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


class Ticking:
    """A clock that is told the time, and that sleeping moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(pretend_device.time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(pretend_device.time, "sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_steps_run_one_after_the_other_and_idle_only_when_none_was_given_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    driver.add((1, 2, 3))
    plans = [plan for plan in (driver.plan() for _ in range(3)) if plan is not None]
    clock, device = Ticking(monkeypatch), PretendDevice(4.0)
    first, second = (device.submit(plan) for plan in plans[:2])
    device.collect(first)
    assert clock.now_s == 104.0
    device.collect(second)
    assert clock.now_s == 108.0
    clock.now_s = 109.5
    outputs = [device.collect(ticket) for ticket in (first, second, device.submit(plans[2]))]
    assert clock.now_s == 113.5
    assert [output.device_s for output in outputs] == [4.0] * 3
    assert [output.idle_s for output in outputs] == [0.0, 0.0, 1.5]


def profiles_without_overlap() -> list[StepProfile]:
    device = PretendDevice(0.001)
    with Engine(make_parts(device, Settings(async_scheduling=False), async_scheduling=False)) as engine:
        outputs = engine.generate([TokensPrompt([5, 6, 7])] * 3, [PARAMS] * 3)
        profiles = engine.step_profiles()
        assert engine.step_profiles() == []
    assert [output.num_generated_tokens for output in outputs] == [12] * 3
    assert len(profiles) == device.num_steps
    return profiles


def test_profiles_tell_prompts_from_decodes_and_account_for_the_wall_time() -> None:
    profiles = profiles_without_overlap()
    assert sum(p.num_tokens for p in profiles) == 3 * (3 + 11)
    assert not profiles[0].is_decode
    assert profiles[-1].is_decode and profiles[-1].num_requests == profiles[-1].num_tokens
    assert all(p.idle_s > 0 for p in profiles[1:]), "the device waits for the host before each step"
    for profile in profiles:
        assert min(profile.seconds) >= 0
        # One after the other, without overlap: no phase lies outside the step.
        assert profile.schedule_s + profile.dispatch_s + profile.device_s + profile.update_s <= profile.wall_s + 1e-9


def test_an_engine_without_a_device_takes_no_trace() -> None:
    with Engine(make_parts(PretendDevice(0.0))) as engine:
        with pytest.raises(RequestError, match="no device to trace"):
            engine.start_profile("anywhere")
        with pytest.raises(RequestError, match="no trace is being taken"):
            engine.stop_profile()
