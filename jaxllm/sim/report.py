"""Simulations for people and programs: policies side by side, with confidence intervals over seeds, and JSON."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxllm.errors import ConfigError
from jaxllm.sim.metrics import Summary, TenantSummary
from jaxllm.sim.seeds import Interval, interval, paired_difference

if TYPE_CHECKING:
    from rich.table import Table

DIFFERS = "*"
NO_TENANT = "(no tenant)"


@dataclass(frozen=True, slots=True)
class Figure:
    """A row of the table."""

    title: str
    get: Callable[[Summary], float]
    meaning: str  # a sentence's end, for who reads it for the first time
    is_extra: bool = False  # left out where every value is 0

    @property
    def name(self) -> str:
        """Without percentile and unit: the same for all that mean the same."""
        return re.sub(r"( (mean|p\d+))?(, .*)?$", "", self.title)


def _spread_figures(name: str, field: str, scale: float, meaning: str) -> list[Figure]:
    def get(part: str) -> Callable[[Summary], float]:
        return lambda summary: getattr(getattr(summary, field), part) * scale

    unit = "ms" if scale == 1e3 else "s"
    return [Figure(f"{name} {part}, {unit}", get(part), meaning) for part in ("mean", "p50", "p90", "p99")]


FIGURES: tuple[Figure, ...] = (
    Figure("requests", lambda s: s.num_requests, "that ended"),
    Figure("refused", lambda s: s.num_refused, "ended with an error, most often not taken in at all", True),
    Figure(
        "ended early",
        lambda s: s.num_requests - s.num_finished - s.num_refused,
        "at a deadline; they have no latency here",
        True,
    ),
    Figure("retries", lambda s: s.num_retries, "of requests whose replica failed", True),
    Figure("duration, s", lambda s: s.duration_s, "from 0 to the last token"),
    Figure("output tokens/s", lambda s: s.output_tokens_per_s, "over the duration"),
    Figure("requests/s", lambda s: s.requests_per_s, "finished ones, over the duration"),
    Figure("goodput, requests/s", lambda s: s.goodput_req_per_s, "finished requests that met all of their targets"),
    Figure("within targets, %", lambda s: 100 * s.slo_share, "of all requests; all that finished without a target"),
    *_spread_figures("TTFT", "ttft_s", 1.0, "time to first token, from arrival"),
    *_spread_figures("TPOT", "tpot_s", 1e3, "time per output token after the first"),
    *_spread_figures("E2E", "e2e_s", 1.0, "from arrival to the last token"),
    *_spread_figures("queue", "queue_s", 1.0, "from arrival until a step first had some of its tokens"),
    *_spread_figures("longest gap", "longest_gap_s", 1e3, "between two tokens of an answer"),
    Figure(
        "Jain's index",
        lambda s: s.jain,
        "of tokens served to each tenant while all had something to be served; 1: equal",
    ),
    Figure("preemptions", lambda s: s.preemptions, "requests whose memory was taken; they are computed again"),
    Figure("recomputed tokens", lambda s: s.recomputed_tokens, "computed beyond what was needed once"),
    Figure("KV used, mean %", lambda s: 100 * s.kv_usage, "of all pages, held by requests"),
    Figure("KV used, peak %", lambda s: 100 * s.kv_peak, "of all pages, held by requests"),
    Figure("KV waste, %", lambda s: 100 * s.kv_waste, "of the held token slots, without a token"),
    Figure("prefix hits, %", lambda s: 100 * s.prefix_hit_rate, "of tokens at first admission, found cached"),
    Figure("device busy, %", lambda s: 100 * s.device_busy, "of the time that devices were there"),
    Figure("steps", lambda s: s.num_steps, "of all devices"),
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One figure of one policy, over its seeds."""

    value: Interval
    differs: bool = False  # from the first policy, in runs with the same seeds: the interval of that excludes 0

    @property
    def text(self) -> str:
        return show(self.value) + (DIFFERS if self.differs else "")


@dataclass(frozen=True, slots=True)
class Comparison:
    """Policies side by side."""

    policies: tuple[str, ...]  # in the order in which they came
    num_seeds: int  # of the policy with the fewest
    rows: tuple[tuple[Figure, tuple[Cell, ...]], ...]


def compare(summaries: Sequence[Summary]) -> Comparison:
    """Differences are tested in pairs of runs with the same seed, which had the same workload."""
    runs = by_policy(summaries)
    rows: list[tuple[Figure, tuple[Cell, ...]]] = []
    for figure in FIGURES:
        values = [{summary.seed: float(figure.get(summary)) for summary in each} for each in runs.values()]
        if not figure.is_extra or any(value for each in values for value in each.values()):
            rows.append((figure, tuple(_cell(values[0], each) for each in values)))
    return Comparison(tuple(runs), min(map(len, runs.values()), default=0), tuple(rows))


