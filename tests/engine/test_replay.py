"""A recorded core decides the same when it is given the same; what differs is named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from jaxllm.engine.replay import replay
from jaxllm.errors import ConfigError
from jaxllm.scheduler.registry import BUILT_IN
from tests.helpers.traced_run import traced_run

Lines = list[dict[str, Any]]


def read(path: Path) -> Lines:
    return [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]


def write(path: Path, lines: Lines) -> Path:
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    traced_run(path)
    return path


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("policy", BUILT_IN)
def test_a_replay_decides_each_step_as_recorded(policy: str, async_scheduling: bool, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    traced = traced_run(path, policy=policy, async_scheduling=async_scheduling, seed=3)
    assert traced.num_preemptions > 0 and traced.num_steps > 100
    found = replay(path)
    assert found.difference is None
    assert found.ended == "closed"
    assert (found.num_requests, found.num_steps) == (traced.num_arrived, traced.num_steps)
    assert found.num_preemptions == traced.num_preemptions
    assert {"arrived", "aborted", "cache_reset", "planned", "collected"} <= {line["type"] for line in read(path)}


def test_the_same_script_gives_the_same_plans_in_another_process_too(tmp_path: Path) -> None:
    """Strings and objects hash otherwise there: no decision may follow the order of a set."""
    hashes: list[str] = []
    for seed in ("1", "2"):
        folder = tmp_path / seed
        folder.mkdir()
        done = subprocess.run(
            [sys.executable, "-m", "tests.helpers.traced_run", str(folder)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        hashes.append(done.stdout)
    assert hashes[0] == hashes[1]
    found = dict(line.split() for line in hashes[0].splitlines())
    assert set(found) == set(BUILT_IN)
    assert len(set(found.values())) == len(found), "policies that decide alike are no test"


def test_another_scheduler_differs_at_the_first_step_it_decides_otherwise(recorded: Path, tmp_path: Path) -> None:
    header, *lines = read(recorded)
    header["scheduler"]["max_num_batched_tokens"] = 20
    found = replay(write(tmp_path / "less.jsonl", [header, *lines]))
    plans = [line["decision"] for line in lines if line["type"] == "planned" and "decision" in line]
    first = next(plan["step"] for plan in plans if sum(plan["num_tokens"]) > 20)
    assert found.difference is not None
    assert found.difference.step == first == found.num_steps
    assert "num_tokens" in found.difference.fields
    assert f"step {first} was decided otherwise" in str(found.difference)


def test_what_differs_is_shown_as_recorded_and_as_now(recorded: Path, tmp_path: Path) -> None:
    lines = read(recorded)
    changed = next(line for line in lines if line.get("decision", {}).get("step") == 7)
    changed["decision"]["slots"][0] += 100
    changed["hash"] = "0" * 32
    difference = replay(write(tmp_path / "changed.jsonl", lines)).difference
    assert difference is not None
    assert (difference.step, difference.fields) == (7, ("slots",))
    assert difference.recorded == f"  slots={changed['decision']['slots']}"
    assert difference.replayed != difference.recorded


def test_an_answer_that_is_missing_is_a_difference(recorded: Path, tmp_path: Path) -> None:
    lines = read(recorded)
    gone = next(i for i, line in enumerate(lines) if line["type"] == "collected" and line["step"] == 5)
    difference = replay(write(tmp_path / "gone.jsonl", lines[:gone] + lines[gone + 1 :])).difference
    assert difference is not None
    assert difference.fields == ("steps in flight",)


def test_a_trace_cut_anywhere_replays_as_far_as_it_goes(recorded: Path, tmp_path: Path) -> None:
    whole = recorded.read_bytes()
    cut = tmp_path / "cut.jsonl"
    for share in (0.2, 0.5, 0.71, 0.9):
        cut.write_bytes(whole[: int(len(whole) * share)])
        found = replay(cut)
        assert found.difference is None
        assert found.ended is None
        assert 0 < found.num_steps < replay(recorded).num_steps


def test_a_core_that_died_of_an_answer_is_replayed_to_that_step(recorded: Path, tmp_path: Path) -> None:
    lines = read(recorded)
    end = next(i for i, line in enumerate(lines) if line["type"] == "collected" and line["step"] == 5)
    lines[end]["tokens"] = {}
    found = replay(write(tmp_path / "died.jsonl", lines[: end + 1]))
    assert found.difference is None
    assert found.num_steps == 7  # step 6 was in flight
    assert replay(write(tmp_path / "lived.jsonl", lines)).difference is not None


def test_every_cut_between_lines_replays(recorded: Path, tmp_path: Path) -> None:
    lines = read(recorded)
    for end in range(20, 80):
        assert replay(write(tmp_path / "cut.jsonl", lines[:end])).difference is None


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (b"", "line 1: no header of format 1"),
        (b'{"type": "ended", "reason": "x"}\n', "line 1: no header of format 1"),
        (b"not json\n", "line 1: "),
        (b'{"type": "other"}\n', "line 1: Invalid value 'other'"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_line(text: bytes, word: str, tmp_path: Path) -> None:
    path = tmp_path / "no.jsonl"
    path.write_bytes(text)
    with pytest.raises(ConfigError) as caught:
        replay(path)
    assert word in str(caught.value)


def test_a_trace_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        replay(tmp_path / "none.jsonl")
