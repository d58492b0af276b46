"""A comparison of two servers that know nothing of it, from their start to the table."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from scripts.bench import compare, usage
from scripts.bench.measure import Doubts
from scripts.bench.peer_server import PeerServer, load_peers
from scripts.bench.table import Metric, speed_ratios, spread, table
from scripts.bench.words import Texts
from tests.scripts.bench.test_workload import TOKENIZER, WORDS

SERVER = Path(__file__).with_name("raw_server.py")
COMMAND = [sys.executable, str(SERVER), "${PORT}"]


def peers_file(folder: Path, entries: dict[str, Any]) -> Path:
    path = folder / "peers.json"
    path.write_text(json.dumps(entries))
    return path


def compare_here(folder: Path, entries: dict[str, Any], *flags: str) -> list[dict[str, Any]]:
    out = folder / "out.jsonl"
    paths = [f"--peers={peers_file(folder, entries)}", f"--out={out}"]
    args = compare.arguments([*paths, "--quiet=0", "--max-other-cpu=99", "--max-lag=99", *flags])
    args.work = folder
    compare.Comparison(args, load_peers(args.peers), lambda seed: Texts(TOKENIZER, WORDS, seed)).run()
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_servers_take_turns_and_each_measurement_is_a_row(tmp_path: Path) -> None:
    entries = {"a": {"command": COMMAND}, "b": {"command": COMMAND, "workloads": {"single": {"requests": 1}}}}
    head, *rows = compare_here(tmp_path, entries, "--workloads=start-warm,single,prefill", "--repetitions=2")
    assert head["kind"] == "run"
    assert head["cores"] >= 1
    done = [(row["workload"], row["repetition"], row["peer"]) for row in rows]
    assert done == [
        *[("start-cold", 0, "a"), ("single", 0, "a"), ("single", 0, "b"), ("prefill", 0, "a")],
        *[("single", 1, "b"), ("single", 1, "a"), ("prefill", 1, "a")],
    ]
    singles = {(row["peer"], row["repetition"]): row for row in rows if row["workload"] == "single"}
    assert singles["a", 0]["output_tokens"] == 3 * singles["b", 0]["output_tokens"] == 3 * 128
    doubts = [doubt for row in rows for doubt in row["suspect"]]
    assert [doubt for doubt in doubts if not doubt.startswith("others used")] == []  # the machine may be busy
    assert not any(row["suspect"] for row in rows if row["wall_s"] < 0.1)
    assert 0 < singles["a", 0]["itl_p50_s"] < singles["a", 0]["ttft_p50_s"] + singles["a", 0]["wall_s"]
    assert sum(row["server_cpu_s"] for row in rows) > 0  # a short one may end within a tick of the clock
    text = table(rows, "a")
    assert "### single" in text
    assert "× a" in text
    assert "### offline" not in text


def test_a_comparison_that_is_ended_stops_what_it_started(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    script = f"import os, pathlib, time\npathlib.Path({str(pid)!r}).write_text(str(os.getpid()))\ntime.sleep(60)"
    path = peers_file(tmp_path, {"a": {"command": [sys.executable, "-c", script]}})
    flags = [f"--peers={path}", f"--out={tmp_path / 'out.jsonl'}", "--quiet=0", "--workloads=start-warm"]
    code = (
        "from scripts.bench import compare\nfrom tests.scripts.bench.test_workload import *\n"
        f"compare.make_texts_of = lambda _: texts\ncompare.main({flags!r})"
    )
    comparison = subprocess.Popen([sys.executable, "-c", code], cwd=compare.HERE.parents[1])
    while comparison.poll() is None and not (pid.exists() and pid.read_text()):
        time.sleep(0.05)
    comparison.terminate()
    assert comparison.wait(20) == 143
    assert not usage.tree(int(pid.read_text()))


def test_what_is_skipped_or_took_too_long_is_not_asked_again(tmp_path: Path) -> None:
    entries = {"a": {"command": COMMAND}, "b": {"command": COMMAND, "workloads": {"prefill": {"repetitions": 1}}}}
    flags = ("--skip=a:prefill", "--skip=a:start-warm", "--longest=0.001", "--repetitions=2")
    _, *rows = compare_here(tmp_path, entries, "--workloads=start-warm,prefill,prefix", *flags)
    assert [(row["peer"], row["workload"], row["repetition"]) for row in rows] == [
        ("b", "prefill", 0),
        ("a", "prefix", 0),
    ]


def test_a_cold_start_finds_an_empty_cache_and_a_warm_one_what_it_left(tmp_path: Path) -> None:
    script = f"import os, pathlib, runpy, sys\nf = pathlib.Path({str(tmp_path)!r})\n"
    script += "c = pathlib.Path(sys.argv[2])\n(f / 'seen').open('a').write(f'{(c / \"kept\").exists()} ')\n"
    script += f"(c / 'kept').touch()\nsys.argv[2:] = []\nrunpy.run_path({str(SERVER)!r}, run_name='__main__')\n"
    entries = {"a": {"command": [sys.executable, "-W", "ignore", "-c", script, "${PORT}", "${CACHE}"]}}
    _, cold, warm = compare_here(tmp_path, entries, "--workloads=start-cold,start-warm")
    assert (tmp_path / "seen").read_text() == "False True "
    assert (cold["workload"], warm["workload"]) == ("start-cold", "start-warm")
    assert cold["ready_s"] <= cold["first_token_s"] <= cold["wall_s"]
    assert cold["server_cpu_s"] > 0


def test_a_server_that_does_not_start_is_told_and_the_others_are_measured(tmp_path: Path) -> None:
    entries = {"bad": {"command": [sys.executable, "-c", "raise SystemExit('no model')"]}, "good": {"command": COMMAND}}
    _, bad, *rows = compare_here(tmp_path, entries, "--workloads=start-warm,prefill", "--repetitions=1")
    assert "no model" in bad["failed"]
    assert [(row["peer"], row["workload"]) for row in rows] == [("good", "start-cold"), ("good", "prefill")]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"commands": []}, "entry 'a' has .*accepted: .*command"),
        ({"command": ["${MODEL}"]}, r"uses \$\{MODEL\}, which is not set; give --set MODEL=VALUE"),
    ],
)
def test_a_wrong_entry_is_told_by_name(tmp_path: Path, entry: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PeerServer(load_peers(peers_file(tmp_path, {"a": entry}))[0], {}, tmp_path / "log")
    with pytest.raises(ValueError, match=r"no entries \['b'\]; accepted: a"):
        load_peers(peers_file(tmp_path, {"a": {"url": "http://127.0.0.1:9"}}), ["b"])


def test_the_project_s_own_entries_are_whole_once_the_variables_are_given() -> None:
    variables = dict.fromkeys(("PORT", "CACHE", "MODEL", "GGUF", "LLAMA", "VLLM", "TRANSFORMERS"), "x")
    for peer in load_peers(compare.HERE / "peers.json"):
        filled = peer.filled({**compare.default_variables(), **variables})
        assert "${" not in " ".join((*filled.command, *filled.env.values(), filled.url, filled.model))


def test_ratios_say_how_much_faster_whatever_the_metric() -> None:
    rows = [{"repetition": 0, "s": 2.0, "rate": 30.0}, {"repetition": 1, "s": 4.0, "rate": 10.0}]
    base = [{"repetition": 0, "s": 4.0, "rate": 10.0}, {"repetition": 1, "s": 4.0, "rate": 20.0}]
    assert speed_ratios(rows, base, Metric("s", "")) == [2.0, 1.0]
    assert speed_ratios(rows, base, Metric("rate", "", more_is_better=True)) == [3.0, 0.5]
    assert spread([3.0, 1.0, 2.0]) == "2 (1–3)"


def test_doubts_name_what_spoils_a_row() -> None:
    good = {"max_lag_s": 0.0, "other_cpu": 0.1, "stolen_cpu": 0.0, "output_tokens": 4, "wanted_tokens": 4}
    assert Doubts().of(good) == []
    assert Doubts().of({**good, "other_cpu": None}) == []
    for field, value, word in (
        *[("max_lag_s", 0.5, "late"), ("other_cpu", 0.9, "cores"), ("stolen_cpu", 0.9, "cores")],
        *[("errors", ["x"], "failed"), ("output_tokens", 3, "3 tokens came, 4 were asked for")],
    ):
        assert [word in reason for reason in Doubts().of({**good, field: value})] == [True]


def test_usage_counts_children_and_what_they_hold() -> None:
    burn = "import time\nx = bytearray(60 << 20)\nwhile time.process_time() < 0.3: pass\nprint(1, flush=True)\ninput()"
    parent = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {burn!r}])"
    process = subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        assert 0.3 <= usage.cpu_s(process.pid) < 5
        assert usage.peak_rss_mib(process.pid) > 60
        assert usage.pss_mib(process.pid) > 60
        process.communicate(b"\n")
    assert usage.cpu_s(process.pid) == 0


def test_the_plot_is_a_picture_of_every_workload_measured(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from scripts.bench.plot import plot

    rows = [
        {"peer": peer, "workload": name, "repetition": 0, "ttft_p50_s": 1.0, "itl_p50_s": None}
        for peer in ("a", "b")
        for name in ("single", "prefill")
    ]
    plot(rows, "a", tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