def by_policy(summaries: Sequence[Summary]) -> dict[str, list[Summary]]:
    found: dict[str, list[Summary]] = {}
    for summary in summaries:
        found.setdefault(summary.policy, []).append(summary)
    return found


def _cell(first: dict[int, float], values: dict[int, float]) -> Cell:
    differs = values is not first and paired_difference(first, values).excludes_zero
    return Cell(interval(list(values.values())), differs)


TENANT_COLUMNS = ("policy", "tenant", "requests", "refused", "tokens", "within targets, %", "TTFT p50, s")
TENANT_COLUMNS += ("TTFT p99, s", "TPOT p50, ms", "E2E p99, s")


def tenant_rows(summaries: Sequence[Summary]) -> list[tuple[str, ...]]:
    """A row for each policy and tenant, means over seeds; none where there is one tenant alone."""
    rows: list[tuple[str, ...]] = []
    for policy, each in by_policy(summaries).items():
        tenants: dict[str | None, list[TenantSummary]] = {}
        for tenant in (tenant for summary in each for tenant in summary.tenants):
            tenants.setdefault(tenant.tenant, []).append(tenant)
        if len(tenants) > 1:
            rows += [(policy, NO_TENANT if name is None else name, *_cells(found)) for name, found in tenants.items()]
    return rows


def _cells(tenants: Sequence[TenantSummary]) -> list[str]:
    def over(get: Callable[[TenantSummary], float]) -> str:
        found = interval([get(tenant) for tenant in tenants])
        return show(Interval(found.mean, math.nan, found.count))

    return [
        over(lambda t: t.num_requests),
        over(lambda t: t.num_refused),
        over(lambda t: t.served_tokens),
        over(lambda t: 100 * t.slo_share),
        over(lambda t: t.ttft_s.p50),
        over(lambda t: t.ttft_s.p99),
        over(lambda t: 1e3 * t.tpot_s.p50),
        over(lambda t: t.e2e_s.p99),
    ]


def show(value: Interval) -> str:
    """The mean to three digits, or as far as its interval goes: `12.3`, `12.34 ± 0.56`; `-` for nothing."""
    if not value.count:
        return "-"
    if math.isnan(value.half_width) or value.half_width == 0:
        return f"{value.mean:,.{_num_decimals(value.mean, 3)}f}"
    decimals = _num_decimals(value.half_width, 2)
    return f"{value.mean:,.{decimals}f} ± {value.half_width:,.{decimals}f}"


def _num_decimals(value: float, num_digits: int) -> int:
    """After the point, for so many digits in all; none for whole numbers."""
    if not math.isfinite(value) or value == round(value):
        return 0
    return max(0, num_digits - 1 - math.floor(math.log10(abs(value))))


def notes(comparison: Comparison) -> list[str]:
    """What the signs in the table mean, where there are any."""
    found: list[str] = []
    if comparison.num_seeds > 1:
        found.append(f"Means of {comparison.num_seeds} seeds ± half a 95 % confidence interval (Student's t).")
    if any(cell.differs for _, cells in comparison.rows for cell in cells):
        first = comparison.policies[0]
        told = "the 95 % interval of the difference, seed by seed, excludes 0 (by chance: one in twenty)"
        found.append(f"{DIFFERS} differs from {first}: {told}.")
    return found


def tables(summaries: Sequence[Summary]) -> list[Table]:
    """Policies side by side, then tenants where there are several."""
    from rich.table import Table
    from rich.text import Text

    comparison = compare(summaries)
    main = Table(caption=Text("\n".join(notes(comparison))), caption_justify="left")
    for place, title in enumerate(("", *comparison.policies)):
        main.add_column(Text(title), justify="right" if place else "left", no_wrap=not place, overflow="fold")
    for figure, cells in comparison.rows:
        main.add_row(Text(figure.title), *(Text(cell.text) for cell in cells))
    rows = tenant_rows(summaries)
    if not rows:
        return [main]
    tenants = Table(title="Tenants" if comparison.num_seeds < 2 else "Tenants, means over seeds")
    for place, title in enumerate(TENANT_COLUMNS):
        tenants.add_column(Text(title), justify="right" if place > 1 else "left", overflow="fold")
    for row in rows:
        tenants.add_row(*map(Text, row))
    return [main, tenants]


def as_json(summaries: Sequence[Summary]) -> list[dict[str, Any]]:
    """One object a policy and seed; times in seconds, None where nothing was measured."""
    return [summary.as_dict() for summary in summaries]


def write_json(summaries: Sequence[Summary], path: Path) -> None:
    """Raises: ConfigError: the file cannot be written."""
    write_text("json", path, json.dumps(as_json(summaries), indent=1) + "\n")


def write_text(name: str, path: Path, text: str) -> None:
    """Raises: ConfigError: the file cannot be written; `name` says which setting asked for it."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{name}={str(path)!r} cannot be written: {error.strerror}") from error
