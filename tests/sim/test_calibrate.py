"""Calibration against runs whose prices are known: the real core on a modelled device, recorded."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from jaxllm.config.engine import CacheConfig, SchedulerConfig
from jaxllm.engine.core import EngineCore
from jaxllm.engine.messages import AddRequest
from jaxllm.engine.trace import Header
from jaxllm.engine.trace_file import FileRecorder
from jaxllm.errors import ConfigError
from jaxllm.memory.manager import KVManager
from jaxllm.memory.plan import KVCachePlan, KVGroup
from jaxllm.memory.spec import FullKV
from jaxllm.scheduler.registry import create_policy
from jaxllm.scheduler.scheduler import Scheduler
from jaxllm.scheduler.stop import StopRules
from jaxllm.sim.calibrate import error_of, fit_linear, fit_table, held_out_error, read_steps
from jaxllm.sim.clock import VirtualClock
from jaxllm.sim.cost import CostModel, shape_of
from jaxllm.sim.executor import SimulatedExecutor
from jaxllm.sim.linear import COEFFICIENTS, Linear
from jaxllm.types.sampling import SamplingParams
from jaxllm.types.step import SchedulerOutput
from scripts.calibrate_cost import _padding, main

TRUE = Linear(step_s=0.012, token_s=3e-4, row_s=5e-4, context_s=2e-6, pair_s=4e-7)


@dataclass
class Noisy:
    """A device whose steps scatter, and of which one in fifty takes ten times as long."""

    cost: CostModel
    rng: np.random.Generator

    def step_seconds(self, plan: SchedulerOutput) -> float:
        slow = 10 if self.rng.random() < 0.02 else 1
        return self.cost.step_seconds(plan) * self.rng.normal(1, 0.05) * slow


def record(path: Path, cost: CostModel, *, is_async: bool = True, gap_s: float = 0.0, seed: int = 0) -> float:
    """60 requests of many lengths, each `gap_s` after the one before or at once; how long they took."""
    config = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=256, async_scheduling=is_async, max_model_len=4096)
    plan = KVCachePlan((KVGroup((0,), FullKV(16, 1, 1)),), 4000, 16)
    kv = KVManager(plan, enable_prefix_caching=False)
    scheduler = Scheduler(config, kv, create_policy("fcfs", {}), StopRules(frozenset(), 4096))
    clock = VirtualClock(0.0)
    recorder = FileRecorder(path, Header(config, CacheConfig(), plan, ()))
    executor = SimulatedExecutor(cost, clock)
    core = EngineCore(executor, scheduler, kv, clock, async_scheduling=is_async, trace=recorder)
    rng = np.random.default_rng(seed)
    for number in range(60):
        due_s = number * gap_s
        while core.has_work and clock.now_s() < due_s:
            core.step()
        clock.advance_to(due_s)
        prompt = tuple(rng.integers(0, 9999, int(rng.lognormal(4.5, 1.0)) + 1).tolist())
        params = SamplingParams(max_tokens=int(rng.integers(1, 60)), ignore_eos=True, temperature=0.0)
        core.add(AddRequest(request_id=str(number), prompt_ids=prompt[:3000], params=params, arrival_s=due_s, seed=0))
    while core.has_work:
        core.step()
    core.close()
    return clock.now_s()


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("timing", ["step", "device"])
def test_known_prices_are_recovered(tmp_path: Path, is_async: bool, timing: str) -> None:
    record(tmp_path / "t.jsonl", TRUE, is_async=is_async)
    recorded = read_steps(tmp_path / "t.jsonl", timing=timing)  # pyright: ignore
    found = fit_linear(recorded.steps)
    for name in COEFFICIENTS:
        if name not in ("row_s", "sample_s"):  # all rows of most steps sample: their prices cannot be told apart
            assert found.coefficients[name] == pytest.approx(TRUE.coefficients[name], rel=0.01)
    assert found.row_s + found.sample_s == pytest.approx(TRUE.row_s, rel=0.02)
    assert recorded.num_untimed <= 1
    assert error_of(found, recorded.steps).mean_relative < 1e-3


def test_times_of_steps_add_up_to_the_run(tmp_path: Path) -> None:
    total_s = record(tmp_path / "t.jsonl", TRUE)
    steps = read_steps(tmp_path / "t.jsonl").steps
    last_s = TRUE.seconds(steps[-1].shape)  # nobody sees the end of the last
    assert sum(step.seconds for step in steps) == pytest.approx(total_s, abs=2 * last_s)


def test_idle_time_is_no_step_s(tmp_path: Path) -> None:
    record(tmp_path / "t.jsonl", TRUE, gap_s=1.7)
    recorded = read_steps(tmp_path / "t.jsonl")
    assert recorded.num_untimed > 10
    for step in recorded.steps:
        assert step.seconds == pytest.approx(TRUE.seconds(step.shape))


def test_noise_and_outliers_do_not_bend_predictions(tmp_path: Path) -> None:
    record(tmp_path / "t.jsonl", Noisy(TRUE, np.random.default_rng(0)))
    found = fit_linear(read_steps(tmp_path / "t.jsonl").steps)
    record(tmp_path / "clean.jsonl", TRUE, seed=1)
    error = error_of(found, read_steps(tmp_path / "clean.jsonl").steps)
    assert error.p90_relative < 0.05
    assert abs(error.total_relative) < 0.03


def test_padded_steps_are_seen_through(tmp_path: Path) -> None:
    padding = _padding(16, 256)
    record(tmp_path / "t.jsonl", TRUE.padded(padding))
    steps = read_steps(tmp_path / "t.jsonl").steps
    assert error_of(fit_linear(steps, padding=padding), steps).mean_relative < 0.01
    assert error_of(fit_linear(steps), steps).mean_relative > 0.03


@pytest.mark.parametrize("fit", [fit_linear, fit_table])
def test_steps_that_were_left_out_are_predicted(tmp_path: Path, fit: Callable) -> None:
    record(tmp_path / "t.jsonl", TRUE)
    error = held_out_error(fit, read_steps(tmp_path / "t.jsonl").steps)
    assert error.median_relative < 0.03
    assert abs(error.total_relative) < 0.03


def test_a_calibrated_simulation_takes_as_long_as_the_run(tmp_path: Path) -> None:
    """Calibrated on one load, asked about another."""
    record(tmp_path / "t.jsonl", Noisy(TRUE, np.random.default_rng(1)), seed=3)
    found = fit_linear(read_steps(tmp_path / "t.jsonl").steps)
    real_s = record(tmp_path / "other.jsonl", TRUE, seed=4, is_async=False)
    assert record(tmp_path / "sim.jsonl", found, seed=4, is_async=False) == pytest.approx(real_s, rel=0.03)


@pytest.mark.parametrize("kind", ["linear", "table"])
def test_the_script_writes_what_a_simulation_reads(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path / "t.jsonl", TRUE)
    out = tmp_path / "cost.json"
    assert main([str(tmp_path / "t.jsonl"), "--out", str(out), "--kind", kind]) == 0
    assert "left out, " in capsys.readouterr().out
    assert json.loads(out.read_text())["kind"] == kind


def test_the_script_writes_the_shapes_of_the_engine_that_is_asked_for(tmp_path: Path) -> None:
    record(tmp_path / "t.jsonl", TRUE.padded(_padding(16, 256)))
    out = tmp_path / "cost.json"
    flags = ["--out", str(out), "--padding", "--max-num-batched-tokens", "1024"]
    assert main([str(tmp_path / "t.jsonl"), *flags]) == 0
    found = Linear.load(out)
    assert found.padding == _padding(16, 1024)
    assert found.token_s == pytest.approx(TRUE.token_s, rel=0.1)


def broken(tmp_path: Path, edit: Callable[[list[bytes]], list[bytes]]) -> Path:
    record(tmp_path / "t.jsonl", TRUE)
    lines = (tmp_path / "t.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "b.jsonl").write_bytes(b"".join(edit(lines)))
    return tmp_path / "b.jsonl"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda lines: lines[1:], r"b.jsonl', line 1: no header"),
        (lambda lines: [], r"line 1: no header"),
        (lambda lines: [*lines[:80], b'{"type":"planned"}\n', *lines[80:]], r"b.jsonl', line 81: .*now_s"),
        (lambda lines: [*lines[:80], b"?\n", *lines[80:]], r"b.jsonl', line 81: "),
        (
            lambda lines: [*lines[:80], b'{"type":"collected","step":99999,"tokens":{}}\n'],
            r"line 81: collected: step=9",
        ),
        (lambda lines: lines[:70], r"times \d steps; accepted: a run of at least 20"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(
    tmp_path: Path, edit: Callable, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = broken(tmp_path, edit)
    with pytest.raises(ConfigError, match=message):
        read_steps(path)
    assert main([str(path), "--out", str(tmp_path / "x.json")]) == 2
    assert "error: " in capsys.readouterr().err


def test_a_trace_that_was_cut_off_is_read_to_its_last_whole_line(tmp_path: Path) -> None:
    path = broken(tmp_path, lambda lines: [*lines[:-20], lines[-20][:-5]])
    assert len(read_steps(path).steps) > 100


def test_a_missing_file_and_folder_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none.jsonl"), "--out", "x"]) == 2
    record(tmp_path / "t.jsonl", TRUE)
    assert main([str(tmp_path / "t.jsonl"), "--out", str(tmp_path / "no" / "x.json")]) == 2
    err = capsys.readouterr().err
    assert "none.jsonl' cannot be read" in err
    assert "x.json' cannot be written" in err


def test_shapes_of_a_trace_are_those_of_the_plans(tmp_path: Path) -> None:
    seen: list[object] = []

    class Watching:
        def step_seconds(self, plan: SchedulerOutput) -> float:
            seen.append(shape_of(plan))
            return TRUE.step_seconds(plan)

    record(tmp_path / "t.jsonl", Watching())
    assert [step.shape for step in read_steps(tmp_path / "t.jsonl", timing="device").steps] == seen
