"""Traces of the device, for TensorBoard or Perfetto, through jax's own profiler."""

from __future__ import annotations

import threading
from pathlib import Path

import jax

from jaxllm.errors import RequestError, shown


class JaxProfiler:
    """Implements `Profiler`. jax takes one trace a process. Mutable; its methods may be called from any thread."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._lock = threading.Lock()

    def start(self, folder: str | Path) -> None:
        given: object = folder
        if not isinstance(given, (str, Path)) or not str(given):
            raise RequestError(f"folder={shown(given)}; accepted: a path", param="folder")
        path = Path(given).expanduser()
        with self._lock:
            if self._folder is not None:
                raise RequestError(
                    f"a trace is being taken into {self._folder}; accepted: start_profile after stop_profile",
                    param="folder",
                )
            try:
                path.mkdir(parents=True, exist_ok=True)
                jax.profiler.start_trace(str(path))
            except (OSError, RuntimeError, ValueError) as error:  # also where the process is traced by somebody else
                raise RequestError(f"folder={str(path)!r}: no trace can be taken: {error}", param="folder") from error
            self._folder = path

    def stop(self) -> Path:
        with self._lock:
            if self._folder is None:
                raise RequestError("no trace is being taken; accepted: after start_profile", param="folder")
            folder, self._folder = self._folder, None
            try:
                jax.profiler.stop_trace()
            except (OSError, RuntimeError) as error:
                raise RequestError(f"the trace in {folder} cannot be written: {error}", param="folder") from error
            return folder
