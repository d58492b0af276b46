"""Simulations as pictures. matplotlib is imported here alone, and when a picture is asked for."""

from __future__ import annotations

import importlib.util
import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.sim.metrics import Columns, Floats, Outcome, Slo, columns_of
from jaxllm.sim.simulator import Run

SUFFIXES = (".png", ".svg", ".pdf")
_MOST_POINTS = 400  # of a line: more than a screen can show
_MOST_REQUESTS = 60  # in a Gantt chart, more cannot be told apart
_MOST_CHARTS = 3  # Gantt charts: of the first policies
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")  # Okabe and Ito (2008)
_PHASES = (("waits", "#bbbbbb"), ("prefill", "#e69f00"), ("decode", "#0072b2"))
_LATENCIES = (("TTFT", "ttft_s", 1.0, "s"), ("TPOT", "tpot_s", 1e3, "ms"), ("E2E", "e2e_s", 1.0, "s"))
_PANEL_INCHES = (4.5, 3.6)

Draw = Callable[[Any], None]  # on the axes of one panel


def has_matplotlib() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def check_plot(path: Path) -> None:
    """Raises: ConfigError: no picture could be written there."""
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"plot={str(path)!r}; accepted: a name that ends in {', '.join(SUFFIXES)}")
    if not has_matplotlib():
        raise ConfigError("plot needs matplotlib; install jaxllm[bench]")


def plot(outcomes: Sequence[Outcome], path: Path, slo: Slo | None = None) -> None:
    """All charts in one picture: latencies, queue and memory over time, requests.

    Raises:
        ConfigError: the file cannot be written.
    """
    with _settings():
        figure = _grid([panels for _, panels in _charts(outcomes, slo)])
        try:
            figure.savefig(path, dpi=110, metadata=_no_date(path.suffix.lower()))
        except OSError as error:
            raise ConfigError(f"plot={str(path)!r} cannot be written: {error.strerror}") from error


