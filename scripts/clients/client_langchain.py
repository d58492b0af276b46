"""langchain-openai: its chat model and its completions model."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
from checks import check, equal, near, raises, run_checks, servers, true
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAI

AT = servers()
QUESTION = "What is the capital of France?"
FRANCE = "The capital of France is"


def chat(at: Any = AT.model, **fields: Any) -> ChatOpenAI:
    plain = {"temperature": 0, "max_tokens": 16, "max_retries": 0, "timeout": 120}
    return ChatOpenAI(base_url=at.v1, **{**plain, "model": at.model, "api_key": at.key, **fields})


def completion(**fields: Any) -> OpenAI:
    plain = {"temperature": 0, "max_tokens": 8, "max_retries": 0, "timeout": 120}
    return OpenAI(model=AT.model.model, base_url=AT.model.v1, **{**plain, "api_key": AT.model.key, **fields})


@check("chat: invoke answers, with usage")
def _() -> None:
    reply = chat().invoke(QUESTION)
    true("Paris" in reply.content, f"Paris in {reply.content!r}")
    usage = reply.usage_metadata
    equal(usage["total_tokens"], usage["input_tokens"] + usage["output_tokens"])
    equal(reply.response_metadata["finish_reason"], "stop")


@check("chat: streamed text and usage equal the whole reply's")
def _() -> None:
    whole = chat().invoke(QUESTION)
    chunks = list(chat(stream_usage=True).stream(QUESTION))
    true(len(chunks) > 3, "the reply comes in pieces")
    joined = chunks[0]
    for chunk in chunks[1:]:
        joined += chunk
    equal(joined.content, whole.content)
    equal(joined.usage_metadata["total_tokens"], whole.usage_metadata["total_tokens"])


@check("chat: a conversation of three roles changes the answer")
def _() -> None:
    messages = [
        SystemMessage("Answer in one word."),
        HumanMessage("Say yes."),
        AIMessage("yes"),
        HumanMessage("Again."),
    ]
    reply = chat().invoke(messages)
    true(
        reply.usage_metadata["input_tokens"] > chat().invoke("Again.").usage_metadata["input_tokens"], "a longer prompt"
    )


@check("chat: log probabilities: the greedy token heads its own list")
def _() -> None:
    reply = chat(logprobs=True, top_logprobs=3).invoke(QUESTION)
    entries = reply.response_metadata["logprobs"]["content"]
    equal("".join(e["token"] for e in entries if "<|" not in e["token"]), reply.content)
    for entry in entries:
        top = entry["top_logprobs"]
        equal((len(top), top[0]["token"], top[0]["logprob"]), (3, entry["token"], entry["logprob"]))


@check("chat: n=3 with a seed: different, and the same each time")
def _() -> None:
    model = chat(n=3, seed=11, temperature=1.2, max_tokens=12)
    first, again = ([g.text for g in model.generate([[HumanMessage("Tell a story.")]]).generations[0]] for _ in "ab")
    equal(len(first), 3)
    true(len(set(first)) > 1, f"different texts in {first}")
    equal(again, first)


@check("chat: stop strings are cut out, streamed or not")
def _() -> None:
    free = chat().invoke(QUESTION).content
    stopped = chat().invoke(QUESTION, stop=[" Paris"])
    equal(stopped.content, free.split(" Paris")[0])
    equal("".join(c.content for c in chat().stream(QUESTION, stop=[" Paris"])), stopped.content)
    equal(chat(AT.scripted).invoke("stopping", stop=["STOP"]).content, "one two ")


@check("completions: invoke, stream and batch")
def _() -> None:
    whole = completion().invoke(FRANCE)
    true(whole.startswith(" Paris"), f"{whole!r} begins with ' Paris'")
    equal("".join(completion().stream(FRANCE)), whole)
    equal(completion().batch([FRANCE, "Once upon a time"])[0], whole)
    result = completion().generate([FRANCE, "Once upon a time"])
    usage = result.llm_output["token_usage"]
    equal((usage["completion_tokens"], usage["total_tokens"]), (16, usage["prompt_tokens"] + 16))


@check("completions: log probabilities, n=3, stop")
def _() -> None:
    generation = completion(logprobs=2).generate([FRANCE]).generations[0][0]
    columns = generation.generation_info["logprobs"]
    equal("".join(columns["tokens"]), generation.text)
    for token, value, top in zip(columns["tokens"], columns["token_logprobs"], columns["top_logprobs"], strict=True):
        near(top[token], value, 0.0)
        near(max(top.values()), value, 0.0)
    several = completion(n=3, best_of=3, temperature=1, seed=3)
    first, again = ([g.text for g in several.generate(["Once upon"]).generations[0]] for _ in "ab")
    equal((len(first), again), (3, first))
    true(len(set(first)) > 1, f"different texts in {first}")
    equal(completion().invoke(FRANCE, stop=["."]), completion().invoke(FRANCE).split(".")[0])


@check("async: astream and abatch equal the lone replies")
async def _() -> None:
    questions = [f"Is {i} a number?" for i in range(4)]
    alone = [chat().invoke(question).content for question in questions]
    equal([reply.content for reply in await chat().abatch(questions)], alone)

    async def ask(question: str) -> str:
        return "".join([chunk.content async for chunk in chat().astream(question)])

    equal(list(await asyncio.gather(*map(ask, questions))), alone)


@check("errors: 400, 401 and 404 as the client's classes")
def _() -> None:
    with raises(openai.BadRequestError) as caught:
        chat(temperature=5).invoke(QUESTION)
    equal(caught.error.param, "temperature")
    with raises(openai.BadRequestError) as caught:
        chat().invoke("word " * 600)
    equal(caught.error.code, "context_length_exceeded")
    with raises(openai.AuthenticationError):
        chat(api_key="wrong").invoke(QUESTION)
    with raises(openai.NotFoundError):
        chat(model="another").invoke(QUESTION)


@check("errors: 503 while full")
def _() -> None:
    stream = chat(AT.busy, max_tokens=None).stream("forever")
    next(stream)
    with raises(openai.InternalServerError) as caught:
        chat(AT.busy).invoke("forever")
    equal((caught.error.status_code, caught.error.code), (503, "overloaded"))
    stream.close()


if __name__ == "__main__":
    raise SystemExit(run_checks())
