"""Results as pictures. matplotlib is imported here alone, and when one is asked for."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxllm.bench.latency import LatencyResult
from jaxllm.bench.scheduler import SchedulerResult
from jaxllm.bench.serve_result import ServeResult
from jaxllm.bench.startup import FIGURES, StartupResult
from jaxllm.bench.throughput import ThroughputResult
from jaxllm.errors import ConfigError

SUFFIXES = (".png", ".svg", ".pdf")
_STARTUP_LABELS = {
    "ready_s": "ready, s",
    "first_token_s": "first token, s",
    "cpu_s": "CPU, s",
    "peak_bytes": "peak memory, MiB",
}


def check_plot(path: Path) -> None:
    """Raises: ConfigError: no picture could be written there."""
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"plot={str(path)!r}; accepted: a name that ends in {', '.join(SUFFIXES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("plot needs matplotlib; install jaxllm[bench]")


def plot_latency(result: LatencyResult, path: Path) -> None:
    figure, (axes,) = _figure(1)
    _cumulative(axes, {"wall": result.latencies_s, "CPU": result.cpu_s}, "seconds a batch")
    _save(figure, path)


def plot_throughput(result: ThroughputResult, path: Path) -> None:
    """Output tokens of the requests that have ended, over time."""
    figure, (axes,) = _figure(1)
    times, totals, total = [0.0], [0], 0
    for at_s, num_tokens in result.finished:
        total += num_tokens
        times.append(at_s)
        totals.append(total)
    axes.step(times, totals, where="post")
    axes.set(xlabel="seconds", ylabel="output tokens of finished requests", ylim=(0, None))
    _save(figure, path)


def plot_serve(result: ServeResult, path: Path) -> None:
    """Which share of requests (of gaps, for ITL) is at most so slow."""
    done = [answer for answer in result.answers if answer.error is None]
    values = {
        "TTFT": [answer.ttft_s * 1e3 for answer in done],
        "TPOT": [answer.tpot_s * 1e3 for answer in done if answer.tpot_s is not None],
        "ITL": [gap * 1e3 for answer in done for gap in answer.itl_s],
        "E2EL": [answer.e2el_s * 1e3 for answer in done],
    }
    figure, panels = _figure(len(values))
    for axes, (name, each) in zip(panels, values.items(), strict=True):
        _cumulative(axes, {name: each}, f"{name}, ms")
    _save(figure, path)


def plot_startup(result: StartupResult, path: Path) -> None:
    """Medians as bars, single starts as points."""
    kinds = {name: starts for name, starts in (("cold", result.cold), ("warm", result.warm)) if starts}
    figure, panels = _figure(len(FIGURES))
    for axes, name in zip(panels, FIGURES, strict=True):
        scale = 2.0**-20 if name == "peak_bytes" else 1.0
        for place, (kind, starts) in enumerate(kinds.items()):
            axes.bar(place, result.spread(starts, name).median, label=kind, alpha=0.5)
            axes.plot([place] * len(starts), [getattr(start, name) * scale for start in starts], "k.")
        axes.set(ylabel=_STARTUP_LABELS[name], xticks=range(len(kinds)), xticklabels=list(kinds))
    _save(figure, path)


def plot_scheduler(result: SchedulerResult, path: Path) -> None:
    """CPU time of a step by running requests, with the spread over measurements."""
    figure, (axes,) = _figure(1)
    counts = [cost.num_requests for cost in result.costs]
    for name in ("schedule_us", "update_us", "total_us"):
        spreads = [getattr(cost, name) for cost in result.costs]
        medians = [spread.median for spread in spreads]
        below = [spread.median - spread.low for spread in spreads]
        above = [spread.high - spread.median for spread in spreads]
        axes.errorbar(counts, medians, yerr=[below, above], marker="o", capsize=3, label=name.removesuffix("_us"))
    axes.set(xlabel="running requests", ylabel="CPU us a step", xscale="log", yscale="log")
    axes.legend()
    _save(figure, path)


def _figure(num_panels: int) -> tuple[Any, list[Any]]:
    """Made without pyplot: no window, no state of the process."""
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(4.5 * num_panels, 4), layout="constrained")
    return figure, list(figure.subplots(1, num_panels, squeeze=False)[0])


def _cumulative(axes: Any, series: Mapping[str, Sequence[float]], label: str) -> None:
    for name, values in series.items():
        ordered = sorted(values)
        shares = [(index + 1) / len(ordered) for index in range(len(ordered))]
        axes.step(ordered, shares, where="post", label=name)
    axes.set(xlabel=label, ylabel="share at most that", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    axes.legend()


def _save(figure: Any, path: Path) -> None:
    try:
        figure.savefig(path, dpi=130)
    except OSError as error:
        raise ConfigError(f"plot={str(path)!r} cannot be written: {error.strerror}") from error
