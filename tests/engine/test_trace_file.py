"""The writer of traces: it holds nobody up, says why it ends early, and leaves what can be replayed."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from jaxllm.build import build_parts
from jaxllm.config.engine import CacheConfig, EngineArgs, SchedulerConfig
from jaxllm.engine.engine import Engine
from jaxllm.engine.messages import AbortRequests
from jaxllm.engine.replay import replay
from jaxllm.engine.trace import Header
from jaxllm.engine.trace_file import FileRecorder
from jaxllm.errors import ConfigError
from jaxllm.memory.plan import KVCachePlan, KVGroup
from jaxllm.memory.spec import FullKV
from jaxllm.types.sampling import SamplingParams

HEADER = Header(SchedulerConfig(), CacheConfig(), KVCachePlan((KVGroup((0,), FullKV(16, 1, 8)),), 9, 16), (2,))


def args(tmp_path: Path, trace: str, **more: Any) -> EngineArgs:
    script = tmp_path / "script.json"
    script.write_text('{"default": {"text": " one two", "repeat": true}, "max_model_len": 256}')
    return EngineArgs(executor=f"scripted:{script}", record_trace=str(tmp_path / trace), num_pages=20, **more)


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_an_engine_told_to_record_can_be_replayed(tmp_path: Path, async_scheduling: bool) -> None:
    params = [SamplingParams(max_tokens=n, stop=("two one two",) if n > 60 else ()) for n in (3, 50, 90, 20, 70)]
    with Engine(build_parts(args(tmp_path, "t.jsonl", async_scheduling=async_scheduling))) as engine:
        engine.generate([f"prompt {n}" for n in range(5)], params)
        num_steps = engine.stats().core.num_steps
    found = replay(tmp_path / "t.jsonl")
    assert found.difference is None
    assert (found.num_requests, found.ended) == (5, "closed")
    assert found.num_steps >= num_steps >= 50


def test_a_file_that_cannot_be_written_is_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"record_trace='.*none/t.jsonl' cannot be written: No such file"):
        build_parts(args(tmp_path, "none/t.jsonl"))
    with pytest.raises(ConfigError, match="cannot be written: Is a directory; accepted: a file in a folder"):
        build_parts(args(tmp_path, "."))


def test_a_full_disk_ends_the_trace_alone(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        recorder = FileRecorder(Path("/dev/full"), HEADER)
        for _ in range(100):
            recorder.cache_reset()
        recorder.close()
        recorder.close()
    assert "the trace /dev/full ends at step 0: it cannot be written" in caplog.text


def test_a_file_of_full_size_ends_with_whole_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "t.jsonl"
    recorder = FileRecorder(path, HEADER, max_bytes=3000)
    for _ in range(1000):
        recorder.cache_reset()
    recorder.close()
    assert "the file has its full size" in caplog.text
    assert path.stat().st_size <= 3000 + 100
    assert replay(path).ended == "the file has its full size"


def test_a_disk_that_is_too_slow_ends_the_trace_and_holds_nobody_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write = threading.Event()
    monkeypatch.setattr("jaxllm.engine.trace_file._line", lambda entry: may_write.wait(30) and entry)
    recorder = FileRecorder(tmp_path / "t.jsonl", HEADER, max_buffered=5)
    for number in range(50):
        recorder.aborted(AbortRequests((str(number),)))
    may_write.set()
    recorder.close()
    assert "the disk was 5 lines behind" in caplog.text
    found = replay(tmp_path / "t.jsonl")
    assert (found.ended, found.difference) == ("the disk was 5 lines behind", None)


def test_what_comes_after_the_end_is_dropped(tmp_path: Path) -> None:
    recorder = FileRecorder(tmp_path / "t.jsonl", HEADER)
    recorder.close()
    recorder.cache_reset()
    assert len((tmp_path / "t.jsonl").read_bytes().splitlines()) == 2
