"""What a results file holds, as Markdown: medians with their range, and ratios to a baseline."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.bench.measure import Row


@dataclass(frozen=True, slots=True)
class Metric:
    key: str
    title: str
    scale: float = 1.0
    more_is_better: bool = False

    def values(self, rows: Iterable[Row]) -> list[float]:
        return [row[self.key] * self.scale for row in rows if row.get(self.key) is not None]


TTFT = Metric("ttft_p50_s", "TTFT ms", 1e3)
ITL = Metric("itl_p50_s", "ITL p50 ms", 1e3)
RATES = (
    Metric("output_tok_s", "output tok/s", more_is_better=True),
    Metric("total_tok_s", "total tok/s", more_is_better=True),
)
STARTS = (Metric("first_token_s", "first token s"), Metric("ready_s", "ready s"))
METRICS: dict[str, tuple[Metric, ...]] = {
    "start-cold": STARTS,
    "start-warm": STARTS,
    "single": (TTFT, ITL, Metric("tpot_mean_s", "TPOT ms", 1e3)),
    "prefill": (TTFT,),
    "prefix": (*reversed(RATES), Metric("ttft_mean_s", "TTFT mean ms", 1e3)),
    "offline": RATES,
    "online": (
        Metric("ttft_mean_s", "TTFT mean ms", 1e3),
        Metric("ttft_p99_s", "TTFT p99 ms", 1e3),
        Metric("itl_mean_s", "ITL mean ms", 1e3),
        Metric("itl_p99_s", "ITL p99 ms", 1e3),
    ),
}
COSTS = (
    Metric("wall_s", "wall s"),
    Metric("server_cpu_s", "server CPU s"),
    Metric("client_cpu_s", "client CPU s"),
    Metric("other_cpu", "others' cores"),
    Metric("max_lag_s", "client lag ms", 1e3),
    Metric("peak_rss_mib", "peak RSS MiB"),
    Metric("pss_mib", "PSS MiB"),
)


def read_rows(path: Path) -> list[Row]:
    """The measurements of a results file, those that failed left out.

    Raises:
        ValueError: there are none, or a line is no JSON object.
    """
    rows = [_read_line(line, f"{path}, line {n}") for n, line in enumerate(_text(path).splitlines(), 1) if line.strip()]
    rows = [row for row in rows if row.get("kind") == "row" and "failed" not in row]
    if not rows:
        raise ValueError(f"{path} holds no measurements")
    return rows


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text: {error}") from None


def _read_line(line: str, where: str) -> Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where} is {line[:80]}; accepted: a JSON object, as compare writes it")
    return row


def of(rows: Sequence[Row], workload: str, peer: str) -> list[Row]:
    return [row for row in rows if row["workload"] == workload and row["peer"] == peer]


def peers_of(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["peer"] for row in rows))


def speed_ratios(rows: Sequence[Row], baseline: Sequence[Row], metric: Metric) -> list[float]:
    """How many times faster than the baseline, repetition by repetition: above one is better, for times as well."""
    theirs = {row["repetition"]: row.get(metric.key) for row in baseline}
    ratios: list[float] = []
    for row in rows:
        own, other = row.get(metric.key), theirs.get(row["repetition"])
        if own and other:
            ratios.append(own / other if metric.more_is_better else other / own)
    return ratios


def spread(values: Sequence[float]) -> str:
    """Median (least to most); three digits."""
    if not values:
        return "-"
    middle = f"{statistics.median(values):.3g}" if max(values) < 1000 else f"{statistics.median(values):.0f}"
    if len(values) == 1:
        return middle
    return f"{middle} ({_short(min(values))}–{_short(max(values))})"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def table(rows: Sequence[Row], baseline: str | None = None) -> str:
    """Every workload of `rows`. `baseline` None: the first server measured."""
    baseline = baseline or peers_of(rows)[0]
    if baseline not in peers_of(rows):
        raise ValueError(f"--baseline={baseline!r} was not measured; accepted: {', '.join(peers_of(rows))}")
    sections = [_section(rows, name, metrics, baseline) for name, metrics in METRICS.items()]
    return "\n".join(section for section in sections if section)


def _section(rows: Sequence[Row], workload: str, metrics: Sequence[Metric], baseline: str) -> str:
    peers = [peer for peer in peers_of(rows) if of(rows, workload, peer)]
    if not peers:
        return ""
    costs = [cost for cost in COSTS if cost.values(row for row in rows if row["workload"] == workload)]
    titles = ["server", "runs"]
    for metric in metrics:
        titles += [metric.title, f"× {baseline}"]
    titles += [*(cost.title for cost in costs), "suspect"]
    lines = [f"### {workload}", "", _line(titles), _line(["---"] * len(titles))]
    for peer in peers:
        own, theirs = of(rows, workload, peer), of(rows, workload, baseline)
        cells = [peer, str(len(own))]
        for metric in metrics:
            cells += [spread(metric.values(own)), spread(speed_ratios(own, theirs, metric))]
        cells += [spread(cost.values(own)) for cost in costs]
        lines.append(_line([*cells, str(sum(bool(row["suspect"]) for row in own))]))
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
