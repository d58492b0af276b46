"""What a results file holds, as one picture: a panel a workload, medians with their range, the baseline at one."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.bench.measure import Row
from scripts.bench.table import METRICS, Metric, of, peers_of, speed_ratios


def plot(rows: Sequence[Row], baseline: str | None, path: Path) -> None:
    """Draw how fast each server is, as a multiple of `baseline` (None: the first).

    Raises:
        ValueError: matplotlib is not installed.
    """
    pyplot = load_pyplot()
    baseline = baseline or peers_of(rows)[0]
    panels = [(name, metric) for name, metrics in METRICS.items() for metric in metrics[:2] if _has(rows, name, metric)]
    columns = min(len(panels), 4)
    lines = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(lines, columns, figsize=(3.2 * columns, 2.4 * lines), squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    for axis, (name, metric) in zip(axes.flat, panels, strict=False):
        _panel(axis, rows, name, metric, baseline)
    figure.suptitle(f"Speed as a multiple of {baseline}: higher is faster", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def load_pyplot() -> Any:
    """Raises:
    ValueError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError("a plot needs matplotlib, which is not installed: pip install matplotlib") from error
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


def _has(rows: Sequence[Row], name: str, metric: Metric) -> bool:
    return bool(metric.values(row for row in rows if row["workload"] == name))


def _panel(axis: Any, rows: Sequence[Row], name: str, metric: Metric, baseline: str) -> None:
    theirs = of(rows, name, baseline)
    found = [(peer, speed_ratios(of(rows, name, peer), theirs, metric)) for peer in peers_of(rows)]
    found = [(peer, ratios) for peer, ratios in found if ratios]
    for at, (_, ratios) in enumerate(found):
        middle = statistics.median(ratios)
        axis.barh(at, middle, color=f"C{at}", xerr=[[middle - min(ratios)], [max(ratios) - middle]])
    axis.axvline(1.0, color="black", linewidth=0.8)
    axis.set_yticks(range(len(found)), [peer for peer, _ in found], fontsize=7)
    axis.invert_yaxis()
    axis.set_title(f"{name}: {metric.title.removesuffix(' ms').removesuffix(' s')}", fontsize=8)
    axis.tick_params(axis="x", labelsize=7)
