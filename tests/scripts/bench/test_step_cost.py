"""What a step moves and computes, and the costs fitted to it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jaxllm.engine.executor import Ticket
from jaxllm.runner.buckets import build_buckets
from jaxllm.types.step import SchedulerOutput
from scripts.bench import scaling
from scripts.bench.step_cost import Fit, Rows, StepSize, fit, step_size
from tests.helpers.tiny_engine import TINY_LLAMA
from tests.runner.drive import PAGE_SIZE, start_oracle

VOCAB = TINY_LLAMA.vocab_size


def sizes(rows: Rows, matrices: str = "scanned") -> StepSize:
    """Of a Runner in name only: two layers of one matrix each, and 256 bytes a page of 8 tokens."""
    params = {
        "embed.table": jax.ShapeDtypeStruct((VOCAB, 64), np.float32),
        "layers.mix": jax.ShapeDtypeStruct((2, 64, 100), np.float32),
        "head.weight": jax.ShapeDtypeStruct((64, VOCAB), np.float32),
    }
    runner: Any = SimpleNamespace(
        model=SimpleNamespace(params=params, head_names=("head.weight",), config=TINY_LLAMA, matrices=matrices),
        buckets=build_buckets(4, 64, 16),
        kv_plan=SimpleNamespace(page_bytes=256),
    )
    return step_size(runner, rows, 8)


def test_a_decode_reads_the_weights_once_and_the_pages_of_each_request() -> None:
    found = sizes(Rows(3, 1, 20))  # 21 tokens: 3 pages each; computed as 4 rows, 4 logit rows
    assert found.weight_bytes == 4 * (2 * 64 * 100 + 64 * VOCAB)
    assert found.kv_bytes == 3 * 3 * 256 + 3 * 256 // 8
    linear = 2 * 4 * 2 * 64 * 100 + 2 * 4 * 64 * VOCAB
    assert found.flops == linear + 3 * 2 * 4 * 16 * 21 * 4  # requests, layers, heads, width, keys


def test_kernels_that_know_the_real_rows_compute_no_padding() -> None:
    padded, real = (sizes(Rows(3, 1, 20), matrices) for matrices in ("apart", "whole"))
    assert padded.flops - real.flops == 2 * 2 * 64 * 100 + 2 * 64 * VOCAB  # a row of four
    assert (padded.weight_bytes, padded.kv_bytes) == (real.weight_bytes, real.kv_bytes)


def test_a_chunk_of_a_prompt_attends_to_what_is_before_each_of_its_tokens() -> None:
    pairs = sum(1 for query in range(10, 42) for key in range(query + 1))
    assert sizes(Rows(1, 32, 10)).flops - 2 * 32 * 2 * 64 * 100 - 2 * 4 * 64 * VOCAB == 4 * 2 * 4 * 16 * pairs


GRID = [StepSize(1000, kv, flops) for kv in (10**6, 10**8, 10**9) for flops in (10**8, 10**9, 10**11)]


def test_the_fit_finds_the_costs_that_made_the_times() -> None:
    true = Fit(0.004, 5e9, 2e11, 0, 0)
    found = fit(GRID, [true.seconds(size) for size in GRID])
    assert found.fixed_s == pytest.approx(0.004)
    assert found.kv_bytes_s == pytest.approx(5e9)
    assert found.flops_s == pytest.approx(2e11)
    assert found.max_error < 1e-9


def test_no_cost_comes_out_below_zero() -> None:
    found = fit(GRID, [0.01 + size.flops / 1e12 - size.kv_bytes / 1e12 for size in GRID])
    assert found.kv_bytes_s is None
    assert found.fixed_s > 0
    assert 0 < found.mean_error < found.max_error < 0.5


def test_settings_hold_every_step_of_a_sweep() -> None:
    for sweep in scaling.sweeps(16, 600):
        points = [(page_size, rows) for _, page_size, rows in sweep.points]
        page_size = points[-1][0]
        args = scaling.engine_args([(page_size, rows) for size, rows in points if size == page_size])
        assert args.max_num_seqs is not None
        assert args.max_num_batched_tokens is not None
        for _, rows in points:
            assert rows.num_rows <= args.max_num_seqs
            assert rows.num_rows * rows.num_tokens <= args.max_num_batched_tokens


class Recorder:
    """A Runner that only remembers what it was given."""

    def __init__(self) -> None:
        self.plans: list[SchedulerOutput] = []

    def submit(self, plan: SchedulerOutput) -> Ticket:
        self.plans.append(plan)
        return Ticket(plan.step_id)

    def collect(self, ticket: Ticket) -> None:
        assert ticket.step_id == self.plans[-1].step_id


def test_each_request_has_pages_of_its_own_and_every_step_is_the_same() -> None:
    recorder: Any = Recorder()
    walls, _ = scaling.Steps(recorder, 8).measure(Rows(3, 1, 20), 0.0)
    first, *others = recorder.plans
    assert len(walls) == 5
    assert len(others) == 2 + 5
    assert [(new.slot, len(new.token_ids), new.num_cached) for new in first.new] == [(i, 21, 20) for i in range(3)]
    (diff,) = first.page_diffs
    assert sorted(zip(diff.slots.tolist(), diff.indices.tolist(), strict=True)) == [
        (slot, index) for slot in range(3) for index in range(3)
    ]
    assert sorted(diff.pages.tolist()) == list(range(1, 10))  # page 0 is nobody's
    for plan in others:
        assert plan.new == ()
        assert len(plan.page_diffs[0]) == 0
        assert (plan.rows.starts.tolist(), plan.rows.num_tokens.tolist()) == ([20] * 3, [1] * 3)
        assert plan.rows.num_decode == 3


@pytest.mark.slow
def test_a_runner_takes_the_same_step_again_and_again_and_compiles_nothing() -> None:
    runner = start_oracle(num_pages=40, max_num_seqs=2, max_num_batched_tokens=4)
    steps = scaling.Steps(runner, PAGE_SIZE)
    for rows in (Rows(2, 1, 30), Rows(1, 4, 0)):
        walls, cpu_s = steps.measure(rows, 0.0)
        assert len(walls) == 5
        assert min(walls) > 0
        assert cpu_s > 0
    assert runner.stats().num_steps - 1 == 2 * (1 + 2 + 5)  # the first, the warm ones, the measured ones
    assert runner.compilations_after_ready == 0
    runner.close()


def test_results_are_read_again_only_for_the_same_settings(tmp_path: Path) -> None:
    point = scaling.Point("batch", 1, 16, Rows(1, 1, 255), StepSize(8, 4, 2), 0.1, 0.09, 0.2, 0.1, 5)
    path, found = tmp_path / "scaling.json", Fit(0.1, None, 1e9, 0.0, 0.0)
    scaling.write(path, {"dtype": "float32"}, [point], found)
    assert json.loads(path.read_text())["fit"]["flops_s"] == 1e9
    assert scaling.read_points(path, {"dtype": "float32"}) == [point]
    assert scaling.read_points(path, {"dtype": "bfloat16"}) == []
    assert scaling.read_points(tmp_path / "none.json", {}) == []
    pytest.importorskip("matplotlib")
    scaling.plot_sweep(scaling.sweeps(16, 600)[0], [point], found, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
