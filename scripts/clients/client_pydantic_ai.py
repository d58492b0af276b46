"""pydantic-ai: agents on its OpenAI chat model, which validates every reply strictly. It asks for one choice."""

from __future__ import annotations

import asyncio
from typing import Any

from checks import Server, check, equal, raises, run_checks, servers, true
from openai import AsyncOpenAI
from pydantic_ai import Agent, ModelHTTPError
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIChatModelSettings
from pydantic_ai.providers.openai import OpenAIProvider

AT = servers()
QUESTION = "What is the capital of France?"


def agent(at: Server = AT.model, *, name: str | None = None, key: str | None = None, **settings: Any) -> Agent:
    client = AsyncOpenAI(base_url=at.v1, api_key=key or at.key, max_retries=0, timeout=120)
    model = OpenAIChatModel(name or at.model, provider=OpenAIProvider(openai_client=client))
    plain = {"temperature": 0.0, "max_tokens": 16}
    return Agent(model, model_settings=OpenAIChatModelSettings(**plain | settings), retries=0)


async def streamed(asking: Agent, text: str) -> str:
    async with asking.run_stream(text) as result:
        return "".join([piece async for piece in result.stream_text(delta=True, debounce_by=None)])


@check("chat: the answer is Paris, its usage adds up")
async def _() -> None:
    result = await agent().run(QUESTION)
    true("Paris" in result.output, f"Paris in {result.output!r}")
    usage = result.all_messages()[-1].usage
    equal(usage.total_tokens, usage.input_tokens + usage.output_tokens)
    true(usage.input_tokens > 10, "the prompt was counted")


@check("chat: streamed text equals the whole answer")
async def _() -> None:
    whole = (await agent().run(QUESTION)).output
    equal(await streamed(agent(), QUESTION), whole)


@check("chat: a second turn carries the first")
async def _() -> None:
    first = await agent().run(QUESTION)
    second = await agent().run("And again?", message_history=first.all_messages())
    one, other = first.all_messages()[-1].usage, second.all_messages()[-1].usage
    true(other.input_tokens > one.input_tokens + one.output_tokens, f"{other} counts the first turn of {one}")


@check("chat: log probabilities: the greedy token heads its own list")
async def _() -> None:
    result = await agent(openai_logprobs=True, openai_top_logprobs=3).run(QUESTION)
    entries = result.all_messages()[-1].provider_details["logprobs"]
    equal("".join(e["token"] for e in entries if "<|" not in e["token"]), result.output)
    for entry in entries:
        top = entry["top_logprobs"]
        equal((len(top), top[0]["token"], top[0]["logprob"]), (3, entry["token"], entry["logprob"]))


@check("chat: a seed gives the same answer again, another seed another one")
async def _() -> None:
    async def ask(seed: int) -> str:
        return (await agent(seed=seed, temperature=1.2).run("Tell a story.")).output

    first = await ask(3)
    equal(await ask(3), first)
    others = {await ask(seed) for seed in (4, 5)}
    true(others - {first}, f"{others} differ from {first!r}")


@check("chat: n=3 through extra_body, of which the client takes the first, the same each time")
async def _() -> None:
    several = {"seed": 3, "temperature": 1.2, "extra_body": {"n": 3}}
    first, again = [await agent(**several).run("Tell a story.") for _ in "ab"]
    equal(again.output, first.output)
    usage = first.all_messages()[-1].usage
    true(16 < usage.output_tokens <= 48, f"{usage.output_tokens} tokens are those of three choices")


@check("chat: stop strings are cut out, streamed or not")
async def _() -> None:
    free = (await agent().run(QUESTION)).output
    stopping = agent(stop_sequences=[" Paris"])
    equal((await stopping.run(QUESTION)).output, free.split(" Paris")[0])
    equal(await streamed(stopping, QUESTION), free.split(" Paris")[0])
    equal((await agent(AT.scripted, stop_sequences=["STOP"]).run("stopping")).output, "one two ")
    equal(await streamed(agent(AT.scripted, max_tokens=64), "unicode"), "Ä 🫠 日本 ok")


@check("async: four runs at once equal the lone ones")
async def _() -> None:
    questions = [f"Is {i} a number?" for i in range(4)]
    alone = [(await agent().run(question)).output for question in questions]
    together = await asyncio.gather(*(agent().run(question) for question in questions))
    equal([result.output for result in together], alone)


@check("errors: 400, 401 and 404 as ModelHTTPError with the server's message")
async def _() -> None:
    for status, word, asking in (
        (400, "temperature", agent(temperature=5)),
        (401, "API key", agent(key="wrong")),
        (404, "another", agent(name="another")),
    ):
        with raises(ModelHTTPError) as caught:
            await asking.run(QUESTION)
        equal(caught.error.status_code, status)
        true(word in str(caught.error.body), f"{word!r} in {caught.error.body}")


@check("errors: 503 while full")
async def _() -> None:
    async with agent(AT.busy, max_tokens=4000).run_stream("forever") as result:
        async for _piece in result.stream_text(delta=True, debounce_by=None):
            break
        with raises(ModelHTTPError) as caught:
            await agent(AT.busy).run("forever")
        equal(caught.error.status_code, 503)
        await result.cancel()


if __name__ == "__main__":
    raise SystemExit(run_checks())
