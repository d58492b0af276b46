"""Policies side by side: what is shown, what is marked, and what goes to programs."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from jaxllm.errors import ConfigError
from jaxllm.sim.metrics import Summary, summarise
from jaxllm.sim.report import FIGURES, TENANT_COLUMNS, as_json, compare, notes, show, tables, tenant_rows, write_json
from jaxllm.sim.seeds import Interval, interval
from tests.helpers.sim_runs import run_of, served, without_token


def summary(policy: str = "fcfs", seed: int = 0, first_s: float = 1.0, **figures: float) -> Summary:
    found = summarise(run_of(served(0.0, [first_s, first_s + 1])), None, policy, seed)
    return dataclasses.replace(found, **figures)


def cells(summaries: list[Summary], title: str) -> list[str]:
    return next([cell.text for cell in row] for figure, row in compare(summaries).rows if figure.title == title)


def printed(summaries: list[Summary], width: int = 120) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width)
    for each in tables(summaries):
        console.print(each)
    return out.getvalue()


@pytest.mark.parametrize(
    ("mean", "half_width", "text"),
    [
        (0.0, math.nan, "0"),
        (12.0, math.nan, "12"),
        (0.012345, math.nan, "0.0123"),
        (12.345, math.nan, "12.3"),
        (12345.6, math.nan, "12,346"),
        (12.3456, 0.5678, "12.35 ± 0.57"),
        (12345.6, 123.4, "12,346 ± 123"),
        (5.0, 0.0, "5"),
        (0.00012344, 0.0000067, "0.0001234 ± 0.0000067"),
    ],
)
def test_numbers_are_shown_as_far_as_they_are_known(mean: float, half_width: float, text: str) -> None:
    assert show(Interval(mean, half_width, 3)) == text


def test_nothing_measured_is_a_dash() -> None:
    assert show(interval([])) == "-"
    one_token = summarise(run_of(served(0.0, [1.0])), None, "fcfs", 0)
    assert cells([one_token], "TPOT p50, ms") == ["-"]


def test_policies_stand_in_the_order_in_which_they_came() -> None:
    summaries = [summary(policy, seed) for seed in range(2) for policy in ("fair", "cache_aware", "fcfs")]
    found = compare(summaries)
    assert found.policies == ("fair", "cache_aware", "fcfs")
    assert found.num_seeds == 2
    assert all(len(row) == 3 for _, row in found.rows)


def test_cells_are_means_over_seeds_with_their_interval() -> None:
    summaries = [summary(seed=seed, first_s=first_s) for seed, first_s in enumerate((1.0, 2.0, 3.0))]
    # Standard deviation 1 over three values, 2 degrees of freedom: 4.303 / sqrt(3)
    assert cells(summaries, "TTFT p50, s") == ["2.0 ± 2.5"]
    assert cells(summaries[:1], "TTFT p50, s") == ["1"]


def test_a_difference_that_every_seed_shows_is_marked() -> None:
    base = [summary("fcfs", seed, first_s=10.0 * (seed + 1)) for seed in range(4)]
    slower = [summary("fair", seed, first_s=10.0 * (seed + 1) + 1 + 0.1 * seed) for seed in range(4)]
    either = [summary("slo", seed, first_s=10.0 * (seed + 1) + (-1) ** seed) for seed in range(4)]
    found = cells([*base, *slower, *either], "TTFT p50, s")
    assert [text.endswith("*") for text in found] == [False, True, False]
    assert any("differs from fcfs" in note for note in notes(compare([*base, *slower])))
    assert not any("differs" in note for note in notes(compare([*base, *either])))


def test_one_seed_marks_nothing_and_needs_no_note() -> None:
    found = compare([summary("fcfs"), summary("fair", first_s=9.0)])
    assert notes(found) == []
    assert not any(cell.differs for _, row in found.rows for cell in row)


def test_rows_about_failures_appear_when_there_are_some() -> None:
    def titles(summaries: list[Summary]) -> set[str]:
        return {figure.title for figure, _ in compare(summaries).rows}

    assert not titles([summary()]) & {"refused", "ended early", "retries"}
    run = run_of(served(0.0, [1.0]), without_token(0.0, 0.0, "full"), without_token(0.0, 2.0))
    summaries = [summary(), summarise(run, None, "other", 0)]
    assert titles(summaries) >= {"refused", "ended early"}
    assert cells(summaries, "ended early") == ["0", "1"]


def test_tenants_have_rows_where_there_are_several() -> None:
    assert tenant_rows([summary()]) == []
    run = run_of(served(0.0, [1.0], tenant="ann"), served(0.0, [2.0], tenant="ann"), served(0.0, [4.0]))
    rows = tenant_rows([summarise(run, None, policy, seed) for policy in ("fcfs", "fair") for seed in range(2)])
    assert [row[:3] for row in rows] == [
        ("fcfs", "(no tenant)", "1"),
        ("fcfs", "ann", "2"),
        ("fair", "(no tenant)", "1"),
        ("fair", "ann", "2"),
    ]
    assert {len(row) for row in rows} == {len(TENANT_COLUMNS)}
    assert rows[1][TENANT_COLUMNS.index("TTFT p50, s")] == "1.50"


def test_the_table_shows_names_as_they_are() -> None:
    run = run_of(served(0.0, [1.0], tenant="[bold]ann"), served(0.0, [2.0], tenant="bob"))
    text = printed([summarise(run, None, "[red]mine[/]", 0)])
    assert "[red]mine[/]" in text
    assert "[bold]ann" in text
    assert all(figure.title in text for figure in FIGURES if not figure.is_extra)


def test_an_empty_comparison_is_a_table_too() -> None:
    assert compare([]).policies == ()
    assert "requests" in printed([])


def test_json_is_a_list_with_one_object_a_policy_and_seed(tmp_path: Path) -> None:
    summaries = [summary("fcfs", 0), summary("fcfs", 1), summary("fair", 0)]
    write_json(summaries, tmp_path / "out.json")
    found = json.loads((tmp_path / "out.json").read_text(), parse_constant=pytest.fail)
    assert [(each["policy"], each["seed"]) for each in found] == [("fcfs", 0), ("fcfs", 1), ("fair", 0)]
    assert found == json.loads(json.dumps(as_json(summaries)))
    with pytest.raises(ConfigError, match=r"json='.*' cannot be written"):
        write_json(summaries, tmp_path / "none" / "out.json")
