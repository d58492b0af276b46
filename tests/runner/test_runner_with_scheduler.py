"""The real scheduler and memory over the device runner: the same tokens whatever the company."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from jaxllm.config.engine import SchedulerConfig
from jaxllm.memory.manager import KVManager
from jaxllm.runner.runner import Runner
from jaxllm.scheduler.registry import create_policy
from jaxllm.scheduler.scheduler import Scheduler
from jaxllm.scheduler.stop import StopRules
from jaxllm.types.request import FinishReason, Request
from jaxllm.types.sampling import SamplingParams
from tests.runner.oracle_model import VOCAB, greedy_continuation

MAX_MODEL_LEN = 64
CONFIG = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=32, max_model_len=MAX_MODEL_LEN)


def make_scheduler(runner: Runner, *, caching: bool = True) -> tuple[Scheduler, KVManager]:
    memory = KVManager(runner.kv_plan, enable_prefix_caching=caching)
    stop = StopRules(frozenset(), MAX_MODEL_LEN)
    return Scheduler(CONFIG, memory, create_policy("fcfs"), stop), memory


def drive(runner: Runner, scheduler: Scheduler, *, in_flight: int = 1) -> None:
    """Run to the end with `in_flight` steps uncollected while the next is planned."""
    pending = []
    for _ in range(5000):
        plan = scheduler.schedule(0.0)
        if plan is not None:
            pending.append((plan, runner.submit(plan)))
        if pending and (plan is None or len(pending) > in_flight):
            oldest, ticket = pending.pop(0)
            scheduler.update(oldest, runner.collect(ticket))
        if not pending and not scheduler.has_unfinished:
            return
    raise AssertionError("requests are left")


def request(
    request_id: str, prompt: Sequence[int], num_tokens: int, temperature: float = 0.0, seed: int = 0
) -> Request:
    params = SamplingParams(temperature=temperature, max_tokens=num_tokens, ignore_eos=True, top_k=20, top_p=0.9)
    return Request(request_id, tuple(prompt), params, arrival_s=0.0, seed=seed)


def mixed_requests(count: int, seed: int) -> list[Request]:
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, VOCAB, 24).tolist()
    requests = []
    for i in range(count):
        own = rng.integers(0, VOCAB, rng.integers(1, 30)).tolist()
        prompt = own if i % 3 else shared[: rng.integers(4, 24)] + own[:8]
        num_tokens = int(rng.integers(1, MAX_MODEL_LEN - len(prompt)))
        requests.append(request(f"r{i}", prompt, num_tokens, temperature=0.8 * (i % 2), seed=i * 17 + 3))
    return requests


def solo_tokens(runner: Runner, template: Request) -> list[int]:
    """The request alone, cold; a greedy one by arithmetic instead."""
    max_tokens = template.params.max_tokens
    assert max_tokens is not None
    if template.params.is_greedy:
        return greedy_continuation(template.prompt_ids, max_tokens)
    alone = Request("solo", template.prompt_ids, template.params, arrival_s=0.0, seed=template.seed)
    scheduler, _ = make_scheduler(runner, caching=False)
    scheduler.add(alone)
    drive(runner, scheduler, in_flight=0)
    return alone.output_ids


@pytest.mark.parametrize("in_flight", [0, 1])
def test_mixed_requests_short_of_pages_return_their_solo_tokens_cold_and_warm(runner: Runner, in_flight: int) -> None:
    expected = {r.request_id: solo_tokens(runner, r) for r in mixed_requests(40, 5)}
    scheduler, memory = make_scheduler(runner)
    for _ in ("cold", "warm"):
        requests = mixed_requests(40, 5)
        for r in requests:
            scheduler.add(r)
        drive(runner, scheduler, in_flight=in_flight)
        assert {r.request_id: r.output_ids for r in requests} == expected
        assert {r.finish_reason for r in requests} == {FinishReason.LENGTH}
        memory.check()
        assert memory.num_free_pages == memory.num_pages - 1
    assert scheduler.num_preemptions >= 5
    assert scheduler.prefix_hits > 0
    assert runner.compilations_after_ready == 0


@pytest.mark.parametrize("caching", [True, False])
def test_sch_02_two_requests_in_seven_pages_equal_their_unpressured_runs(
    start: Callable[..., Runner], caching: bool
) -> None:
    runner = start(num_pages=8, max_num_seqs=2, page_size=16, max_model_len=128)
    memory = KVManager(runner.kv_plan, enable_prefix_caching=caching)
    config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=32, max_model_len=128)
    scheduler = Scheduler(config, memory, create_policy("fcfs"), StopRules(frozenset(), 128))
    rng = np.random.default_rng(0)
    requests = [request(name, rng.integers(0, VOCAB, 34).tolist(), 35) for name in "ab"]
    for r in requests:
        scheduler.add(r)
    drive(runner, scheduler)
    assert scheduler.num_preemptions >= 1
    for r in requests:
        assert r.output_ids == greedy_continuation(r.prompt_ids, 35)
        assert r.finish_reason is FinishReason.LENGTH
    assert runner.compilations_after_ready == 0
    runner.close()


def test_aborted_requests_leave_their_neighbours_right(runner: Runner) -> None:
    scheduler, memory = make_scheduler(runner)
    requests = mixed_requests(12, 9)
    expected = {r.request_id: solo_tokens(runner, r) for r in requests}
    for r in requests:
        scheduler.add(r)
    pending = []
    for step in range(12):
        plan = scheduler.schedule(0.0)
        assert plan is not None
        pending.append((plan, runner.submit(plan)))
        if step in (3, 7):
            scheduler.abort([r.request_id for r in requests[step - 3 : step]])
        if len(pending) > 1:
            oldest, ticket = pending.pop(0)
            scheduler.update(oldest, runner.collect(ticket))
    for oldest, ticket in pending:
        scheduler.update(oldest, runner.collect(ticket))
    drive(runner, scheduler)
    for r in requests:
        if r.finish_reason is FinishReason.LENGTH:
            assert r.output_ids == expected[r.request_id]
        else:
            assert r.output_ids == expected[r.request_id][: len(r.output_ids)]
    assert FinishReason.ABORT in {r.finish_reason for r in requests}
    memory.check()
    assert memory.num_free_pages == memory.num_pages - 1
