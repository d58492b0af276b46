"""Text past the stream of outputs: the same text as they would bring, and every token counted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from jaxllm.engine.async_engine import AsyncEngine
from jaxllm.errors import EngineDead
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


Shown = list[RequestOutput | str]


def joined(shown: Shown) -> str:
    return "".join(item if isinstance(item, str) else item.outputs[0].text for item in shown)


@pytest.mark.parametrize("takes", ["nothing", "all", "every other"])
def test_str_01_text_comes_whole_and_in_order_whoever_takes_it(takes: str) -> None:
    async def main() -> None:
        async with serving(scripted(default=script(TEXT), step_s=0.001)) as engine:
            shown: Shown = []
            offered = 0

            def take(text: str) -> bool:
                nonlocal offered
                offered += 1
                if takes == "nothing" or (takes == "every other" and offered % 2):
                    return False
                shown.append(text)
                return True

            async for output in engine.stream("abc", DELTA, request_id="a", on_text=take):
                shown.append(output)
            assert joined(shown) == TEXT
            first, last = shown[0], shown[-1]
            assert isinstance(first, RequestOutput) and isinstance(last, RequestOutput)
            assert (first.finished, last.finished, last.outputs[0].finish_reason) == (False, True, "stop")
            assert last.usage.completion_tokens == len(TEXT.encode()) + 1
            assert offered > 0 and "" not in shown

    asyncio.run(main())


def test_text_is_offered_only_to_who_waits() -> None:
    async def main() -> None:
        # With time between tokens, so that the first comes alone.
        async with serving(scripted(default=script(TEXT), step_s=0.005)) as engine:
            taken: list[str] = []
            stream = engine.stream("abc", DELTA, request_id="a", on_text=lambda text: not taken.append(text))
            first = await anext(stream)
            while engine.stats().num_open_requests:
                await asyncio.sleep(0.001)
            rest = [output async for output in stream]
            assert (len(rest), taken) == (1, [])  # merged, as for any slow reader
            assert joined([first, *rest]) == TEXT

    asyncio.run(main())


@pytest.mark.parametrize(
    "params",
    [replace(DELTA, logprobs=1), replace(DELTA, n=2), replace(DELTA, output_kind=OutputKind.CUMULATIVE)],
    ids=["logprobs", "siblings", "cumulative"],
)
def test_outputs_that_tell_more_than_new_text_are_never_text(params: SamplingParams) -> None:
    async def main() -> None:
        async with serving(scripted(default=script("Hello"))) as engine:
            taken: list[str] = []
            stream = engine.stream("abc", params, request_id="a", on_text=lambda text: not taken.append(text))
            outputs = [output async for output in stream]
            parts = [part for output in outputs for part in output.outputs if part.index == 0]
            if params.output_kind is OutputKind.CUMULATIVE:
                parts = parts[-1:]
            assert [i for part in parts for i in part.token_ids] == [*b"Hello", EOS]
            assert taken == []

    asyncio.run(main())


def test_stop_strings_and_intervals_hold_for_text() -> None:
    async def main() -> None:
        async with serving(scripted(default=script("say q;r ", repeat=True), step_s=0.001)) as engine:
            shown: Shown = []
            stopping = replace(DELTA, stop=("q;r",))
            async for output in engine.stream("abc", stopping, request_id="a", on_text=lambda t: not shown.append(t)):
                shown.append(output)
            assert joined(shown) == "say "
            taken: list[str] = []
            params = replace(DELTA, max_tokens=8, stream_interval=3)
            stream = engine.stream("abc", params, request_id="b", on_text=lambda text: not taken.append(text))
            assert joined([output async for output in stream]) == "s "
            assert taken == ["ay ", "q;r"]

    asyncio.run(main())


def test_leaving_and_death_are_those_of_outputs() -> None:
    async def main() -> None:
        executor = scripted(default=script("x", repeat=True), step_s=0.001, faults=[Fault(30, FaultKind.RAISE)])
        async with serving(executor) as engine:
            leaver = engine.stream("abc", DELTA, request_id="b", on_text=lambda _: True)
            await anext(leaver)
            await leaver.aclose()
            assert engine.stats().totals.finished["abort"] == 1
            with pytest.raises(EngineDead):
                async for _ in engine.stream("abc", DELTA, request_id="c", on_text=lambda _: True):
                    pass

    asyncio.run(main())


def test_text_and_sending_are_timed() -> None:
    async def main() -> None:
        async with serving(scripted(default=script(TEXT), step_s=0.001)) as engine:
            _ = [output async for output in engine.stream("abc", DELTA, request_id="a", on_text=lambda _: True)]
            _ = [output async for output in engine.stream("abc", DELTA, request_id="b")]
            profiles = engine.step_profiles()
            assert sum(profile.detokenise_s for profile in profiles) > 0
            assert sum(profile.send_s for profile in profiles) > 0

    asyncio.run(main())
