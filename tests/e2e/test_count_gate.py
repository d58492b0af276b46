"""Counts of the real engine on the real model: the same on every machine, so a change shows at once."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest

from jaxllm.config.engine import SchedulerConfig
from jaxllm.engine.inputs import TokensPrompt
from jaxllm.memory.manager import KVManager
from jaxllm.memory.plan import KVCachePlan, KVGroup
from jaxllm.memory.spec import FullKV
from jaxllm.runner.runner import Runner, RunnerStats
from jaxllm.scheduler.registry import create_policy
from jaxllm.scheduler.scheduler import RequestUpdate, Scheduler
from jaxllm.scheduler.stop import StopRules
from jaxllm.types.request import Request
from jaxllm.types.sampling import SamplingParams
from jaxllm.types.step import SchedulerOutput, StepOutput
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


# The scheduler's hot path: `schedule` and `update` of steps in which all requests decode, a sixteenth of them
# into a new page. Counts of a step, as a number for each request and one for the step itself.

PAGE_SIZE = 16
HOT_PATH = {  # measured on Python 3.11: 1.38 and 54, 5.5 and 43, 0.97 and 21; 3.12 calls a little less
    "Python calls": (1.4, 56),
    "C calls": (5.5, 44),
    "blocks": (1.1, 26),  # of memory, held by a plan, its updates, and what the requests keep of them
}


class Decoding:
    """Requests in the middle of their outputs, at different places of their pages, one step in flight."""

    def __init__(self, num_requests: int) -> None:
        config = SchedulerConfig(max_num_seqs=num_requests, max_num_batched_tokens=32 * num_requests, max_model_len=512)
        plan = KVCachePlan((KVGroup((0,), FullKV(PAGE_SIZE, 1, 8)),), 8 * num_requests, PAGE_SIZE)
        kv = KVManager(plan, enable_prefix_caching=True)
        self.scheduler = Scheduler(config, kv, create_policy("fcfs"), StopRules(frozenset({2}), 512))
        for number in range(num_requests):
            prompt = (number + 3,) * (PAGE_SIZE + number % PAGE_SIZE)
            self.scheduler.add(Request(str(number), prompt, SamplingParams(max_tokens=200), 0.0))
        self.in_flight = self.plan()
        for _ in range(PAGE_SIZE):
            self.in_flight = self.step(self.answer())[0]

    def plan(self) -> SchedulerOutput:
        plan = self.scheduler.schedule(0.0)
        assert plan is not None
        return plan

    def answer(self) -> StepOutput:
        """What the executor says to the step in flight; not the scheduler's own work, so made outside of it."""
        return StepOutput(self.in_flight.step_id, dict.fromkeys(self.in_flight.rows.request_ids, (70,)))

    def step(self, answer: StepOutput) -> tuple[SchedulerOutput, list[RequestUpdate]]:
        return self.plan(), self.scheduler.update(self.in_flight, answer)

    def mean(self, measure: Callable[[Decoding, StepOutput], tuple[SchedulerOutput, float]]) -> float:
        """Of as many steps as a page has tokens: each request fills one."""
        total = 0.0
        for _ in range(PAGE_SIZE):
            self.in_flight, count = measure(self, self.answer())
            total += count
        return total / PAGE_SIZE


def num_calls(event: str) -> Callable[[Decoding, StepOutput], tuple[SchedulerOutput, float]]:
    def measure(decoding: Decoding, answer: StepOutput) -> tuple[SchedulerOutput, float]:
        events: list[str] = []
        before = sys.getprofile()
        sys.setprofile(lambda frame, event, arg: events.append(event))
        try:
            plan, _ = decoding.step(answer)
        finally:
            sys.setprofile(before)
        return plan, events.count(event)

    return measure


def num_blocks(decoding: Decoding, answer: StepOutput) -> tuple[SchedulerOutput, float]:
    before = sys.getallocatedblocks()
    plan, updates = decoding.step(answer)
    held = sys.getallocatedblocks() - before
    del updates  # not before: they count
    return plan, held


COUNTS = {"Python calls": num_calls("call"), "C calls": num_calls("c_call"), "blocks": num_blocks}


@pytest.mark.parametrize("name", HOT_PATH)
def test_a_decode_costs_the_scheduler_few_calls_and_little_memory(name: str) -> None:
    gc.collect()
    gc.disable()
    try:
        # The least of two: what other threads of the test run allocate meanwhile is not the scheduler's.
        small, large = (min(Decoding(num).mean(COUNTS[name]) for _ in range(2)) for num in (64, 192))
    finally:
        gc.enable()
    for_each = (large - small) / 128
    for_step = small - 64 * for_each
    most_for_each, most_for_step = HOT_PATH[name]
    assert for_each <= most_for_each, f"{name}: {for_each} a request"
    assert for_step <= most_for_step, f"{name}: {for_step} a step"
