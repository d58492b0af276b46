"""What start-up says on the terminal: a line a phase, the memory plan, progress."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TextIO

from jaxllm.types.startup import StartupPhase, StartupReport


def printing_report(stream: TextIO | None = None) -> StartupReport:
    """A report that prints each phase when it ends."""
    out = stream or sys.stderr

    def show(phase: StartupPhase) -> None:
        note = "  (beside another phase; CPU of both)" if phase.overlaps else ""
        print(f"{phase.name:<18}{phase.wall_s:8.2f} s {phase.cpu_s:8.2f} CPU-s{note}", file=out, flush=True)

    return StartupReport(show)


def print_summary(report: StartupReport, stream: TextIO | None = None) -> None:
    """The memory plan as a table, and what all of it took."""
    out = stream or sys.stderr
    width = max((len(name) for name, _ in report.plan_rows), default=0)
    for name, amount in report.plan_rows:
        print(f"  {name:<{width}}  {amount}", file=out)
    beyond = report.cpu_s - report.import_jax_cpu_s
    print(
        f"{'start-up':<18}{report.wall_s:8.2f} s {report.cpu_s:8.2f} CPU-s ({beyond:.2f} beyond importing jax), "
        f"peak memory {peak_rss_bytes() / 2**20:,.0f} MiB",
        file=out,
        flush=True,
    )


def peak_rss_bytes() -> int:
    """The most memory this process has had, bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@contextmanager
def progress_bars() -> Generator[Callable[[str, int, int], None]]:
    """A callback (what, done, total) that draws a bar for each `what` on stderr, where that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn as Bar
    from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), Bar(), MofNCompleteColumn(), TimeElapsedColumn())
    tasks: dict[str, int] = {}
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:

        def advance(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=total)
            progress.update(tasks[what], completed=done, total=total)  # pyright: ignore[reportArgumentType]

        yield advance
