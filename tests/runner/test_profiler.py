"""Traces of the device end up where they were asked for, one at a time."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import pytest

from jaxllm.errors import RequestError
from jaxllm.runner.profiler import JaxProfiler


def test_a_trace_is_written_and_another_may_follow(tmp_path: Path) -> None:
    profiler = JaxProfiler()
    for name in ("one", "two"):
        profiler.start(tmp_path / name)
        with pytest.raises(RequestError, match=r"a trace is being taken into .*accepted: start_profile after stop"):
            profiler.start(tmp_path / "other")
        jnp.zeros(3).block_until_ready()
        assert profiler.stop() == tmp_path / name
        assert list((tmp_path / name).rglob("*.xplane.pb"))
    with pytest.raises(RequestError, match="no trace is being taken"):
        profiler.stop()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    profiler = JaxProfiler()
    with pytest.raises(RequestError, match=r"file/inside.*no trace can be taken"):
        profiler.start(tmp_path / "file" / "inside")
    with pytest.raises(RequestError, match="folder=3; accepted: a path"):
        profiler.start(3)  # type: ignore[arg-type]
