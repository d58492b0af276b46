from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from jaxllm.runner.runner import Runner
from jaxllm.runner.start import StartOptions
from tests.runner.drive import start_oracle


@pytest.fixture(scope="session")
def compile_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One compilation cache for all: most Runners of these tests share programs."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="session")
def start(compile_cache: Path) -> Callable[..., Runner]:
    """`start_oracle` through the shared compilation cache."""
    return partial(start_oracle, options=StartOptions(cache_dir=compile_cache))


@pytest.fixture(scope="module")
def shared_runner(start: Callable[..., Runner]) -> Iterator[Runner]:
    runner = start()
    yield runner
    runner.close()


@pytest.fixture
def runner(shared_runner: Runner) -> Iterator[Runner]:
    """A Runner that other tests use too; nothing a test does may make it compile."""
    yield shared_runner
    assert shared_runner.compilations_after_ready == 0
