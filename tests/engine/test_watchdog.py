"""The watchdog: a frozen core is told from a process that stood still as a whole."""

from __future__ import annotations

import pytest

from jaxllm.engine.clock import ManualClock
from jaxllm.engine.watchdog import Heartbeat, Watchdog

LIMIT_S = 8.0


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(100.0)


def _watch_for(clock: ManualClock, watchdog: Watchdog, seconds: float) -> str | None:
    """Ask as often as promised, like the front end."""
    verdict = watchdog.verdict(asks_again=True)
    end_s = clock.now_s() + seconds
    while verdict is None and clock.now_s() < end_s:
        clock.advance(watchdog.interval_s)
        verdict = watchdog.verdict(asks_again=True)
    return verdict


def test_hlt_01_a_step_beyond_the_limit_is_a_freeze(clock: ManualClock) -> None:
    heartbeat = Heartbeat(clock)
    watchdog = Watchdog(heartbeat, lambda: True, LIMIT_S)
    heartbeat.beat()
    assert _watch_for(clock, watchdog, LIMIT_S) is None
    assert "frozen" in (_watch_for(clock, watchdog, 2 * watchdog.interval_s) or "")


def test_a_core_at_rest_may_be_silent(clock: ManualClock) -> None:
    heartbeat = Heartbeat(clock)
    heartbeat.beat()
    heartbeat.rest()
    clock.advance(1000)
    assert Watchdog(heartbeat, lambda: True, LIMIT_S).verdict() is None


def test_a_thread_that_died_is_told_apart(clock: ManualClock) -> None:
    assert Watchdog(Heartbeat(clock), lambda: False, LIMIT_S).verdict() == "the engine thread died"


def test_a_process_that_stood_still_is_not_frozen_but_may_be_later(clock: ManualClock) -> None:
    heartbeat = Heartbeat(clock)
    watchdog = Watchdog(heartbeat, lambda: True, LIMIT_S)
    heartbeat.beat()
    watchdog.verdict(asks_again=True)
    clock.advance(1000)
    assert watchdog.verdict(asks_again=True) is None
    assert _watch_for(clock, watchdog, LIMIT_S - 1) is None
    assert "frozen" in (_watch_for(clock, watchdog, 3) or "")


def test_without_a_promise_a_long_silence_is_a_freeze(clock: ManualClock) -> None:
    """Nobody asked meanwhile, since no request was open."""
    heartbeat = Heartbeat(clock)
    watchdog = Watchdog(heartbeat, lambda: True, LIMIT_S)
    heartbeat.beat()
    watchdog.verdict(asks_again=False)
    clock.advance(LIMIT_S + 1)
    assert "frozen" in (watchdog.verdict() or "")
