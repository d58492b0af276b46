"""Traces on demand: routes only where a folder is named, behind the keys, with the engine's own errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from jaxllm.config.engine import ServerConfig
from jaxllm.errors import ConfigError, RequestError
from tests.helpers.scripted_engine import scripted
from tests.server.harness import running


class FolderProfiler:
    """Implements `Profiler`: a trace is one file that says it was taken."""

    def __init__(self) -> None:
        self.folder: Path | None = None

    def start(self, folder: str | Path) -> None:
        if self.folder is not None:
            raise RequestError("a trace is being taken", param="folder")
        self.folder = Path(folder)

    def stop(self) -> Path:
        if self.folder is None:
            raise RequestError("no trace is being taken", param="folder")
        folder, self.folder = self.folder, None
        (folder / "trace").write_text("taken")
        return folder


def message(reply: httpx.Response) -> Any:
    return reply.status_code, reply.json()["error"]["message"]


def test_a_trace_is_written_into_the_servers_folder(tmp_path: Path) -> None:
    with running(scripted(), parts={"profiler": FolderProfiler()}, profiler_dir=str(tmp_path)) as served:
        assert message(served.post("/stop_profile", {})) == (400, "no trace is being taken")
        assert served.post("/start_profile", {}).json() == {"status": "started", "profiler_dir": str(tmp_path)}
        assert message(served.post("/start_profile", {})) == (400, "a trace is being taken")
        assert served.chat().status_code == 200
        assert served.post("/stop_profile", {}).json() == {"status": "stopped", "profiler_dir": str(tmp_path)}
        assert (tmp_path / "trace").read_text() == "taken"
        assert "/start_profile" in served.get("/").json()["routes"]


def test_an_engine_without_a_device_says_so(tmp_path: Path) -> None:
    with running(scripted(), profiler_dir=str(tmp_path)) as served:
        status, text = message(served.post("/start_profile", {}))
        assert status == 400 and "no device to trace" in text


def test_there_are_no_such_routes_by_default_and_keys_guard_them(tmp_path: Path) -> None:
    with running(scripted()) as served:
        assert served.post("/start_profile", {}).status_code == served.post("/stop_profile", {}).status_code == 404
    with running(scripted(), profiler_dir=str(tmp_path), api_keys=("k",)) as served:
        assert served.post("/start_profile", {}).status_code == 401
    with pytest.raises(ConfigError, match=r"profiler_dir=''.*accepted"):
        ServerConfig(profiler_dir="")
