"""Counts of the real engine on the real model: the same on every machine, so a change shows at once."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from jaxllm.engine.inputs import TokensPrompt
from jaxllm.runner.runner import Runner, RunnerStats
from jaxllm.types.sampling import SamplingParams
from tests.e2e.conftest import RunningModel

# For 16 slots and 256 tokens a step.
FORWARD_PROGRAMS = 8  # decode 1, 4, 8, 16; mixed 32, 64, 128, 256
SAMPLE_PROGRAMS = 9  # 1, 8 and 16 rows: greedy, drawn, drawn with log probabilities
SIDE_PROGRAMS = 5  # set pages, copy pages, set tables, set history, score
FORWARD_TEMPORARY_BYTES = 16 * 2**20
SAMPLE_TEMPORARY_BYTES = 24 * 2**20


def stats(model: RunningModel) -> RunnerStats:
    assert isinstance(model.parts.executor, Runner)
    return model.parts.executor.stats()


def test_programs_are_as_many_as_planned_and_need_little_memory(smollm2: RunningModel) -> None:
    now = stats(smollm2)
    assert (now.num_forward_programs, now.num_sample_programs) == (FORWARD_PROGRAMS, SAMPLE_PROGRAMS)
    assert now.num_programs == FORWARD_PROGRAMS + SAMPLE_PROGRAMS + SIDE_PROGRAMS
    forward = {name: size for name, size in now.temporary_bytes.items() if name.startswith("forward")}
    sample = {name: size for name, size in now.temporary_bytes.items() if name.startswith("sample")}
    assert (len(forward), len(sample)) == (FORWARD_PROGRAMS, SAMPLE_PROGRAMS)
    assert {name: size for name, size in forward.items() if size > FORWARD_TEMPORARY_BYTES} == {}
    assert {name: size for name, size in sample.items() if size > SAMPLE_TEMPORARY_BYTES} == {}


def test_a_step_sends_one_array_and_waits_once_whatever_it_computes(smollm2: RunningModel) -> None:
    before: dict[str, Any] = asdict(stats(smollm2))
    prompts = [TokensPrompt(list(range(10, 10 + n))) for n in (1, 40, 90)]
    params = [SamplingParams(max_tokens=6, temperature=t, ignore_eos=True) for t in (0.0, 0.9, 0.0)]
    outputs = smollm2.engine.generate(prompts, params)
    after: dict[str, Any] = asdict(stats(smollm2))
    assert [o.num_generated_tokens for o in outputs] == [6, 6, 6]
    num_steps = after["num_steps"] - before["num_steps"]
    assert 6 <= num_steps <= 8  # one prefill of all, five decodes; one late step is given up
    assert after["num_host_to_device"] - before["num_host_to_device"] == num_steps
    assert after["num_syncs"] - before["num_syncs"] == num_steps
    assert after["compilations_after_ready"] == 0
