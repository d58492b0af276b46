"""Writes a trace while the engine runs, and never holds it up; reads it again."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from jaxllm.engine.messages import AbortRequests, AddRequest
from jaxllm.engine.trace import FORMAT, Aborted, Arrived, CacheReset, Collected, Decision, Ended, Header, Line, Planned
from jaxllm.errors import ConfigError, JaxLLMError
from jaxllm.types.step import SchedulerOutput, StepOutput

_log = logging.getLogger("jaxllm.engine")

MAX_BYTES = 8 * 2**30
_MAX_BUFFERED = 20_000  # lines that the disk may be behind
_JOIN_S = 30.0  # how long closing waits for the disk

_Entry = Line | tuple[SchedulerOutput, float] | StepOutput


def check_writable(path: Path) -> None:
    """Changes nothing in a file that is there.

    Raises:
        ConfigError: no trace can be written there.
    """
    _open(path, "ab").close()


def read_trace(path: str | Path) -> tuple[Header, Iterator[tuple[int, Line]]]:
    """The beginning of a trace, and the lines after it with their numbers, read as they are asked for.

    A last line without its end is that of an engine that was killed: it is left out.

    Raises:
        ConfigError: the file cannot be read, or is no trace; also while the lines are read.
    """
    path = Path(path).expanduser()
    lines = _read(path)
    _, header = next(lines, (1, None))
    if not isinstance(header, Header) or header.format != FORMAT:
        raise ConfigError(f"trace {str(path)!r}, line 1: no header of format {FORMAT}; accepted: {_ACCEPTED}")
    return header, lines


def _read(path: Path) -> Iterator[tuple[int, Line]]:
    try:
        with path.open("rb") as file:
            for number, text in enumerate(file, 1):
                if text.endswith(b"\n"):
                    yield number, _decoded(text, path, number)
    except OSError as error:
        raise ConfigError(f"trace {str(path)!r} cannot be read: {error.strerror}; accepted: {_ACCEPTED}") from None


def _decoded(text: bytes, path: Path, number: int) -> Line:
    try:
        return _DECODER.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, JaxLLMError) as error:
        raise ConfigError(f"trace {str(path)!r}, line {number}: {error}; accepted: {_ACCEPTED}") from None


_ACCEPTED = "a file of --record-trace"
_DECODER = msgspec.json.Decoder(Line)


class FileRecorder:
    """A `TraceRecorder` that writes a file from a thread of its own. Mutable; told by one core's thread.

    If the disk falls too far behind or fails, or the file gets too large, the trace ends there, which
    is logged; what was written can be replayed all the same.
    """

    def __init__(
        self, path: Path, header: Header, *, max_bytes: int = MAX_BYTES, max_buffered: int = _MAX_BUFFERED
    ) -> None:
        """What the file held is lost.

        Raises:
            ConfigError: it cannot be written.
        """
        self._file = _open(path, "wb")
        self._path = path
        self._bytes_left = max_bytes
        self._entries: queue.Queue[_Entry | None] = queue.Queue(max_buffered)
        self._next_step = 0
        self._is_open = True  # False: no entry is taken any more
        self._reason = "closed"
        self._put(header)
        self._thread = threading.Thread(target=self._run, name="jaxllm-trace", daemon=True)
        self._thread.start()

    def arrived(self, message: AddRequest) -> None:
        self._put(Arrived(self._next_step, message))

    def aborted(self, message: AbortRequests) -> None:
        self._put(Aborted(self._next_step, message.request_ids))

    def cache_reset(self) -> None:
        self._put(CacheReset(self._next_step))

    def planned(self, plan: SchedulerOutput | None, now_s: float) -> None:
        if plan is None:
            self._put(Planned(now_s))
        else:
            self._next_step = plan.step_id + 1
            self._put((plan, now_s))

    def collected(self, output: StepOutput) -> None:
        self._put(output)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            with contextlib.suppress(queue.Full):  # then the thread looks by itself once it has caught up
                self._entries.put_nowait(None)
        self._thread.join(_JOIN_S)

    def _put(self, entry: _Entry) -> None:
        if not self._is_open:
            return
        try:
            self._entries.put_nowait(entry)
        except queue.Full:
            self._cut(f"the disk was {self._entries.maxsize} lines behind")

    def _cut(self, reason: str) -> None:
        self._reason = reason
        self._is_open = False
        _log.error("the trace %s ends at step %d: %s", self._path, self._next_step, reason)

    # The thread

    def _run(self) -> None:
        try:
            with self._file:
                self._write_entries()
                self._file.write(_encoded(Ended(self._reason)))
        except (OSError, ValueError, TypeError) as error:  # of the disk, or of what no JSON says
            self._cut(f"it cannot be written: {error}")

    def _write_entries(self) -> None:
        while self._is_open or not self._entries.empty():
            entry = self._entries.get()
            if entry is None:
                continue
            line = _encoded(_line(entry))
            self._bytes_left -= len(line)
            if self._bytes_left < 0:
                self._cut("the file has its full size")
                return
            self._file.write(line)
            if self._entries.empty():
                self._file.flush()  # an engine that is killed leaves its last steps


def _open(path: Path, mode: str) -> BinaryIO:
    try:
        return path.open(mode)  # pyright: ignore[reportReturnType]
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(
            f"record_trace={str(path)!r} cannot be written: {reason}; accepted: a file in a folder that exists"
        ) from None


def _line(entry: _Entry) -> Line:
    if isinstance(entry, StepOutput):
        return Collected.of(entry)
    if isinstance(entry, tuple):
        plan, now_s = entry
        decision = Decision.of(plan)
        return Planned(now_s, decision.hash, decision)
    return entry


def _encoded(line: Line) -> bytes:
    return msgspec.json.encode(line) + b"\n"
