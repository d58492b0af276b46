"""A simulation's state in a file, so that one that was killed goes on where it was."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from jaxllm.errors import ConfigError
from jaxllm.sim.simulator import Run

_FORMAT = "jaxllm simulation 1"


class Resumable(Protocol):
    """A simulation that can be left and taken up again: one engine, or a fleet."""

    def start(self) -> None: ...
    def advance(self) -> bool: ...
    def dump(self) -> Any: ...
    def resume(self, dumped: Any) -> None: ...
    def finish(self) -> Run: ...


@dataclass(frozen=True, slots=True)
class _Saved:
    format: str
    config: str  # digest of what is simulated
    num_workers: int
    dumped: bytes


class Checkpoint:
    """Saves a simulation now and then. The file is this program's own: it is unpickled, so do not take one from others.

    Raises:
        ConfigError: the file cannot be read or written, or is of another simulation.
    """

    def __init__(
        self, path: str | Path, config: str, *, every_s: float = 30.0, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        """`config`: a digest of what is simulated. `every_s`: seconds of real time between two files."""
        self._path = Path(path)
        self._config = config
        self._every_s = every_s
        self._clock_s = clock_s
        self._saved_s = clock_s()

    def load(self, num_workers: int) -> Any:
        """What was dumped; None if there is no file."""
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ConfigError(f"checkpoint={str(self._path)!r} cannot be read: {error.strerror}") from None
        try:
            saved = pickle.loads(content)
            dumped = pickle.loads(saved.dumped)
        except Exception:
            saved = dumped = None
        if not isinstance(saved, _Saved) or saved.format != _FORMAT:
            raise ConfigError(f"checkpoint={str(self._path)!r} is none; accepted: a file that --checkpoint wrote")
        if (saved.config, saved.num_workers) != (self._config, num_workers):
            raise ConfigError(
                f"checkpoint={str(self._path)!r} is of another simulation or number of workers; accepted: the config, "
                f"policy, seed and --workers={saved.num_workers} that it was written with, or another file"
            )
        return dumped

    def save_if_due(self, running: Resumable, num_workers: int) -> None:
        if self._clock_s() - self._saved_s >= self._every_s:
            self.save(running, num_workers)

    def save(self, running: Resumable, num_workers: int) -> None:
        """Whole or not at all: a process that is killed meanwhile leaves the file of before."""
        content = pickle.dumps(_Saved(_FORMAT, self._config, num_workers, pickle.dumps(running.dump())))
        beside = self._path.with_name(f"{self._path.name}.{os.getpid()}.tmp")
        try:
            beside.write_bytes(content)
            beside.replace(self._path)
        except OSError as error:
            with suppress(OSError):
                beside.unlink(missing_ok=True)
            raise ConfigError(f"checkpoint={str(self._path)!r} cannot be written: {error.strerror}") from None
        self._saved_s = self._clock_s()

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


def run_with_checkpoints(running: Resumable, checkpoint: Checkpoint, *, num_workers: int = 1) -> Run:
    """Go on from the checkpoint if there is one, else begin; the file goes when the run is done."""
    dumped = checkpoint.load(num_workers)
    if dumped is None:
        running.start()
    else:
        running.resume(dumped)
    while running.advance():
        checkpoint.save_if_due(running, num_workers)
    run = running.finish()
    checkpoint.remove()
    return run
