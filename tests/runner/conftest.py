from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest

from jaxllm.runner.runner import Runner
from jaxllm.runner.start import StartOptions
from tests.runner.drive import start_oracle


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Runner]:
    """`start_oracle` through one compilation cache: most of these Runners share their programs."""
    return partial(start_oracle, options=StartOptions(cache_dir=tmp_path_factory.mktemp("compiled")))


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
