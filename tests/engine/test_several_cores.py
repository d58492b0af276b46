"""An engine of several cores: who gets a request, what is counted, and what one death means."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from jaxllm.engine.async_engine import AsyncEngine
from jaxllm.engine.cores import sum_stats
from jaxllm.engine.engine import Engine
from jaxllm.engine.executor import Executor, Ticket
from jaxllm.engine.parts import CoreParts, EngineParts
from jaxllm.engine.transport import Mailbox, wait_for_any
from jaxllm.errors import EngineDead
from jaxllm.metrics.stats import CoreStats
from jaxllm.testing.faults import Fault, FaultKind, FaultyExecutor
from jaxllm.types.sampling import BeamSearchParams, OutputKind, SamplingParams
from jaxllm.types.step import SchedulerOutput, StepOutput
from tests.engine.caller import check_idle
from tests.helpers.scripted_engine import Settings, make_parts, script, scripted


class Watched:
    """Remembers the requests that an executor was given."""

    def __init__(self, inner: Executor) -> None:
        self.inner = inner
        self.seen: set[str] = set()

    def submit(self, plan: SchedulerOutput) -> Ticket:
        self.seen.update(new.request_id for new in plan.new)
        return self.inner.submit(plan)

    def collect(self, ticket: Ticket) -> StepOutput:
        return self.inner.collect(ticket)

    def close(self) -> None:
        self.inner.close()


def parts_of(executors: Sequence[Executor], settings: Settings | None = None) -> EngineParts:
    first, *others = [make_parts(executor, settings) for executor in executors]
    cores = [CoreParts(executor=each.executor, scheduler=each.scheduler, kv=each.kv) for each in others]
    return make_parts(first.executor, settings, scheduler=first.scheduler, kv=first.kv, more_cores=tuple(cores))


def watched(count: int, **options: Any) -> list[Watched]:
    return [Watched(scripted(**options)) for _ in range(count)]


def test_requests_are_spread_and_siblings_stay_together() -> None:
    executors = watched(3)
    with Engine(parts_of(executors)) as engine:
        outputs = engine.generate(["abc"] * 6, [SamplingParams(n=1 + index % 3) for index in range(6)])
        assert [[c.text for c in output.outputs] for output in outputs] == [["Hello"] * (1 + i % 3) for i in range(6)]
        check_idle(engine, num_pages=3 * 64)
    families = [{request_id.split("/")[0] for request_id in each.seen} for each in executors]
    assert sum(map(len, families)) == len(set().union(*families)) == 6
    # n = 1, 2, 3 go to cores 0, 1, 2; then 1 more to core 0, 2 more there (2 against 2: the first), 3 to core 1.
    assert [len(each.seen) for each in executors] == [1 + 1 + 2, 2 + 3, 3]


def test_numbers_are_those_of_all_cores() -> None:
    first = CoreStats(1, 2, 30, 101, 0.5, 1, 10, 5, 7)
    second = CoreStats(3, 0, 100, 301, 0.1, 0, 1, 1, 2)
    both = sum_stats([first, second])
    assert (both.num_running, both.num_waiting, both.num_free_pages, both.num_pages) == (4, 2, 130, 402)
    assert (both.num_preemptions, both.prefix_queries_tokens, both.prefix_hits_tokens, both.num_steps) == (1, 11, 6, 9)
    assert both.kv_usage == pytest.approx((0.5 * 101 + 0.1 * 301) / 402)
    assert sum_stats([first]) is first


def test_a_core_that_is_done_takes_the_next_request() -> None:
    executors = watched(2)
    with Engine(parts_of(executors)) as engine:
        for _ in range(5):
            engine.generate(["abc"], [SamplingParams()])
    assert [len(each.seen) for each in executors] == [5, 0]  # idle ones are taken in order


def test_beam_search_runs_over_all() -> None:
    executors = watched(2)
    with Engine(parts_of(executors)) as engine, Engine(parts_of(watched(1))) as other:
        params = BeamSearchParams(beam_width=3, max_tokens=4)
        shown = [e.beam_search(["abc"], params)[0].outputs for e in (engine, other)]
        assert shown[0] == shown[1]
        check_idle(engine, num_pages=2 * 64)
    assert all(each.seen for each in executors)


@pytest.mark.parametrize("kind", list(FaultKind))
@pytest.mark.parametrize("broken", [0, 1])
def test_hlt_01_one_dead_core_ends_all(kind: FaultKind, broken: int) -> None:
    """Also one that freezes while another goes on sending."""
    inner = [scripted(default=script("x", repeat=True), step_s=0.002) for _ in range(2)]
    executors: list[Executor] = list(inner)
    executors[broken] = FaultyExecutor(inner[broken], [Fault(5, kind)])
    settings = Settings(watchdog_s=0.3, max_model_len=4000, num_pages=3000)
    with Engine(parts_of(executors, settings)) as engine:
        with pytest.raises(EngineDead):
            engine.generate(["abc"] * 4, [SamplingParams(max_tokens=None)] * 4)
        with pytest.raises(EngineDead):
            engine.generate(["abc"], [SamplingParams()])
        assert engine.stats().totals.finished["error"] == 4
        for executor in executors:
            getattr(executor, "release", lambda: None)()


def test_sch_01_leaving_reaches_the_core_that_runs_it() -> None:
    async def main() -> None:
        executors = watched(2, default=script("x", repeat=True), step_s=0.001)
        engine = AsyncEngine(parts_of(executors))
        params = SamplingParams(max_tokens=None, n=2, output_kind=OutputKind.DELTA)
        for number in range(10):
            streams = [engine.stream("abc", params, request_id=f"{number}/{i}") for i in range(3)]
            for stream in streams:
                await anext(stream)
            for stream in streams:
                await stream.aclose()
            for _ in range(2000):
                stats = engine.stats()
                if (stats.core.num_running, stats.core.num_free_pages, stats.num_open_requests) == (0, 128, 0):
                    break
                await asyncio.sleep(0.001)
            else:
                pytest.fail(f"not given back: {engine.stats()}")
        assert all(each.seen for each in executors)
        await engine.close()

    asyncio.run(main())


def test_a_reader_sleeps_on_several_mailboxes_at_once() -> None:
    ready = threading.Condition()
    boxes: list[Mailbox[int]] = [Mailbox(ready) for _ in range(3)]
    assert not wait_for_any(ready, boxes, 0.01)
    writer = threading.Timer(0.05, boxes[2].put, (7,))
    writer.start()
    assert wait_for_any(ready, boxes, 30.0)
    assert [box.take() for box in boxes] == [[], [], [7]]
    writer.join()
