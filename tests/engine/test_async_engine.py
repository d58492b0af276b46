"""The asynchronous engine: streams, aborts at every stage, death."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial

import pytest

from jaxllm.engine.async_engine import AsyncEngine
from jaxllm.engine.executor import Executor
from jaxllm.engine.inputs import Prompt
from jaxllm.errors import CapacityError, EngineDead, RequestError
from jaxllm.testing.faults import Fault, FaultKind, FaultPlace, FaultyExecutor
from jaxllm.types.outputs import RequestOutput
from jaxllm.types.sampling import OutputKind, SamplingParams
from tests.helpers.scripted_engine import EOS, Settings, make_parts, script, scripted

# Runs that are to be left must last, also on a busy machine: about 1000 tokens at 1 ms.
ROOMY = Settings(num_pages=301, max_model_len=1024)
NUM_FREE = ROOMY.num_pages - 1
DELTA = SamplingParams(max_tokens=None, output_kind=OutputKind.DELTA)


@contextlib.asynccontextmanager
async def serving(executor: Executor, settings: Settings | None = None) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(make_parts(executor, settings or ROOMY))
    try:
        yield engine
    finally:
        if hasattr(executor, "release"):
            executor.release()
        await engine.close()


async def collect(
    engine: AsyncEngine, request_id: str, prompt: Prompt = "abc", params: SamplingParams = DELTA
) -> list[RequestOutput]:
    return [output async for output in engine.stream(prompt, params, request_id=request_id)]


def text_of(outputs: list[RequestOutput]) -> str:
    return "".join(output.outputs[0].text for output in outputs)


async def until(condition: Callable[[], bool], limit_s: float = 2.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        await asyncio.sleep(0.002)


def is_idle(engine: AsyncEngine) -> bool:
    stats = engine.stats()
    core = stats.core
    return (core.num_running, core.num_waiting, core.num_free_pages, stats.num_open_requests) == (0, 0, NUM_FREE, 0)


def is_queued_or_late(engine: AsyncEngine, runner: asyncio.Task[list[RequestOutput]]) -> bool:
    return engine.stats().core.num_waiting >= 1 or runner.done()


def test_streams_share_the_engine_and_end_once() -> None:
    async def main() -> None:
        responses = [script(f"text number {i}", prompt_contains=f"<{i}>") for i in range(12)]
        async with serving(scripted(*responses)) as engine:
            runs = [collect(engine, f"r{i}", f"<{i}> please") for i in range(12)]
            for i, outputs in enumerate(await asyncio.gather(*runs)):
                assert text_of(outputs) == f"text number {i}"
                assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
                assert outputs[-1].outputs[0].finish_reason == "stop"
                assert sum((o.outputs[0].token_ids for o in outputs), ()) == (*f"text number {i}".encode(), EOS)
            assert engine.stats().totals.finished["stop"] == 12
            await until(lambda: is_idle(engine))

    asyncio.run(main())


def test_str_01_streamed_text_equals_whole_text() -> None:
    text = "na\u00efve \U0001fae0 \u010f\u4f60\u597d!"

    async def main() -> None:
        async with serving(scripted(default=script(text))) as engine:
            streamed = await collect(engine, "a")
            whole = await collect(engine, "b", params=SamplingParams(max_tokens=None))
            assert text_of(streamed) == whole[-1].outputs[0].text == text
            assert not any("\ufffd" in o.outputs[0].text for o in streamed)

    asyncio.run(main())


def test_str_03_a_stop_string_over_tokens_frees_the_request() -> None:
    async def main() -> None:
        async with serving(scripted(default=script("say q;r ", repeat=True))) as engine:
            params = SamplingParams(max_tokens=None, stop=("q;r",), output_kind=OutputKind.DELTA)
            outputs = await collect(engine, "a", params=params)
            assert text_of(outputs) == "say "
            assert (outputs[-1].outputs[0].finish_reason, outputs[-1].outputs[0].stop_reason) == ("stop", "q;r")
            await until(lambda: is_idle(engine))

    asyncio.run(main())


def test_refusals_are_raised_before_the_first_item() -> None:
    async def main() -> None:
        settings = replace(ROOMY, max_num_queued_reqs=2, max_num_seqs=1)
        async with serving(scripted(step_s=0.01, default=script("x", repeat=True)), settings) as engine:
            with pytest.raises(RequestError, match="empty"):
                await collect(engine, "a", "")
            stream = engine.stream("abc", DELTA, request_id="a")
            await anext(stream)
            with pytest.raises(RequestError, match="'a' is in use"):
                await collect(engine, "a")
            waiting = asyncio.create_task(collect(engine, "b", params=SamplingParams(max_tokens=2)))
            await until(lambda: engine.stats().core.num_waiting == 1)
            with pytest.raises(CapacityError, match="max_num_queued_reqs=2"):
                await collect(engine, "c")
            await stream.aclose()
            assert (await waiting)[-1].outputs[0].text == "xx"
            assert engine.stats().totals.finished == {"stop": 0, "length": 1, "abort": 1, "error": 0}

    asyncio.run(main())


def test_an_id_can_be_used_again_at_once_after_an_abort() -> None:
    """What was on its way for the first must not reach the second."""

    async def main() -> None:
        executor = scripted(
            script("A", prompt_contains="a", repeat=True), script("B" * 9, prompt_contains="b"), step_s=0.001
        )
        async with serving(executor) as engine:
            for _ in range(20):
                stream = engine.stream("a", DELTA, request_id="same")
                await anext(stream)
                await engine.abort("same")
                second = await collect(engine, "same", "b")
                assert text_of(second) == "B" * 9
                rest = [output async for output in stream]
                assert rest[-1].outputs[0].finish_reason == "abort"

    asyncio.run(main())


def test_a_long_prompt_is_refused_without_blocking_the_loop() -> None:
    async def main() -> None:
        async with serving(scripted()) as engine:
            with pytest.raises(RequestError, match="100000 tokens") as caught:
                await collect(engine, "a", "x" * 100_000)
            assert caught.value.code == "context_length_exceeded"

    asyncio.run(main())


# SCH-01: leaving at every stage, 50 times each, next to a run that nobody leaves.


async def leave_after_three(engine: AsyncEngine, request_id: str) -> None:
    stream = engine.stream("leaver", DELTA, request_id=request_id)
    for _ in range(3):
        await anext(stream)
    await stream.aclose()


async def cancel_while_waiting_for_all(engine: AsyncEngine, request_id: str) -> None:
    params = SamplingParams(max_tokens=None, output_kind=OutputKind.FINAL_ONLY)
    task = asyncio.create_task(collect(engine, request_id, "leaver", params))
    await asyncio.sleep(0.004)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def cancel_before_the_core_takes_it(engine: AsyncEngine, request_id: str) -> None:
    """Both messages lie in the transport together."""
    task = asyncio.create_task(collect(engine, request_id, "leaver"))
    await asyncio.sleep(0)
    assert engine.stats().num_open_requests >= 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def abort_by_id(engine: AsyncEngine, request_id: str) -> None:
    stream = engine.stream("leaver", DELTA, request_id=request_id)
    await anext(stream)
    await engine.abort(request_id)
    rest = [output async for output in stream]
    assert rest[-1].outputs[0].finish_reason == "abort"
    await engine.abort(request_id)  # after its end: nothing


async def leave_two_siblings_after_three(engine: AsyncEngine, request_id: str) -> None:
    stream = engine.stream("leaver", replace(DELTA, n=2), request_id=request_id)
    for _ in range(3):
        await anext(stream)
    await stream.aclose()


async def cancel_two_siblings_before_the_core_takes_them(engine: AsyncEngine, request_id: str) -> None:
    params = replace(DELTA, n=2, output_kind=OutputKind.FINAL_ONLY)
    task = asyncio.create_task(collect(engine, request_id, "leaver", params))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def leave_between_the_fork_and_the_first_token(engine: AsyncEngine, request_id: str) -> None:
    """The second sibling waits for the first one's long prompt."""
    task = asyncio.create_task(collect(engine, request_id, "leaver " * 60, replace(DELTA, n=2)))
    await asyncio.sleep(0.002)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def never_start(engine: AsyncEngine, request_id: str) -> None:
    await engine.stream("leaver", DELTA, request_id=request_id).aclose()


