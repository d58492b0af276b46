"""A run of a real model, decided again in the simulator and on the scripted stand-in: the same plans, step by step."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxllm.engine.executor import Executor
from jaxllm.engine.trace import Arrived, Header
from jaxllm.engine.trace_file import read_trace
from jaxllm.sim.clock import VirtualClock
from jaxllm.sim.recorded import read_recorded
from jaxllm.sim.replay import plan_hashes, simulated
from jaxllm.testing.scripted import Script
from jaxllm.types.sampling import SamplingParams
from tests.helpers.scripted_engine import scripted
from tests.helpers.tiny_engine import TinyEngine


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_a_recorded_run_gives_the_same_plans_on_every_stand_in(async_scheduling: bool, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    prompts = [f"request {n % 4}: " + "abcdefghij" * (1 + n % 4) + f"{n:02}" for n in range(16)]
    params = [SamplingParams(max_tokens=8 + 4 * (n % 8), seed=n, logprobs=2 if n % 5 == 0 else None) for n in range(16)]
    with TinyEngine(
        num_pages=24, max_num_seqs=8, max_num_batched_tokens=20, async_scheduling=async_scheduling, record_trace=path
    ) as tiny:
        tiny.engine.generate(prompts, params)
        tiny.wait_until_idle()
        assert sum(core.scheduler.num_preemptions for core in tiny.cores) > 0
        assert tiny.prefix_hits > 0

    def on_script(header: Header, clock: VirtualClock) -> Executor:
        del header, clock
        answers = read_recorded(path).tokens.answers
        arrived = [line.request for _, line in read_trace(path)[1] if isinstance(line, Arrived)]
        return scripted(*[Script(answers[r.request_id][1], prompt_starts_with_ids=r.prompt_ids) for r in arrived])

    recorded, in_simulator = plan_hashes(path, simulated(path))
    assert len(recorded) > 40
    assert in_simulator == recorded
    assert plan_hashes(path, on_script)[1] == recorded
