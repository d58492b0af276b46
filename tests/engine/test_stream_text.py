"""Streams of text: the same text as outputs would bring, and every token counted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from jaxllm.engine.async_engine import AsyncEngine
from jaxllm.errors import EngineDead, RequestError
from jaxllm.testing.faults import Fault, FaultKind
from jaxllm.testing.scripted import ScriptedExecutor
from jaxllm.types.outputs import RequestOutput
from jaxllm.types.sampling import OutputKind, SamplingParams
from tests.helpers.scripted_engine import EOS, make_parts, script, scripted

TEXT = "na\u00efve \U0001fae0 \u010f\u4f60\u597d!"
DELTA = SamplingParams(max_tokens=None, output_kind=OutputKind.DELTA)


@contextlib.asynccontextmanager
async def serving(executor: ScriptedExecutor) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(make_parts(executor))
    try:
        yield engine
    finally:
        await engine.close()


def joined(news: list[RequestOutput | str]) -> str:
    return "".join(item if isinstance(item, str) else item.outputs[0].text for item in news)


@pytest.mark.parametrize("takes", ["nothing", "all", "every other"])
def test_str_01_text_comes_whole_and_in_order_whoever_takes_it(takes: str) -> None:
    async def main() -> None:
        async with serving(scripted(default=script(TEXT), step_s=0.001)) as engine:
            shown: list[RequestOutput | str] = []
            offered = 0

            def take(text: str) -> bool:
                nonlocal offered
                offered += 1
                if takes == "nothing" or (takes == "every other" and offered % 2):
                    return False
                shown.append(text)
                return True

            async for item in engine.stream_text("abc", DELTA, request_id="a", on_text=take):
                shown.append(item)  # noqa: PERF401 — between what is taken
            assert joined(shown) == TEXT
            first, last = shown[0], shown[-1]
            assert isinstance(first, RequestOutput) and isinstance(last, RequestOutput)
            assert (first.finished, last.finished, last.outputs[0].finish_reason) == (False, True, "stop")
            assert last.usage.completion_tokens == len(TEXT.encode()) + 1
            assert all(item for item in shown) and offered > 0

    asyncio.run(main())


def test_text_that_nobody_reads_for_a_while_is_one_item() -> None:
    async def main() -> None:
        async with serving(scripted(default=script(TEXT))) as engine:
            stream = engine.stream_text("abc", DELTA, request_id="a")
            first = await anext(stream)
            while engine.stats().num_open_requests:
                await asyncio.sleep(0.001)
            rest = [item async for item in stream]
            assert [type(item) for item in rest] == [str, RequestOutput]
            assert joined([first, *rest]) == TEXT

    asyncio.run(main())


def test_outputs_that_tell_more_than_text_stay_outputs() -> None:
    async def main() -> None:
        async with serving(scripted(default=script("Hello"))) as engine:
            for number, params in enumerate((replace(DELTA, logprobs=1), replace(DELTA, n=2))):
                news = [item async for item in engine.stream_text("abc", params, request_id=f"r{number}")]
                outputs = [item for item in news if isinstance(item, RequestOutput)]
                assert len(outputs) == len(news)
                ids = [i for output in outputs for part in output.outputs if part.index == 0 for i in part.token_ids]
                assert ids == [*b"Hello", EOS]

    asyncio.run(main())


def test_stop_strings_and_intervals_hold_for_text() -> None:
    async def main() -> None:
        async with serving(scripted(default=script("say q;r ", repeat=True), step_s=0.001)) as engine:
            stopped = [i async for i in engine.stream_text("abc", replace(DELTA, stop=("q;r",)), request_id="a")]
            assert joined(stopped) == "say "
            params = replace(DELTA, max_tokens=8, stream_interval=3)
            taken: list[str] = []
            news = [
                i
                async for i in engine.stream_text(
                    "abc", params, request_id="b", on_text=lambda text: not taken.append(text)
                )
            ]
            assert (taken, joined(news)) == (["ay ", "q;r"], "s ")

    asyncio.run(main())


def test_refusals_leaving_and_death_are_those_of_outputs() -> None:
    async def main() -> None:
        executor = scripted(default=script("x", repeat=True), step_s=0.001, faults=[Fault(30, FaultKind.RAISE)])
        async with serving(executor) as engine:
            with pytest.raises(RequestError, match="empty"):
                await anext(engine.stream_text("", DELTA, request_id="a"))
            leaver = engine.stream_text("abc", DELTA, request_id="b")
            await anext(leaver)
            await leaver.aclose()
            assert engine.stats().totals.finished["abort"] == 1
            with pytest.raises(EngineDead):
                async for _ in engine.stream_text("abc", DELTA, request_id="c", on_text=lambda _: True):
                    pass

    asyncio.run(main())


def test_text_and_sending_are_timed() -> None:
    async def main() -> None:
        async with serving(scripted(default=script(TEXT), step_s=0.001)) as engine:
            _ = [item async for item in engine.stream_text("abc", DELTA, request_id="a")]
            _ = [item async for item in engine.stream("abc", DELTA, request_id="b")]
            profiles = engine.step_profiles()
            assert sum(profile.detokenise_s for profile in profiles) > 0
            assert sum(profile.send_s for profile in profiles) > 0

    asyncio.run(main())
