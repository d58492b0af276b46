"""The default model, started once: a real engine with few pages, so that requests get into each other's way."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from jaxllm.build import build_parts
from jaxllm.config.engine import EngineArgs
from jaxllm.engine.engine import Engine
from jaxllm.engine.parts import EngineParts
from tests.helpers.tiny_engine import PROCESSORS, TinyEngine

MAX_MODEL_LEN = 1024
NUM_PAGES = 71


@dataclass(frozen=True)
class RunningModel:
    parts: EngineParts
    engine: Engine

    def wait_until_idle(self) -> None:
        """The step that was in flight when the last answer ended has yet to give its pages back."""
        deadline = time.monotonic() + 30
        while self.parts.scheduler.has_unfinished or self.parts.kv.usage > 0:
            assert time.monotonic() < deadline, "requests are left over"
            time.sleep(0.001)

    def forget_prefixes(self) -> None:
        self.wait_until_idle()
        assert self.parts.kv.reset_prefix_cache()


@pytest.fixture(scope="session")
def smollm2() -> Iterator[RunningModel]:
    args = EngineArgs(
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=16,
        max_num_batched_tokens=256,
        num_pages=NUM_PAGES,
        generation_config="vllm",
    )
    parts = build_parts(args)
    with Engine(parts) as engine:
        yield RunningModel(parts, engine)


@pytest.fixture(scope="session")
def tiny_engine() -> Iterator[TinyEngine]:
    """A tiny random Llama with room for everybody."""
    with TinyEngine(processors=PROCESSORS) as tiny:
        yield tiny
