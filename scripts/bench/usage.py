"""What processes took of the machine: CPU seconds and memory of a server with all of its children, and of the rest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Clocks:
    """CPU seconds since boot or start: of a server (None without a process), and of the whole machine."""

    server_s: float | None
    busy_s: float  # by all processes
    stolen_s: float  # by other guests of the host, if it tells

    @staticmethod
    def read(pid: int | None) -> Clocks:
        times = psutil.cpu_times()
        stolen_s = getattr(times, "steal", 0.0)
        busy_s = sum(times[:8]) - times.idle - getattr(times, "iowait", 0.0) - stolen_s
        return Clocks(None if pid is None else cpu_s(pid), busy_s, stolen_s)


def tree(pid: int) -> list[psutil.Process]:
    """The process and all that it started and that still runs."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def cpu_s(pid: int) -> float:
    """User and system seconds of the tree, those of children that ended included."""
    total = 0.0
    for process in tree(pid):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def peak_rss_mib(pid: int) -> float:
    """Sum of the largest resident size of each process of the tree; what they share counts for each."""
    return sum(_status_kib(process.pid, "status", "VmHWM:") for process in tree(pid)) / 1024


def pss_mib(pid: int) -> float:
    """Memory now, shared pages divided among those who share them. Reading it walks the pages: not while timing."""
    return sum(_status_kib(process.pid, "smaps_rollup", "Pss:") for process in tree(pid)) / 1024


def _status_kib(pid: int, name: str, key: str) -> int:
    try:
        return next((int(line.split()[1]) for line in _lines(pid, name) if line.startswith(key)), 0)
    except (OSError, ValueError):  # it ended, or belongs to someone else
        return 0


def _lines(pid: int, name: str) -> Iterator[str]:
    with Path(f"/proc/{pid}/{name}").open() as file:
        yield from file
