"""Many requests one after another leave nothing behind."""

from __future__ import annotations

import asyncio
import gc
import resource
import tracemalloc
from collections.abc import Callable

import pytest

from jaxllm.engine.async_engine import AsyncEngine
from jaxllm.engine.inputs import TokensPrompt
from jaxllm.types.sampling import SamplingParams
from tests.helpers.scripted_engine import Settings, make_parts, scripted

SETTINGS = Settings(num_pages=257, page_size=4, max_num_seqs=16, max_num_batched_tokens=256)
PREFIXES = [tuple(range(start, start + 24)) for start in (0, 50, 100)]
AT_ONCE = 50
MAX_SLOPE_BYTES = 2**20 / 1000  # a request


def shared_prefix(number: int) -> tuple[int, ...]:
    return (*PREFIXES[number % 3], 200 + number % 40)


def distinct(number: int) -> tuple[int, ...]:
    return tuple((number >> shift) % 251 for shift in range(0, 32, 2)) + tuple(number * k % 241 for k in range(1, 12))


async def run(engine: AsyncEngine, first: int, count: int, prompt: Callable[[int], tuple[int, ...]]) -> None:
    async def one(number: int) -> None:
        # One in seven has siblings, one in five wants log probabilities, one in eleven leaves.
        params = SamplingParams(
            max_tokens=1,
            n=2 if number % 7 == 0 else 1,
            logprobs=2 if number % 5 == 0 else None,
            prompt_logprobs=1 if number % 5 == 0 else None,
        )
        stream = engine.stream(TokensPrompt(prompt(number)), params, request_id=f"r{number}")
        async for output in stream:
            if number % 11 == 0 or output.finished:
                break
        await stream.aclose()

    for start in range(first, first + count, AT_ONCE):
        await asyncio.gather(*(one(number) for number in range(start, start + AT_ONCE)))


async def idle(engine: AsyncEngine) -> None:
    for _ in range(5000):
        stats = engine.stats()
        if (stats.core.num_running, stats.core.num_waiting, stats.num_open_requests) == (0, 0, 0):
            return
        await asyncio.sleep(0.001)
    pytest.fail(f"not idle: {engine.stats()}")


def slope(measured: list[int], requests_between: int) -> float:
    """Bytes a request over the last half, by least squares."""
    half = measured[len(measured) // 2 :]
    xs = [index * requests_between for index in range(len(half))]
    mean_x, mean_y = sum(xs) / len(xs), sum(half) / len(half)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, half, strict=True)) / sum((x - mean_x) ** 2 for x in xs)


def soak(num_shared: int, num_distinct: int, measure: Callable[[], int]) -> list[float]:
    """The slopes of both phases, in bytes a request; checks that nothing stays open."""

    async def main() -> list[float]:
        parts = make_parts(scripted(), SETTINGS)
        engine = AsyncEngine(parts)
        slopes: list[float] = []
        done = 0
        for count, prompt in ((num_shared, shared_prefix), (num_distinct, distinct)):
            size = count // 10
            measured: list[int] = []
            for _ in range(10):
                await run(engine, done, size, prompt)
                done += size
                await idle(engine)
                gc.collect()
                measured.append(measure())
            slopes.append(slope(measured, size))
        assert engine._searches == {}
        outputs = engine._front._outputs
        assert (outputs._open, outputs._sequences, outputs.loads) == ({}, {}, [0])
        assert parts.scheduler.requests == {}
        stats = engine.stats()
        assert sum(stats.totals.finished.values()) == done
        await engine.close()
        parts.kv.check()
        assert parts.kv.num_free_pages == parts.kv.num_pages - 1
        return slopes

    return asyncio.run(main())


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def test_soak_01_python_memory_stays_flat() -> None:
    tracemalloc.start()
    try:
        slopes = soak(2000, 500, lambda: tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert all(each < MAX_SLOPE_BYTES for each in slopes), slopes


@pytest.mark.slow
def test_soak_01_twenty_thousand_requests_stay_flat() -> None:
    slopes = soak(20_000, 2000, resident_bytes)
    assert all(each < MAX_SLOPE_BYTES for each in slopes), slopes
