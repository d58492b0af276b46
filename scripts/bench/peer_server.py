"""Servers as entries of a JSON file: how to start each, and how to speak to it. Nothing else is known of them.

    {"NAME": {"command": [...], "env": {...}, "url": "...", "ready": "/health", "model": "m", "extra": {...},
              "workloads": {"single": {"requests": 1, "repetitions": 2}}}}

`command` is started and stopped here; without one, `url` names a server that runs already. `extra`
goes into every request's body. `workloads` limits what a slow server is asked: only those named,
their first requests, their first repetitions. ${NAME} anywhere is a variable: PORT is a free port,
CACHE a folder of the server's own that a cold start finds empty, PYTHON this interpreter, THREADS
the number of cores and CORES their range; others, and other values, come from the command line.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from scripts.bench.stream_client import Target

_POLL_S = 0.05
_FIELDS = {"command", "env", "url", "ready", "model", "extra", "workloads"}


@dataclass(frozen=True, slots=True)
class Limit:
    requests: int | None = None  # the first so many; None: all
    repetitions: int | None = None


@dataclass(frozen=True, slots=True)
class Peer:
    name: str
    command: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    url: str = "http://127.0.0.1:${PORT}"
    ready: str = "/health"
    model: str = "m"
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    workloads: Mapping[str, Limit] | None = None  # None: all of them, whole

    def limit(self, workload: str, repetition: int) -> Limit | None:
        """How much of a workload it is asked in this repetition, counted from 0; None: nothing."""
        limit = Limit() if self.workloads is None else self.workloads.get(workload)
        if limit is None or (limit.repetitions is not None and repetition >= limit.repetitions):
            return None
        return limit

    def filled(self, variables: Mapping[str, str]) -> Peer:
        """With the variables in place.

        Raises:
            ValueError: one is not given.
        """
        values = {name: _fill(getattr(self, name), variables, self.name) for name in _FIELDS - {"workloads"}}
        return Peer(self.name, workloads=self.workloads, **values)


def load_peers(path: Path, only: list[str] | None = None) -> list[Peer]:
    """The entries of a file, those in `only` in that order.

    Raises:
        ValueError: a name is not in the file, or an entry has a field that means nothing.
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"peers={str(path)!r} is not JSON: {error}") from None
    if not isinstance(entries, dict):
        raise ValueError(f"peers={str(path)!r} holds {type(entries).__name__}; accepted: an object of entries by name")
    if only and len(set(only)) < len(only):
        raise ValueError(
            f"only={','.join(only)!r} names an entry twice; accepted: each once (copy an entry to compare it)"
        )
    missing = [name for name in only or () if name not in entries]
    if missing:
        raise ValueError(f"{path} has no entries {missing}; accepted: {', '.join(entries)}")
    return [_peer(name, entries[name]) for name in only or entries]


def _peer(name: str, entry: dict[str, Any]) -> Peer:
    if not isinstance(entry, dict) or not isinstance(entry.get("command", []), list):
        raise ValueError(f"entry {name!r} is {entry!r:.80}; accepted: an object, its command a list of texts")
    unknown = set(entry) - _FIELDS
    if unknown or not ("command" in entry or "url" in entry):
        raise ValueError(f"entry {name!r} has {sorted(entry)}; accepted: {sorted(_FIELDS)}, one of command and url")
    limits = entry.get("workloads")
    values = {**entry, "command": tuple(entry.get("command", ()))}
    values["workloads"] = None if limits is None else {w: Limit(**limit) for w, limit in limits.items()}
    return Peer(name, **values)


def _fill(value: Any, variables: Mapping[str, str], name: str) -> Any:
    if isinstance(value, str):
        missing = [found for found in re.findall(r"\$\{(\w+)\}", value) if found not in variables]
        if missing:
            raise ValueError(f"entry {name!r} uses ${{{missing[0]}}}, which is not set; give --set {missing[0]}=VALUE")
        return re.sub(r"\$\{(\w+)\}", lambda match: variables[match[1]], value)
    if isinstance(value, Mapping):
        return {key: _fill(each, variables, name) for key, each in value.items()}
    return tuple(_fill(each, variables, name) for each in value) if isinstance(value, list | tuple) else value


class PeerServer:
    """A running server; mutable, owned by the comparison. `process` None: somebody else started it."""

    def __init__(self, peer: Peer, variables: Mapping[str, str], log: Path) -> None:
        self.name = peer.name
        self.peer = peer.filled({"PORT": str(_free_port()), **variables})
        self.target = Target(self.peer.url.rstrip("/"), self.peer.model, self.peer.extra)
        self.process: subprocess.Popen[bytes] | None = None
        self._log = log

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process else None

    def start(self, timeout_s: float) -> float:
        """Start it where it has a command; seconds until it was ready.

        Raises:
            RuntimeError: it ended, or was not ready in time; with the end of its log.
        """
        start_s = time.perf_counter()
        if self.peer.command:
            with self._log.open("wb") as log:
                self.process = subprocess.Popen(
                    self.peer.command,
                    env={**os.environ, **self.peer.env},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        while not self._answers():
            waited_s = time.perf_counter() - start_s
            if waited_s > timeout_s or (self.process and self.process.poll() is not None):
                self.stop()
                raise RuntimeError(f"{self.name} was not ready after {waited_s:.0f} s; {self._said()}")
            time.sleep(_POLL_S)
        return time.perf_counter() - start_s

    def stop(self) -> None:
        """End the process that `start` made, and what is left of its group."""
        process, self.process = self.process, None
        if process is None:
            return
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def _answers(self) -> bool:
        url = urlsplit(self.target.url)
        connection = http.client.HTTPConnection(url.hostname or "", url.port or 80, timeout=10)
        try:
            connection.request("GET", self.peer.ready)
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _said(self) -> str:
        text = self._log.read_text(errors="replace")[-1500:] if self._log.exists() else ""
        return f"the end of {self._log}:\n{text}" if text else f"nothing answers at {self.target.url}{self.peer.ready}"


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]
