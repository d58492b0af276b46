"""A Runner lives on the device it was given, alone: in a process of its own, with two virtual CPU devices."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxllm.runner import memory_plan
from jaxllm.runner.memory_plan import total_memory
from tests.runner.test_memory_plan import Device

SCRIPT = """
import jax
from dataclasses import replace
from jaxllm.config.engine import CacheConfig, SchedulerConfig
from jaxllm.runner.start import StartOptions, start_runner
from jaxllm.types.sampling import SamplingParams
from tests.runner.drive import Piece, Planner
from tests.runner.test_kv_in_place import TINY

FIRST, SECOND = jax.devices()
RARE = SamplingParams(temperature=0.8, presence_penalty=1.0, logit_bias={5: 2.0}, logprobs=3, prompt_logprobs=2)

def outputs(device):
    runner = start_runner(
        replace(TINY, layers=TINY.layers[:1]), None, cache=CacheConfig(page_size=16, num_pages=9), dtype="float32",
        scheduler=SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=10, max_model_len=64),
        options=StartOptions(device=device, num_devices=2),
    )
    planner = Planner()
    new = [planner.new("a", 0, range(10), params=RARE)]
    plans = [planner.plan([Piece("a", 0, 0, 10)], new, {0: [3, 4]})]
    plans += [planner.plan([Piece("a", 0, 10 + i, 1)]) for i in range(5)]
    tickets = [runner.submit(p) for p in plans]
    results = [runner.collect(t) for t in tickets]
    state = runner._state
    held = jax.tree.leaves((state.kv, state.tables, state.history, state.hidden, runner._leaves))
    assert all(a.devices() == {device} for a in held), device
    assert runner.compilations_after_ready == 0
    runner.close()
    return [(r.tokens, r.logprobs, r.prompt_logprobs) for r in results]

second = outputs(SECOND)
assert not [a for a in jax.live_arrays() if FIRST in a.devices()], "nothing of it is on the first device"
assert second == outputs(FIRST)
assert second[0][1]["a"].values and second[0][2]["a"].columns.values
print("same")
"""


def test_a_runner_on_the_second_device_computes_what_one_on_the_first_does() -> None:
    env = {**os.environ, "JAX_NUM_CPU_DEVICES": "2", "JAX_PLATFORMS": "cpu"}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], check=False, cwd=root, env=env, capture_output=True, text=True, timeout=600
    )
    assert (done.returncode, done.stdout.strip()) == (0, "same"), done.stderr[-3000:]


def test_devices_of_a_cpu_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_plan, "free_host_bytes", lambda: 1000)
    assert total_memory(Device("cpu"), 0.5, 4) == 250  # type: ignore[arg-type]
    gpu = Device()
    assert total_memory(gpu, 0.5, 4) == total_memory(gpu, 0.5)  # type: ignore[arg-type]
