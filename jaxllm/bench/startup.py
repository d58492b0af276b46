"""What starting costs, with and without compiled programs on disk: one process a start."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from jaxllm.bench.distribution import Distribution
from jaxllm.bench.tables import Row
from jaxllm.config.fields import check_settings, setting
from jaxllm.errors import ConfigError, JaxLLMError

_CHILD = ("-m", "jaxllm.bench.startup_child")
_LAST_LINES = 3  # of a failed child's stderr
FIGURES = ("ready_s", "first_token_s", "cpu_s", "peak_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupArgs:
    """Raises: ConfigError: a value has the wrong type or is out of range."""

    num_iters_cold: int = setting(3, "starts with an empty cache folder of their own")
    num_iters_warmup: int = setting(1, "starts that fill the cache folder; they do not count")
    num_iters_warm: int = setting(3, "starts with the filled cache folder")

    def __post_init__(self) -> None:
        check_settings(self)
        for name in ("num_iters_cold", "num_iters_warmup", "num_iters_warm"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)}; accepted: at least 0")
        if not self.num_iters_cold + self.num_iters_warm:
            raise ConfigError("num_iters_cold=0 and num_iters_warm=0 leave nothing to measure; accepted: one above 0")


@dataclass(frozen=True, slots=True)
class Start:
    """One start, as the child and the clock of its parent saw it."""

    ready_s: float  # wall, from the call that makes the process until the model is ready
    first_token_s: float  # likewise, until one token of a one-token prompt is there
    cpu_s: float  # of the child until ready, all its threads
    peak_bytes: int  # most resident memory until the first token
    phases: tuple[tuple[str, float, float], ...]  # (name, wall s, CPU s)


@dataclass(frozen=True, slots=True)
class StartupResult:
    cold: tuple[Start, ...]
    warm: tuple[Start, ...]

    def rows(self) -> list[Row]:
        rows: list[Row] = [("median (lowest to highest)", "ready, s", "first token, s", "CPU, s", "peak memory, MiB")]
        for name, starts in self._kinds():
            columns = [self.spread(starts, figure) for figure in FIGURES]
            rows.append((f"{name}, {len(starts)} starts", *map(_spread_text, columns)))
        return rows

    def phase_rows(self) -> list[Row]:
        rows: list[Row] = [("phase, median", *(f"{name}, s (CPU s)" for name, _ in self._kinds()))]
        names = dict.fromkeys(phase[0] for _, starts in self._kinds() for start in starts for phase in start.phases)
        for phase in names:
            cells = [_phase_text(starts, phase) for _, starts in self._kinds()]
            rows.append((phase, *cells))
        return rows

    def spread(self, starts: Sequence[Start], figure: str) -> Distribution:
        """Of one of `FIGURES`; memory in MiB."""
        values = [float(getattr(start, figure)) for start in starts]
        return Distribution.of(values).scaled(2.0**-20 if figure == "peak_bytes" else 1.0)

    def as_dict(self) -> dict[str, Any]:
        """vLLM's keys, and ours beside them."""
        found: dict[str, Any] = {}
        for name, starts in self._kinds():
            times = [start.ready_s for start in starts]
            found |= {f"avg_{name}_startup_time": Distribution.of(times).mean, f"{name}_startup_times": times}
            found[name] = {
                **{figure: [getattr(start, figure) for start in starts] for figure in FIGURES},
                "median": {figure: Distribution.of(getattr(s, figure) for s in starts).median for figure in FIGURES},
                "phases": [[{"name": n, "wall_s": w, "cpu_s": c} for n, w, c in start.phases] for start in starts],
            }
        return found

    def _kinds(self) -> list[tuple[str, tuple[Start, ...]]]:
        return [(name, starts) for name, starts in (("cold", self.cold), ("warm", self.warm)) if starts]


class StartFailed(JaxLLMError):
    """A child process did not start the model (exit code 1)."""


def run_startup(
    args: StartupArgs, engine_flags: Mapping[str, Any], *, progress: Callable[[str, int, int], None] | None = None
) -> StartupResult:
    """Start the model of `engine_flags` (keyword arguments of `LLM`) in processes, one after the other.

    Cold means no compiled programs; the files of model and packages stay in the system's memory.

    Raises:
        StartFailed: a start failed; the message holds what it said.
    """
    total = args.num_iters_cold + args.num_iters_warmup + args.num_iters_warm
    num_done = 0

    def start(folder: str) -> Start:
        nonlocal num_done
        made = _start(engine_flags, folder)
        num_done += 1
        if progress is not None:
            progress("starts", num_done, total)
        return made

    cold: list[Start] = []
    for _ in range(args.num_iters_cold):
        with _folder() as folder:
            cold.append(start(folder))
    with _folder() as folder:
        for _ in range(args.num_iters_warmup if args.num_iters_warm else 0):
            start(folder)
        warm = [start(folder) for _ in range(args.num_iters_warm)]
    return StartupResult(tuple(cold), tuple(warm))


@contextlib.contextmanager
def _folder() -> Generator[str]:
    with tempfile.TemporaryDirectory(prefix="jaxllm-startup-") as folder:
        yield folder


def _start(engine_flags: Mapping[str, Any], cache_folder: str) -> Start:
    flags = json.dumps({**engine_flags, "compilation_cache_dir": cache_folder})
    # Nothing that an earlier start left anywhere may help: neither our folder nor one of jax's own.
    environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    environment["JAXLLM_CACHE_DIR"] = cache_folder
    started_s = time.monotonic()
    with subprocess.Popen(
        [sys.executable, *_CHILD, flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        env=environment,
    ) as child:
        out, err = child.communicate()
    try:
        said = cast("dict[str, Any]", json.loads(out.splitlines()[-1]))
    except (ValueError, IndexError):
        last = " / ".join(err.decode(errors="replace").strip().splitlines()[-_LAST_LINES:])
        raise StartFailed(f"a start ended with exit code {child.returncode}: {last}") from None
    return Start(
        ready_s=said["ready_s"] - started_s,
        first_token_s=said["first_token_s"] - started_s,
        cpu_s=said["cpu_s"],
        peak_bytes=said["peak_bytes"],
        phases=tuple((str(name), float(wall), float(cpu)) for name, wall, cpu in said["phases"]),
    )


def _spread_text(values: Distribution) -> str:
    digits = 0 if values.median >= 100 else 2
    return f"{values.median:.{digits}f} ({values.smallest:.{digits}f} to {values.largest:.{digits}f})"


def _phase_text(starts: Sequence[Start], phase: str) -> str:
    found = [(wall, cpu) for start in starts for name, wall, cpu in start.phases if name == phase]
    if not found:
        return "-"
    walls, cpus = zip(*found, strict=True)
    return f"{Distribution.of(walls).median:.2f} ({Distribution.of(cpus).median:.2f})"