LEAVERS = [
    (leave_after_three, 1),
    (cancel_while_waiting_for_all, 1),
    (cancel_before_the_core_takes_it, 1),
    (abort_by_id, 1),
    (leave_two_siblings_after_three, 1),
    (cancel_two_siblings_before_the_core_takes_them, 1),
    (leave_between_the_fork_and_the_first_token, 1),
    (never_start, 0),
]


@pytest.mark.parametrize(("leave", "num_aborts"), LEAVERS, ids=[leave.__name__ for leave, _ in LEAVERS])
def test_sch_01_a_caller_that_leaves_gives_everything_back(
    leave: Callable[[AsyncEngine, str], Awaitable[None]], num_aborts: int
) -> None:
    async def main() -> None:
        executor = scripted(
            script("stay stay", prompt_contains="stayer"),
            script("ok", prompt_contains="whole"),
            default=script("x", repeat=True),
            step_s=0.001,
        )
        async with serving(executor) as engine:
            for number in range(50):
                other = asyncio.create_task(collect(engine, f"stay{number}", "stayer"))
                await leave(engine, f"leave{number}")
                assert text_of(await other) == "stay stay"
                await until(lambda: is_idle(engine))
            assert engine.stats().totals.finished == {"stop": 50, "length": 0, "abort": 50 * num_aborts, "error": 0}
            longest = "whole".ljust(ROOMY.max_model_len - 1, "w")
            assert (await collect(engine, "whole", longest))[-1].outputs[0].finish_reason == "length"

    asyncio.run(main())


