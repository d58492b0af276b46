"""Starts in processes of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxllm.bench.startup import Start, StartFailed, StartupArgs, StartupResult, run_startup
from jaxllm.bench.startup_child import main, peak_bytes
from jaxllm.errors import ConfigError


def start(ready_s: float, peak_mib: float = 1.0) -> Start:
    return Start(ready_s, ready_s + 1, ready_s / 2, int(peak_mib * 2**20), (("tokenizer", 0.5, 0.25),))


def test_a_start_says_what_it_took(script_file: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    args = StartupArgs(num_iters_cold=0, num_iters_warmup=0, num_iters_warm=1)
    result = run_startup(args, {"executor": f"scripted:{script_file}"}, progress=lambda *each: seen.append(each))
    (each,) = result.warm
    assert 0 < each.ready_s <= each.first_token_s
    assert each.cpu_s > 0
    assert 2**23 < each.peak_bytes < 2**31
    assert "tokenizer" in [name for name, _, _ in each.phases]
    assert seen == [("starts", 1, 1)]


def test_a_start_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main({"executor": "scripted:/missing.json"}) == 1
    assert "/missing.json" in capsys.readouterr().err
    child = ("-c", "import sys; print('some noise'); sys.exit('first\\nsecond')")
    monkeypatch.setattr("jaxllm.bench.startup._CHILD", child)
    with pytest.raises(StartFailed, match="a start ended with exit code 1: first / second"):
        run_startup(StartupArgs(num_iters_cold=1, num_iters_warm=0), {})


def test_cold_starts_have_folders_of_their_own_and_warm_ones_share_a_filled_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A child that says which folder it was given, and how many starts the folder had seen."""
    code = """
import json, os, sys, time
folder = os.environ["JAXLLM_CACHE_DIR"]
assert json.loads(sys.argv[1])["compilation_cache_dir"] == folder
assert "JAX_COMPILATION_CACHE_DIR" not in os.environ
seen = len(os.listdir(folder))
open(os.path.join(folder, str(seen)), "w").close()
now = time.monotonic()
print(json.dumps(dict(ready_s=now, first_token_s=now, cpu_s=0.0, peak_bytes=seen, phases=[[folder, 0, 0]])))
"""
    monkeypatch.setattr("jaxllm.bench.startup._CHILD", ("-S", "-c", code))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    result = run_startup(StartupArgs(num_iters_cold=2, num_iters_warmup=1, num_iters_warm=2), {})
    assert [each.peak_bytes for each in result.cold] == [0, 0]
    assert [each.peak_bytes for each in result.warm] == [1, 2]
    folders = [each.phases[0][0] for each in (*result.cold, *result.warm)]
    assert len(set(folders)) == 3
    assert not any(Path(folder).exists() for folder in folders)


def test_tables_show_medians_with_their_spread() -> None:
    result = StartupResult((start(3), start(1), start(2)), (start(1, 200.0),))
    heading, cold, warm = result.rows()
    assert heading[1:] == ("ready, s", "first token, s", "CPU, s", "peak memory, MiB")
    assert cold[1] == "2.00 (1.00 to 3.00)"
    assert (warm[0], warm[4]) == ("warm, 1 starts", "200 (200 to 200)")
    assert result.phase_rows()[1] == ("tokenizer", "0.50 (0.25)", "0.50 (0.25)")
    figures = result.as_dict()
    assert figures["avg_cold_startup_time"] == 2.0
    assert figures["cold"]["median"]["ready_s"] == 2
    assert figures["warm"]["peak_bytes"] == [200 * 2**20]


def test_a_kind_that_was_left_out_is_not_shown() -> None:
    result = StartupResult((), (start(1),))
    assert [row[0] for row in result.rows()[1:]] == ["warm, 1 starts"]
    assert "cold" not in result.as_dict()


def test_peak_memory_holds_what_was_taken_and_given_back() -> None:
    before = peak_bytes()
    taken = bytearray(before + 2**26)
    taken[::4096] = b"x" * len(taken[::4096])
    del taken
    assert peak_bytes() > before + 2**25


def test_nothing_to_measure_is_refused() -> None:
    with pytest.raises(ConfigError, match="leave nothing to measure"):
        StartupArgs(num_iters_cold=0, num_iters_warm=0)
    with pytest.raises(ConfigError, match="num_iters_warmup=-1"):
        StartupArgs(num_iters_warmup=-1)