def svg_charts(outcomes: Sequence[Outcome], slo: Slo | None = None) -> list[tuple[str, str]]:
    """A title and an SVG element for each chart, to be put into one page: their ids differ."""
    found: list[tuple[str, str]] = []
    with _settings():
        for place, (title, panels) in enumerate(_charts(outcomes, slo)):
            out = io.StringIO()
            figure = _grid([panels])
            figure.savefig(out, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
            found.append((title, _element(out.getvalue(), f"chart{place}-")))
    return found


def _charts(outcomes: Sequence[Outcome], slo: Slo | None) -> list[tuple[str, list[Draw]]]:
    """By chart, its panels. Latencies are of all seeds together, the others of each policy's first seed."""
    columns: dict[str, list[Columns]] = {}
    first: dict[str, tuple[Run, Columns]] = {}
    for outcome in outcomes:
        own = columns_of(outcome.run.served)
        columns.setdefault(outcome.summary.policy, []).append(own)
        first.setdefault(outcome.summary.policy, (outcome.run, own))
    gantts = [_gantt(name, own) for name, (_, own) in list(first.items())[:_MOST_CHARTS]]
    return [
        ("Latencies of finished requests", [_latency(columns, slo or Slo(), *each) for each in _LATENCIES]),
        ("Queue and memory over time", [_queue(first, "wait"), _queue(first, "run"), _memory(first)]),
        *([("Requests", gantts)] if gantts else []),
    ]


def _latency(columns: Mapping[str, list[Columns]], slo: Slo, name: str, field: str, scale: float, unit: str) -> Draw:
    def draw(axes: Any) -> None:
        ends: list[float] = []
        for policy, each in columns.items():
            values, shares = cumulative(np.concatenate([getattr(own, field) for own in each]) * scale)
            axes.step(values, shares, where="post", label=_label(policy))
            ends += [*values[:1].tolist(), *values[-1:].tolist()]
        target = getattr(slo, field)
        if target is not None:
            axes.axvline(target * scale, color="#888888", linestyle="--", linewidth=1, label="target")
        axes.set(xlabel=f"{name}, {unit}", ylabel="share at most that", ylim=(0, 1.02))
        if ends and min(ends) > 0:
            _logarithmic(axes, max(ends) / min(ends))
        axes.legend()

    return draw


def _logarithmic(axes: Any, span: float) -> None:
    """So that the middle and the slowest few can both be read. matplotlib's own labels would be mathematics."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if span < 100 else (1.0,)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def cumulative(values: Floats) -> tuple[Floats, Floats]:
    """Values in order and the share that is at most each; of many, some hundred in equal distances and the ends."""
    ordered = np.sort(values[~np.isnan(values)])
    places = np.unique(np.linspace(0, max(0, ordered.size - 1), min(ordered.size, _MOST_POINTS)).round().astype(int))
    return ordered[places], (places + 1) / max(1, ordered.size)


def _queue(runs: Mapping[str, tuple[Run, Columns]], verb: str) -> Draw:
    def draw(axes: Any) -> None:
        for policy, (run, columns) in runs.items():
            times = _times(run)
            waiting, running = queue_at(columns, times)
            axes.step(times, waiting if verb == "wait" else running, where="post", label=_label(policy))
        axes.set(xlabel="s", ylabel=f"requests that {verb}", ylim=(0, None))
        axes.legend()

    return draw


def _memory(runs: Mapping[str, tuple[Run, Columns]]) -> Draw:
    def draw(axes: Any) -> None:
        for policy, (run, _) in runs.items():
            times = _times(run)
            axes.step(times, 100 * memory_at(run, times), where="post", label=_label(policy))
        axes.set(xlabel="s", ylabel="KV pages held, %", ylim=(0, 102))
        axes.legend()

    return draw


def _times(run: Run) -> Floats:
    return np.linspace(0, run.duration_s, _MOST_POINTS)


def queue_at(columns: Columns, times: Floats) -> tuple[Floats, Floats]:
    """Requests that wait and that run at each moment; a preempted one runs."""
    scheduled_s = np.where(np.isnan(columns.scheduled_s), columns.end_s, columns.scheduled_s)
    arrived, started, ended = (
        np.searchsorted(np.sort(each), times, side="right") for each in (columns.at_s, scheduled_s, columns.end_s)
    )
    return (arrived - started).astype(np.float64), (started - ended).astype(np.float64)


def memory_at(run: Run, times: Floats) -> Floats:
    """Share of pages held at each moment, as last seen: the mean of the replicas between their first and last look."""
    total, num_replicas = np.zeros(times.size), np.zeros(times.size)
    for counts in run.counts:
        seen_s = np.array([sample.at_s for sample in counts.samples])
        if seen_s.size:
            usage = np.array([sample.kv_usage for sample in counts.samples])
            looks = np.searchsorted(seen_s, times, side="right")
            is_there = (looks > 0) & (times <= seen_s[-1])
            total += np.where(is_there, usage[looks - 1], 0.0)
            num_replicas += is_there
    return total / np.maximum(num_replicas, 1)


def _gantt(policy: str, columns: Columns) -> Draw:
    """A line a request, in order of arrival; the first ones where there are many."""

    def draw(axes: Any) -> None:
        shown = np.argsort(columns.at_s, kind="stable")[:_MOST_REQUESTS]
        moments = [columns.at_s, columns.scheduled_s, columns.first_s, columns.last_s]
        for (phase, colour), start, end in zip(_PHASES, moments, moments[1:], strict=False):
            there = [place for place, row in enumerate(shown) if not np.isnan(end[row])]
            rows = shown[there]
            axes.barh(there, (end - start)[rows], left=start[rows], height=0.8, color=colour, label=phase)
        unanswered = [place for place, row in enumerate(shown) if np.isnan(columns.first_s[row])]
        if unanswered:
            axes.plot(columns.end_s[shown[unanswered]], unanswered, "kx", markersize=4, label="no token")
        axes.set(xlabel="s", ylabel=f"request (of {columns.at_s.size})", title=_label(policy))
        axes.set_ylim(max(1, len(shown)) - 0.5, -0.5)
        axes.legend(loc="lower left", fontsize="small")

    return draw


def _grid(rows: Sequence[Sequence[Draw]]) -> Any:
    """A figure with a row of panels for each chart. Made without pyplot: no window, no state of the process."""
    from matplotlib.figure import Figure

    width, height = _PANEL_INCHES
    figure: Any = Figure(figsize=(width * max(map(len, rows)), height * len(rows)), layout="constrained")
    parts = figure.subfigures(len(rows), 1, squeeze=False)[:, 0]
    for part, panels in zip(parts, rows, strict=True):
        for axes, draw in zip(part.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            axes.grid(alpha=0.3)
            draw(axes)
    return figure


@contextmanager
def _settings() -> Iterator[None]:
    """The same picture for the same runs; names are text, whatever is in them; text in an SVG stays text."""
    import matplotlib
    from cycler import cycler

    with matplotlib.rc_context(
        {
            "text.parse_math": False,
            "svg.hashsalt": "jaxllm",
            "svg.fonttype": "none",
            "font.size": 9,
            "axes.prop_cycle": cycler(color=_COLOURS),
            "axes.axisbelow": True,
        }
    ):
        yield


def _label(name: str) -> str:
    """matplotlib leaves out of a legend what begins with an underscore."""
    return f" {name}" if name.startswith("_") else name


def _no_date(suffix: str) -> dict[str, None]:
    return {} if suffix == ".png" else {"Date" if suffix == ".svg" else "CreationDate": None}


def _element(svg: str, prefix: str) -> str:
    """Without what stands before the element, and with ids of its own."""
    element = svg[svg.index("<svg") :]
    element = re.sub(r"<!--.*?-->", "", element, flags=re.DOTALL)
    return re.sub(r'(\sid="|url\(#|href="#)', rf"\g<1>{prefix}", element)