@pytest.mark.parametrize("n", [1, 2])
def test_sch_01_leaving_the_queue_harms_nobody_who_runs(n: int) -> None:
    async def main() -> None:
        settings = replace(ROOMY, max_num_seqs=1)
        executor = scripted(default=script("runs to its end"), step_s=0.001)
        async with serving(executor, settings) as engine:
            for number in range(50):
                runner = asyncio.create_task(collect(engine, f"run{number}"))
                await until(lambda: engine.stats().core.num_running == 1)
                queued = asyncio.create_task(collect(engine, f"queue{number}", params=replace(DELTA, n=n)))
                await until(partial(is_queued_or_late, engine, runner))
                queued.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await queued
                assert text_of(await runner) == "runs to its end"
            await until(lambda: is_idle(engine))

    asyncio.run(main())


# HLT-01: an executor that raises, freezes or dies.

HOW = [(kind, place) for kind in FaultKind for place in FaultPlace]


@pytest.mark.parametrize(("kind", "place"), HOW, ids=[f"{k.value}-{p.value}" for k, p in HOW])
def test_hlt_01_every_running_request_ends_with_an_error(kind: FaultKind, place: FaultPlace) -> None:
    async def main() -> None:
        inner = scripted(default=script("x", repeat=True), step_s=0.001)
        executor = FaultyExecutor(inner, [Fault(5, kind, place)])
        async with serving(executor, replace(ROOMY, watchdog_s=0.5)) as engine:
            engine.check_health()
            started = time.monotonic()
            whole = SamplingParams(max_tokens=None, output_kind=OutputKind.FINAL_ONLY)
            runs = [collect(engine, f"r{i}", params=DELTA if i % 2 else whole) for i in range(4)]
            results = await asyncio.wait_for(asyncio.gather(*runs, return_exceptions=True), 5.0)
            assert [type(r) for r in results] == [EngineDead] * 4
            expected = "frozen" if kind is FaultKind.FREEZE else f"scripted fault in {place.value} of step 5"
            assert all(expected in str(r) for r in results)
            with pytest.raises(EngineDead, match=expected):
                engine.check_health()
            with pytest.raises(EngineDead):
                await collect(engine, "late")
            assert time.monotonic() - started < 5.0
            stats = engine.stats()
            assert (stats.totals.finished["error"], stats.num_open_requests) == (4, 0)

    asyncio.run(main())


