"""Many clients at once: nobody gets another's text, and /health stays quick."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import openai

from tests.helpers.scripted_engine import Settings, script, scripted
from tests.server.harness import Running, running

NUM_STREAMS = 50
SETTINGS = Settings(num_pages=1025, max_num_seqs=32, max_num_batched_tokens=256, max_model_len=256)


def _answer(index: int) -> str:
    return f"answer {index} é🫠 " * 3


async def _stream(client: openai.AsyncOpenAI, index: int) -> str:
    messages: list[Any] = [{"role": "user", "content": f"question {index:03d}"}]
    text = ""
    async for chunk in await client.chat.completions.create(model="scripted", messages=messages, stream=True):
        text += chunk.choices[0].delta.content or ""
    return text


async def _slowest_health(url: str, until: asyncio.Event) -> float:
    slowest = 0.0
    async with httpx.AsyncClient(base_url=url, verify=False) as client:
        while not until.is_set():
            start = time.monotonic()
            assert (await client.get("/health")).status_code == 200
            slowest = max(slowest, time.monotonic() - start)
            await asyncio.sleep(0.05)
    return slowest


async def _ask_all(served: Running) -> tuple[list[str], float]:
    done = asyncio.Event()
    async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="x", max_retries=0, timeout=30) as client:
        health = asyncio.create_task(_slowest_health(served.url, done))
        texts = await asyncio.gather(*(_stream(client, index) for index in range(NUM_STREAMS)))
        done.set()
        return texts, await health


def test_fifty_streams_each_get_their_own_text() -> None:
    answers = [script(_answer(i), prompt_contains=f"question {i:03d}") for i in range(NUM_STREAMS)]
    with running(scripted(*answers, step_s=0.005), SETTINGS) as served:
        texts, slowest_health = asyncio.run(_ask_all(served))
        assert texts == [_answer(index) for index in range(NUM_STREAMS)]
        assert slowest_health < 2
        assert served.gauge("num_free_pages") == SETTINGS.num_pages - 1


def test_one_request_id_may_be_used_twice_at_once() -> None:
    executor = scripted(default=script("Hello"), step_s=0.02)
    headers = {"x-request-id": "same"}
    body = {"prompt": "hi"}

    async def ask(url: str) -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=url, verify=False) as client:
            return await asyncio.gather(*(client.post("/v1/completions", json=body, headers=headers) for _ in range(4)))

    with running(executor) as served:
        replies = asyncio.run(ask(served.url))
    assert [reply.json()["choices"][0]["text"] for reply in replies] == ["Hello"] * 4
