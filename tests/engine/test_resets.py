"""Resetting the prefix cache from the engines: all cores answer, and nobody waits for a dead one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from jaxllm.engine.async_engine import AsyncEngine
from jaxllm.engine.engine import Engine
from jaxllm.engine.messages import PrefixCacheReset
from jaxllm.engine.parts import CoreParts, EngineParts
from jaxllm.engine.resets import Resets
from jaxllm.errors import EngineDead
from jaxllm.testing.faults import Fault, FaultKind
from jaxllm.types.sampling import OutputKind, SamplingParams
from tests.helpers.scripted_engine import Settings, make_parts, script, scripted

PROMPT = "three pages of it"
SHORT = SamplingParams(max_tokens=3)


def parts_of(num_cores: int, **more: Any) -> EngineParts:
    roomy = Settings(max_model_len=1024, num_pages=301)
    first, *others = [make_parts(scripted(**more), roomy) for _ in range(num_cores)]
    cores = [CoreParts(executor=each.executor, scheduler=each.scheduler, kv=each.kv) for each in others]
    return make_parts(first.executor, roomy, scheduler=first.scheduler, kv=first.kv, more_cores=tuple(cores))


@pytest.mark.parametrize("num_cores", [1, 3])
def test_pfx_every_core_forgets_at_once_after_an_answer(num_cores: int) -> None:
    with Engine(parts_of(num_cores)) as engine:
        for _ in range(20):  # each time right behind an answer, when a step may still be in flight
            engine.generate([PROMPT] * num_cores, [SHORT] * num_cores)
            again = engine.generate([PROMPT] * num_cores, [SHORT] * num_cores)
            assert all(output.num_cached_tokens > 0 for output in again)
            assert engine.reset_prefix_cache()
            fresh = engine.generate([PROMPT] * num_cores, [SHORT] * num_cores)
            assert [output.num_cached_tokens for output in fresh] == [0] * num_cores


def test_one_core_that_holds_pages_is_enough_for_a_refusal() -> None:
    async def main() -> None:
        engine = AsyncEngine(parts_of(2, default=script("x", repeat=True), step_s=0.001))
        params = SamplingParams(max_tokens=None, output_kind=OutputKind.DELTA)
        stream = engine.stream(PROMPT, params, request_id="a")
        await anext(stream)
        assert await engine.reset_prefix_cache() is False
        await stream.aclose()
        assert await engine.reset_prefix_cache() is True
        await engine.close()
        with pytest.raises(EngineDead):
            await engine.reset_prefix_cache()

    asyncio.run(main())


def test_a_dead_core_answers_with_its_death() -> None:
    with Engine(make_parts(scripted(faults=[Fault(1, FaultKind.RAISE)]))) as engine:
        with pytest.raises(EngineDead):
            engine.generate([PROMPT], [SHORT])
        with pytest.raises(EngineDead):
            engine.reset_prefix_cache()


def test_each_reset_is_answered_once_and_by_all() -> None:
    resets, heard = Resets(num_cores=2), list[bool | Exception]()
    first, second = resets.ask(heard.append).serial, resets.ask(heard.append).serial
    resets.take_in(PrefixCacheReset(second, True))
    resets.take_in(PrefixCacheReset(first, True))
    resets.take_in(PrefixCacheReset(first, False))
    assert (heard, len(resets)) == ([False], 1)
    error = EngineDead("gone")
    resets.fail_all(error)
    resets.take_in(PrefixCacheReset(second, True))
    assert (heard, len(resets)) == ([False, error], 0)