def test_api_05_tokens_before_the_fault_arrive_before_the_error() -> None:
    async def main() -> None:
        async with serving(scripted(faults=[Fault(4, FaultKind.RAISE)])) as engine:
            got: list[RequestOutput] = []
            with pytest.raises(EngineDead):
                async for output in engine.stream("abc", DELTA, request_id="a"):
                    got.append(output)  # noqa: PERF401 — the error comes after these
            assert text_of(got) == "Hel"

    asyncio.run(main())


def test_hlt_01_health_sees_a_freeze_though_nobody_waits() -> None:
    """The only request was aborted; the step it was in never returns."""

    async def main() -> None:
        executor = scripted(faults=[Fault(2, FaultKind.FREEZE)])
        async with serving(executor, replace(ROOMY, watchdog_s=0.2)) as engine:
            stream = engine.stream("abc", DELTA, request_id="a")
            await anext(stream)
            await stream.aclose()
            await asyncio.sleep(0.4)
            with pytest.raises(EngineDead, match="frozen"):
                engine.check_health()

    asyncio.run(main())


def test_hlt_01_an_executor_that_thaws_changes_nothing() -> None:
    async def main() -> None:
        executor = scripted(faults=[Fault(2, FaultKind.FREEZE)])
        async with serving(executor, replace(ROOMY, watchdog_s=0.2)) as engine:
            with pytest.raises(EngineDead, match="frozen"):
                await collect(engine, "a")
            executor.release()
            await asyncio.sleep(0.05)
            with pytest.raises(EngineDead, match="frozen"):
                engine.check_health()
            assert engine.stats().totals.finished["error"] == 1

    asyncio.run(main())


def test_hlt_01_a_thread_that_dies_without_a_word_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def exit_quietly() -> None:
        raise SystemExit

    async def main() -> None:
        executor = scripted(step_s=0.01, default=script("x", repeat=True))
        async with serving(executor, replace(ROOMY, watchdog_s=0.4)) as engine:
            stream = engine.stream("abc", DELTA, request_id="a")
            await anext(stream)
            monkeypatch.setattr(engine._front._cores.all[0].thread._core, "step", exit_quietly)
            monkeypatch.setattr(engine._front._cores.all[0].thread._core, "fail", lambda message: ())
            with pytest.raises(EngineDead, match="thread died"):
                async for _ in stream:
                    pass

    asyncio.run(main())


def test_closing_ends_open_streams_and_refuses_new_ones() -> None:
    async def main() -> None:
        engine = AsyncEngine(make_parts(scripted(default=script("x", repeat=True), step_s=0.001)))
        stream = engine.stream("abc", DELTA, request_id="a")
        await anext(stream)
        await engine.close()
        rest = [output async for output in stream]
        assert rest[-1].outputs[0].finish_reason == "abort"
        with pytest.raises(EngineDead, match="closed"):
            engine.check_health()
        with pytest.raises(EngineDead, match="closed"):
            await collect(engine, "b")
        await engine.close()

    asyncio.run(main())


def test_an_engine_outlives_an_event_loop() -> None:
    engine = AsyncEngine(make_parts(scripted()))
    for number in range(3):
        assert text_of(asyncio.run(collect(engine, f"r{number}"))) == "Hello"
    asyncio.run(engine.close())


def test_the_core_sleeps_when_idle() -> None:
    async def main() -> None:
        async with serving(scripted()) as engine:
            await collect(engine, "a")
            await until(lambda: is_idle(engine))
            turns = 0
            turn = engine._front._cores.all[0].thread._turn

            def counting_turn() -> bool:
                nonlocal turns
                turns += 1
                return turn()

            engine._front._cores.all[0].thread._turn = counting_turn  # type: ignore[method-assign]
            await asyncio.sleep(0.2)
            assert turns == 0

    asyncio.run(main())
