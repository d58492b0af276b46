"""`jaxllm bench`: flags in, tables, JSON and pictures out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxllm.bench.startup import Start, StartupArgs, StartupResult
from tests.bench.odd_server import DONE, chunked, odd_server, token, usage

Bench = Callable[..., tuple[int, str, str]]
SMALL_RANDOM = ("--random-input-len", 8, "--random-output-len", 4)
GOOD = chunked(token("a"), token("b", "stop"), usage(8, 2), DONE)


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        ("latency", ["--batch-size", "--num-iters-warmup", "--output-json", "--profile", "--max-num-seqs"]),
        ("throughput", ["--dataset-name", "--random-range-ratio", "--prefix-repetition-num-prefixes", "--n"]),
        ("serve", ["--request-rate", "--burstiness", "--ramp-up-end-rps", "--goodput", "--metric-percentiles"]),
        ("startup", ["--num-iters-cold", "--num-iters-warm", "--model"]),
        ("scheduler", ["--num-running", "--device-ms", "--plot"]),
    ],
)
def test_each_kind_has_vllms_flags(bench: Bench, kind: str, flags: list[str]) -> None:
    code, out, _ = bench(kind, "--help")
    assert code == 0
    assert f"usage: jaxllm bench {kind}" in out
    for flag in flags:
        assert flag in out, flag


def test_without_or_with_a_wrong_kind_the_kinds_are_named(bench: Bench) -> None:
    code, out, _ = bench()
    assert code == 2
    assert "  startup " in out
    code, _, err = bench("fly")
    assert (code, err) == (2, "jaxllm: bench has no 'fly'; accepted: latency, throughput, serve, startup, scheduler\n")


def test_latency_writes_table_json_and_picture(bench: Bench, script_file: Path, tmp_path: Path) -> None:
    out_file, plot = tmp_path / "out.json", tmp_path / "out.png"
    flags = ["--input-len", 4, "--output-len", 3, "--batch-size", 2, "--num-iters", 2, "--num-iters-warmup", 0]
    engine = ["--executor", f"scripted:{script_file}"]
    code, out, _ = bench("latency", *engine, *flags, "--profile", "--json", out_file, "--plot", plot)
    assert code == 0
    assert "average latency" in out
    assert "detokenise" in out
    figures = json.loads(out_file.read_text())
    assert len(figures["latencies"]) == 2
    assert figures["settings"]["batch_size"] == 2
    assert "schedule" in figures["profile"]["phases"]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_throughput_writes_json_alone_to_stdout(bench: Bench, script_file: Path, tmp_path: Path) -> None:
    plot = tmp_path / "out.svg"
    engine = ["--executor", f"scripted:{script_file}", "--num-prompts", 3]
    code, out, err = bench("throughput", *engine, *SMALL_RANDOM, "--json", "-", "--plot", plot)
    assert code == 0
    assert json.loads(out)["output_tokens"] == 12
    assert "output throughput" in err
    assert "<svg" in plot.read_text()


def test_serve_reports_and_keeps_what_it_saw(bench: Bench, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "hello"}\n')
    flags = ["--dataset-name", "custom", "--dataset-path", prompts, "--num-prompts", 3, "--model", "toy"]
    keep = ["--save-detailed", "--result-dir", tmp_path, "--metadata", "run=7", "--plot", tmp_path / "p.pdf"]
    with odd_server(GOOD) as server:
        code, out, _ = bench("serve", "--base-url", server.url, *flags, *keep, "--goodput", "ttft:60000", "e2el:60000")
    assert code == 0
    assert "request goodput" in out
    (saved,) = tmp_path.glob("openai-infqps-toy-*.json")
    figures = json.loads(saved.read_text())
    assert (figures["completed"], figures["request_rate"], figures["run"]) == (3, "inf", "7")
    assert figures["generated_texts"] == ["ab"] * 3
    assert (tmp_path / "p.pdf").read_bytes().startswith(b"%PDF")


def test_serve_fails_where_every_request_did(bench: Bench, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "hello"}\n')
    flags = ["--dataset-name", "custom", "--dataset-path", prompts, "--num-prompts", 2, "--model", "toy"]
    with odd_server(chunked(b'{"error": {"message": "full"}}', status="503 No")) as server:
        code, out, _ = bench("serve", "--base-url", server.url, *flags)
    assert code == 1
    assert "2 x" in out
    assert "HTTP 503: full" in out


def test_secrets_are_in_no_file(bench: Bench, tmp_path: Path) -> None:
    prompts, out_file = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    prompts.write_text('{"prompt": "hello"}\n')
    flags = ["--dataset-name", "custom", "--dataset-path", prompts, "--num-prompts", 1, "--model", "toy"]
    with odd_server(GOOD) as server:
        code, out, err = bench(
            "serve", "--base-url", server.url, *flags, "--api-key", "sesame", "--header", "X=sesame", "--json", out_file
        )
    assert code == 0
    assert "sesame" not in out + err + out_file.read_text()


def test_startup_and_scheduler_draw_too(bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: list[dict[str, Any]] = []

    def run_startup(args: StartupArgs, flags: dict[str, Any], progress: object) -> StartupResult:
        given.append(flags)
        starts = tuple(Start(s, s + 1, s, 2**28, (("tokenizer", 0.1, 0.1),)) for s in (1.0, 2.0))
        return StartupResult(starts, starts[: args.num_iters_warm])

    monkeypatch.setattr("jaxllm.bench.startup.run_startup", run_startup)
    plot = tmp_path / "startup.png"
    code, out, _ = bench("startup", "toy", "--num-iters-warm", 1, "--plot", plot, "--max-num-seqs", 3)
    assert code == 0
    assert (given[0]["model"], given[0]["max_num_seqs"]) == ("toy", 3)
    assert "warm, 1 starts" in out
    assert plot.stat().st_size > 1000
    plot = tmp_path / "scheduler.png"
    flags = ["--num-running", "2,4", "--num-steps", 5, "--num-runs", 2, "--device-ms", 0.1, "--device-requests", 2]
    code, out, _ = bench("scheduler", *flags, "--plot", plot)
    assert code == 0
    assert "next step planned meanwhile" in out
    assert plot.stat().st_size > 1000


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["--json", "/nowhere/out.json"], "json='/nowhere/out.json' is no place for a file"),
        (["--plot", "out.txt"], "plot='out.txt'; accepted: a name that ends in .png"),
        (["--batch-size", 0], "batch_size=0"),
        (["--page-size", 0], "page_size=0"),
        (["--config", "/nowhere.yaml"], "/nowhere.yaml"),
    ],
)
def test_what_is_wrong_is_said_before_a_model_is_loaded(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, args: list[object], word: str
) -> None:
    def load(**flags: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("jaxllm.llm.LLM", load)
    code, out, err = bench("latency", *args)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert word in err


def test_a_picture_without_matplotlib_is_refused_at_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, err = bench("scheduler", "--plot", "out.png")
    assert (code, err) == (2, "jaxllm: plot needs matplotlib; install jaxllm[bench]\n")


def test_a_model_may_be_named_bare_or_by_its_flag(bench: Bench, tmp_path: Path) -> None:
    for args in ([tmp_path / "nothing"], ["--model", tmp_path / "nothing"]):
        code, _, err = bench("latency", *args)
        assert code == 2
        assert "nothing" in err


def test_serve_without_a_tokenizer_says_which_flag_gives_one(bench: Bench) -> None:
    with odd_server(chunked(b'{"data": [{"id": "some/where"}]}')) as server:
        code, _, err = bench("serve", "--base-url", server.url, "--num-prompts", 1)
    assert code == 2
    assert "give --tokenizer FOLDER" in err


def test_a_configuration_file_holds_the_same_names(bench: Bench, script_file: Path, tmp_path: Path) -> None:
    config = tmp_path / "bench.yaml"
    config.write_text(
        f"executor: scripted:{script_file}\ninput-len: 4\noutput-len: 3\nnum_iters: 1\nnum-iters-warmup: 0\n"
    )
    code, out, _ = bench("latency", "--config", config, "--batch-size", 2, "--json", "-")
    assert code == 0
    settings = json.loads(out)["settings"]
    assert (settings["input_len"], settings["num_iters"], settings["batch_size"]) == (4, 1, 2)
