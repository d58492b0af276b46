"""Traces of the device on demand."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from jaxllm.errors import RequestError


class Profiler(Protocol):
    """Takes one trace at a time. Its methods may be called from any thread."""

    def start(self, folder: str | Path) -> None:
        """Raises: RequestError: one is being taken, or the folder cannot be made."""
        ...

    def stop(self) -> Path:
        """Write the trace; returns its folder. Raises: RequestError: none is being taken, or it cannot be written."""
        ...


class NoProfiler:
    """For executors without a device to look at."""

    def start(self, folder: str | Path) -> None:
        raise RequestError("this engine has no device to trace; accepted: an engine that runs a model", param="folder")

    def stop(self) -> Path:
        raise RequestError("no trace is being taken; accepted: after start_profile", param="folder")
