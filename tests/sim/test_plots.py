"""Pictures of simulations: the numbers behind the lines, and files that open."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from jaxllm.errors import ConfigError
from jaxllm.sim.metrics import Outcome, Slo, columns_of, summarise
from jaxllm.sim.plots import check_plot, cumulative, memory_at, plot, queue_at, svg_charts
from jaxllm.sim.replica import Counts, Sample
from jaxllm.sim.simulator import Run
from tests.helpers.sim_runs import run_of, served, small_run, without_token


def outcome(run: Run, policy: str = "fcfs") -> Outcome:
    return Outcome(summarise(run, None, policy, 0), run)


def test_a_cumulative_curve_is_the_share_of_values() -> None:
    values, shares = cumulative(np.array([3.0, 1.0, np.nan, 2.0]))
    assert (values.tolist(), shares.tolist()) == ([1.0, 2.0, 3.0], pytest.approx([1 / 3, 2 / 3, 1.0]))
    assert cumulative(np.array([np.nan]))[0].size == 0


def test_a_curve_of_many_values_is_thinned_and_keeps_its_ends() -> None:
    draw = np.random.default_rng(0).exponential(size=50_000)
    values, shares = cumulative(draw)
    assert values.size <= 400
    assert (values[0], values[-1], shares[-1]) == (draw.min(), draw.max(), 1.0)
    np.testing.assert_allclose(shares, [(draw <= value).mean() for value in values])


def test_the_queue_over_time_has_the_area_of_all_times_in_the_system() -> None:
    """Little's law: requests in the system, summed over time, are times in the system, summed over requests."""
    run = small_run()
    columns = columns_of(run.served)
    times = np.linspace(0, run.duration_s, 20_001)
    waiting, running = queue_at(columns, times)
    step_s = times[1] - times[0]
    assert waiting.min() >= 0
    assert running.min() >= 0
    assert (waiting[-1], running[-1]) == (0, 0)
    assert waiting.sum() * step_s == pytest.approx(columns.queue_s.sum(), rel=0.01)
    assert (waiting + running).sum() * step_s == pytest.approx(columns.e2e_s.sum(), rel=0.01)


def test_who_never_started_waits_until_its_end() -> None:
    waiting, running = queue_at(columns_of([without_token(1.0, 3.0)]), np.array([0.5, 1.0, 2.0, 3.0]))
    assert (waiting.tolist(), running.tolist()) == ([0, 1, 1, 0], [0, 0, 0, 0])


def test_memory_over_time_is_the_mean_of_the_replicas_that_are_looked_at() -> None:
    one = Counts(samples=[Sample(1.0, 1, 0, 0.4), Sample(3.0, 1, 0, 0.8)])
    two = Counts(samples=[Sample(2.0, 1, 0, 0.2)])
    run = run_of(served(0.0, [5.0]), counts=(one, two))
    found = memory_at(run, np.array([0.0, 1.5, 2.0, 2.5, 3.0, 4.0]))
    assert found.tolist() == pytest.approx([0.0, 0.4, 0.3, 0.4, 0.8, 0.0])


@pytest.mark.parametrize(("suffix", "start"), [(".png", b"\x89PNG"), (".pdf", b"%PDF")])
def test_a_picture_is_written(tmp_path: Path, suffix: str, start: bytes) -> None:
    plot([outcome(small_run(num_requests=20))], tmp_path / f"out{suffix}", Slo(tpot_s=0.1))
    assert (tmp_path / f"out{suffix}").read_bytes().startswith(start)


def test_charts_hold_their_names_as_text_and_differ_in_their_ids() -> None:
    names = ("_own$^$", "a<b>&c")  # neither left out of a legend nor taken for mathematics or markup
    runs = small_run(num_requests=20), run_of(without_token(0.0, 1.0), served(0.0, [0.0, 2.0]))
    charts = svg_charts([outcome(run, name) for run, name in zip(runs, names, strict=True)], Slo(ttft_s=0.1))
    ids: list[str] = []
    for _, svg in charts:
        root = ElementTree.fromstring(svg)
        words = {(element.text or "").strip() for element in root.iter("{http://www.w3.org/2000/svg}text")}
        assert words >= set(names)
        assert not any("mathdefault" in word for word in words)
        ids += [element.attrib["id"] for element in root.iter() if "id" in element.attrib]
        assert set(re.findall(r'(?:url\(|href=")#([^)"]*)', svg)) <= set(ids)
    assert len(charts) == 3
    assert len(ids) == len(set(ids))


def test_a_run_without_answers_can_be_drawn() -> None:
    refused = run_of(without_token(0.0, 0.0, "full"))
    assert len(svg_charts([outcome(refused), outcome(run_of(), "fair")])) == 3


def test_equal_runs_make_equal_pictures(tmp_path: Path) -> None:
    for name in ("one.svg", "two.svg"):
        plot([outcome(small_run(num_requests=10))], tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


def test_what_cannot_be_drawn_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_plot(tmp_path / "out.SVG")
    with pytest.raises(ConfigError, match=r"accepted: a name that ends in \.png, \.svg, \.pdf"):
        check_plot(tmp_path / "out.gif")
    with pytest.raises(ConfigError, match="cannot be written: No such file"):
        plot([outcome(run_of(served()))], tmp_path / "none" / "out.png")
    monkeypatch.setattr("jaxllm.sim.plots.has_matplotlib", lambda: False)
    with pytest.raises(ConfigError, match=r"install jaxllm\[bench\]"):
        check_plot(tmp_path / "out.png")
