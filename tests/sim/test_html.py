"""The HTML report: one file, whatever the names in it are."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from jaxllm.errors import ConfigError
from jaxllm.sim.html import html_report, write_html
from jaxllm.sim.metrics import Outcome, Slo, summarise
from tests.helpers.sim_runs import run_of, served

EVIL = "<script>alert(1)</script>\"'&$x$--><img src=http://example.com/x.png>"
EMPTY = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """Tags in balance, and what they would load or run."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in EMPTY:
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "data", "action") or name.startswith("on"):
                self.loads.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in EMPTY:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def outcomes(policy: str = "fcfs", num_seeds: int = 1, tenant: str | None = None) -> list[Outcome]:
    runs = [run_of(served(0.0, [1.0, 2.0 + seed], tenant=tenant), served(1.0, [3.0])) for seed in range(num_seeds)]
    return [Outcome(summarise(run, None, policy, seed, plan_hash="f00"), run) for seed, run in enumerate(runs)]


def test_the_page_loads_and_runs_nothing_whatever_names_say() -> None:
    text = html_report(outcomes(EVIL, tenant=EVIL), title=EVIL, config=f"policy: {EVIL}", slo=Slo(ttft_s=1.0))
    page = Page(text)
    assert page.open == []
    assert page.tags.count("svg") == 3
    assert not {"script", "img", "link", "iframe", "object"} & set(page.tags)
    assert all(load.startswith("#") for load in page.loads)
    assert not re.search(r"url\((?!#)|@import", text)
    assert "default-src 'none'" in text
    assert sum(EVIL in words for words in page.words) >= 5  # title, heading, column, tenant, configuration


def test_the_page_says_what_the_table_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxllm.sim.html.has_matplotlib", lambda: False)
    page = Page(html_report([*outcomes("fcfs", 3), *outcomes("fair", 3)], slo=Slo(ttft_s=0.5)))
    words = " ".join(page.words)
    for part in ("fcfs", "fair", "TTFT p99, s", "Means of 3 seeds", "TTFT 0.5 s", "f00", "What the figures mean"):
        assert part in words


def test_without_matplotlib_there_are_tables_and_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxllm.sim.html.has_matplotlib", lambda: False)
    page = Page(html_report(outcomes()))
    assert "table" in page.tags
    assert "svg" not in page.tags
    assert any("jaxllm[bench]" in words for words in page.words)


def test_a_report_of_nothing_is_a_page() -> None:
    assert Page(html_report([])).open == []


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxllm.sim.html.has_matplotlib", lambda: False)
    write_html(outcomes(), tmp_path / "out.html", title="A")
    assert (tmp_path / "out.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    with pytest.raises(ConfigError, match=r"html='.*' cannot be written"):
        write_html(outcomes(), tmp_path, title="A")
