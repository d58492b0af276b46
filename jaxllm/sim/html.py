"""Simulations as one HTML file that needs nothing else: no script, no picture, style or font from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

import jaxllm
from jaxllm.sim.metrics import Outcome, Slo, Summary
from jaxllm.sim.plots import has_matplotlib, svg_charts
from jaxllm.sim.report import DIFFERS, FIGURES, TENANT_COLUMNS, by_policy, compare, notes, tenant_rows, write_text

# Browsers are told to fetch nothing and to run nothing, should something ever slip through.
_HEAD = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 15px/1.45 system-ui, sans-serif; color: #222; background: #fff; max-width: 1180px; margin: 2em auto;
  padding: 0 1em; }}
table {{ border-collapse: collapse; margin: 1em 0; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .2em .8em; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }}
th:first-child, td:first-child {{ text-align: left; }}
thead th {{ border-bottom: 2px solid #888; }}
tbody tr:hover {{ background: #f3f6fa; }}
.wide {{ overflow-x: auto; }}
.differs {{ background: #fff4d6; }}
.note {{ color: #555; }}
svg {{ max-width: 100%; height: auto; }}
pre {{ background: #f6f6f6; padding: .8em; overflow-x: auto; }}
</style>
</head>
"""


def html_report(
    outcomes: Sequence[Outcome], *, title: str = "Simulation", config: str = "", slo: Slo | None = None
) -> str:
    """The page. `config`: the text of the configuration, shown as it is. Without matplotlib it has no charts."""
    summaries = [outcome.summary for outcome in outcomes]
    parts = [
        _HEAD.format(title=escape(title)),
        f"<body>\n<h1>{escape(title)}</h1>",
        f'<p class="note">jaxllm {escape(jaxllm.__version__)}. {escape(_targets(slo))}</p>',
        *_policies(summaries),
        *_tenants(summaries),
        *(_charts(outcomes, slo) if outcomes else []),
        *_runs(summaries),
        *_meanings(),
    ]
    if config:
        parts += ["<h2>Configuration</h2>", f"<pre>{escape(config)}</pre>"]
    return "\n".join([*parts, "</body>", "</html>", ""])


def write_html(
    outcomes: Sequence[Outcome], path: Path, *, title: str = "Simulation", config: str = "", slo: Slo | None = None
) -> None:
    """Raises: ConfigError: the file cannot be written."""
    write_text("html", path, html_report(outcomes, title=title, config=config, slo=slo))


def _targets(slo: Slo | None) -> str:
    named = (("TTFT", slo.ttft_s), ("TPOT", slo.tpot_s), ("E2E", slo.e2e_s)) if slo is not None else ()
    targets = [f"{name} {value:g} s" for name, value in named if value is not None]
    return f"Targets: {', '.join(targets)}, where a request has none of its own." if targets else ""


def _policies(summaries: Sequence[Summary]) -> list[str]:
    comparison = compare(summaries)
    rows = (
        _row([escape(figure.title), *(escape(cell.text) for cell in cells)], [False, *(cell.differs for cell in cells)])
        for figure, cells in comparison.rows
    )
    told = [f'<p class="note">{escape(note)}</p>' for note in notes(comparison)]
    return ["<h2>Policies</h2>", _table(["", *comparison.policies], rows), *told]


def _tenants(summaries: Sequence[Summary]) -> list[str]:
    rows = tenant_rows(summaries)
    if not rows:
        return []
    return ["<h2>Tenants</h2>", _table(TENANT_COLUMNS, (_row(map(escape, row)) for row in rows))]


def _charts(outcomes: Sequence[Outcome], slo: Slo | None) -> list[str]:
    if not has_matplotlib():
        return ['<p class="note">No charts: they need matplotlib, which jaxllm[bench] brings.</p>']
    parts: list[str] = []
    for title, svg in svg_charts(outcomes, slo):
        parts += [f"<h2>{escape(title)}</h2>", svg]
    several = any(len(each) > 1 for each in by_policy([outcome.summary for outcome in outcomes]).values())
    told = "Latencies are those of all seeds, the other charts show the first seed of each policy."
    return [*parts, f'<p class="note">{told}</p>'] if several else parts


def _runs(summaries: Sequence[Summary]) -> list[str]:
    """Each run by itself, folded away."""
    titles = ["policy", "seed", *(figure.title for figure in FIGURES), "plan hash"]
    rows = (
        _row(
            [
                escape(summary.policy),
                str(summary.seed),
                *(f"{figure.get(summary):.6g}" for figure in FIGURES),
                escape(summary.plan_hash or "-"),
            ]
        )
        for summary in summaries
    )
    return ["<details><summary>Every run</summary>", _table(titles, rows), "</details>"]


def _meanings() -> list[str]:
    meanings = {figure.name: figure.meaning for figure in FIGURES}
    items = "\n".join(f"<li><b>{escape(name)}</b>: {escape(said)}.</li>" for name, said in meanings.items())
    return [f"<details><summary>What the figures mean</summary>\n<ul>\n{items}\n</ul></details>"]


def _table(titles: Iterable[str], rows: Iterable[str]) -> str:
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    body = "\n".join(rows)
    return f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>'


def _row(cells: Iterable[str], differs: Iterable[bool] = ()) -> str:
    """Cells are escaped already."""
    marked = list(differs)
    each = (
        f'<td class="differs" title="{DIFFERS} differs">{cell}</td>'
        if place < len(marked) and marked[place]
        else f"<td>{cell}</td>"
        for place, cell in enumerate(cells)
    )
    return f"<tr>{''.join(each)}</tr>"
