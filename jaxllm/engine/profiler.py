"""Traces of the device on demand."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from jaxllm.errors import RequestError
from jaxllm.types.profile import StepProfile

if TYPE_CHECKING:
    from jaxllm.engine.front_end import FrontEnd


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


class Profiled:
    """What both engines show of where their time goes."""

    _front: FrontEnd
    _profiler: Profiler

    def step_profiles(self) -> list[StepProfile]:
        """Where the time of each step since the last call went; the last 8,192 of each device are kept."""
        return self._front.step_profiles()

    def start_profile(self, folder: str | Path) -> None:
        """Begin a trace of the device and of Python, to be written under `folder`.

        Raises:
            RequestError: one is being taken already, this engine has no device, or the folder cannot be made.
        """
        self._profiler.start(folder)

    def stop_profile(self) -> Path:
        """End the trace and write it; returns its folder.

        Raises:
            RequestError: none is being taken, or it cannot be written.
        """
        return self._profiler.stop()
