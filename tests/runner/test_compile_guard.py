from __future__ import annotations

import logging
import threading

import jax
import numpy as np
import pytest

from jaxllm.runner.compile_guard import CompileGuard


def compile_something(size: int) -> None:
    jax.jit(lambda x: x * 3 + size)(np.arange(size, dtype=np.int32)).block_until_ready()


@pytest.fixture
def guard():
    guard = CompileGuard()
    guard.arm()
    yield guard
    guard.disarm()


def test_a_compilation_in_watched_code_is_counted_and_logged(
    guard: CompileGuard, caplog: pytest.LogCaptureFixture
) -> None:
    with guard.watching("submit"):
        compile_something(11)
    assert guard.num_compilations == 1
    (record,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert "compiled after ready, in submit" in record.getMessage()


def test_running_what_is_compiled_already_is_not_counted(guard: CompileGuard) -> None:
    program = jax.jit(lambda x: x * 5)
    program(np.arange(13, dtype=np.int32))
    with guard.watching():
        program(np.arange(13, dtype=np.int32)).block_until_ready()
    assert guard.num_compilations == 0


def test_compilations_elsewhere_in_the_process_are_not_counted(guard: CompileGuard) -> None:
    compile_something(17)
    with guard.watching():
        other = threading.Thread(target=compile_something, args=(19,))
        other.start()
        other.join()
    assert guard.num_compilations == 0


def test_nothing_is_counted_before_arming_or_after_disarming() -> None:
    guard = CompileGuard()
    with guard.watching():
        compile_something(23)
    guard.arm()
    guard.arm()
    guard.disarm()
    guard.disarm()
    with guard.watching():
        compile_something(29)
    assert guard.num_compilations == 0
