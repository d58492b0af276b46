"""Signals before the server is ready: the process leaves at once, whatever the loading thread is in."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Generator

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_SHOW_CURSOR = "\x1b[?25h"  # a progress bar may have hidden it


@contextlib.contextmanager
def leaving_at_signals(clean_up: Callable[[], None]) -> Generator[None]:
    """While the block runs, SIGTERM and SIGINT end the process with 128 + their number and one line.

    Python's own handlers run in the main thread alone, and not before it comes back from whatever
    library it is in: loading spends minutes in the compiler. So the byte that the interpreter writes
    for each signal wakes a thread. Afterwards the handlers stay until others take their place, so that
    no moment is without. Call in the main thread.
    """
    leave = _Leave(clean_up)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        for number in _SIGNALS:
            signal.signal(number, lambda number, _frame: leave(number))
        watcher = threading.Thread(target=_watch, args=(ours, leave), name="jaxllm-signals", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            theirs.shutdown(socket.SHUT_WR)  # the watcher reads the end and returns
            watcher.join()


class _Leave:
    """Ends the process; of the threads that call it, the first."""

    def __init__(self, clean_up: Callable[[], None]) -> None:
        self._clean_up = clean_up
        self._first = threading.Lock()

    def __call__(self, number: int) -> None:
        if not self._first.acquire(blocking=False):
            return
        with contextlib.suppress(Exception):
            self._clean_up()
        cursor = _SHOW_CURSOR if sys.stderr.isatty() else ""
        line = f"{cursor}jaxllm: stopped by {signal.Signals(number).name} before the server was ready\n"
        with contextlib.suppress(OSError):
            os.write(2, line.encode())  # not through sys.stderr: the main thread may hold its lock
        os._exit(128 + number)


def _watch(numbers: socket.socket, leave: _Leave) -> None:
    while received := numbers.recv(1):
        if received[0] in _SIGNALS:
            leave(received[0])
