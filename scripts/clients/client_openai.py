"""OpenAI's Python client: both routes, whole and streamed, log probabilities, choices, stops, errors."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import openai
from checks import Server, check, equal, near, raises, run_checks, servers, true, until

AT = servers()
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
FRANCE = "The capital of France is"
STORY = "Once upon a time"


def client(server: Server, kind: type = openai.OpenAI, **options: Any) -> Any:
    return kind(base_url=server.v1, **{"api_key": server.key, "max_retries": 0, "timeout": 120} | options)


MODEL, SCRIPTED, BUSY = (client(server) for server in (AT.model, AT.scripted, AT.busy))


def chat(**fields: Any) -> Any:
    return MODEL.chat.completions.create(
        **{"model": AT.model.model, "messages": QUESTION, "temperature": 0, "max_tokens": 16} | fields
    )


def complete(prompt: Any = FRANCE, **fields: Any) -> Any:
    return MODEL.completions.create(
        **{"model": AT.model.model, "prompt": prompt, "temperature": 0, "max_tokens": 8} | fields
    )


def scripted(text: str, **fields: Any) -> Any:
    messages = [{"role": "user", "content": text}]
    return SCRIPTED.chat.completions.create(model=AT.scripted.model, messages=messages, **fields)


def texts(chunks: Any) -> dict[int, str]:
    """The text of each choice, joined from a stream of either route."""
    joined: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            piece = choice.text if hasattr(choice, "text") else choice.delta.content
            joined[choice.index] = joined.get(choice.index, "") + (piece or "")
    return joined


@check("models are listed and found")
def _() -> None:
    (card,) = MODEL.models.list().data
    equal(card.id, AT.model.model)
    equal(MODEL.models.retrieve(AT.model.model).max_model_len, 512)


@check("chat: the answer is Paris, its usage adds up")
def _() -> None:
    whole = chat()
    true("Paris" in whole.choices[0].message.content, f"Paris in {whole.choices[0].message.content!r}")
    equal((whole.object, whole.choices[0].finish_reason), ("chat.completion", "stop"))
    usage = whole.usage
    equal(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens)
    equal(chat().usage.prompt_tokens, usage.prompt_tokens)


@check("chat: streamed text equals the whole answer, events in order")
def _() -> None:
    chunks = list(chat(stream=True, stream_options={"include_usage": True}))
    whole = chat()
    equal(texts(chunks), {0: whole.choices[0].message.content})
    equal(chunks[0].choices[0].delta.role, "assistant")
    equal([c.choices[0].finish_reason for c in chunks if c.choices][-2:], [None, "stop"])
    equal((chunks[-1].choices, chunks[-1].usage.total_tokens), ([], whole.usage.total_tokens))
    equal({c.usage for c in chunks[:-1]}, {None})


@check("chat: the client's own stream helper puts the answer together")
def _() -> None:
    with MODEL.chat.completions.stream(model=AT.model.model, messages=QUESTION, temperature=0) as stream:
        deltas = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.get_final_completion()
    equal((final.choices[0].message.content, final.choices[0].finish_reason), (deltas, "stop"))
    true("Paris" in deltas, f"Paris in {deltas!r}")


@check("chat: log probabilities: the greedy token heads its own list")
def _() -> None:
    choice = chat(logprobs=True, top_logprobs=4).choices[0]
    entries = choice.logprobs.content
    equal("".join(entry.token for entry in entries if "<|" not in entry.token), choice.message.content)
    for entry in entries:
        equal(len(entry.top_logprobs), 4)
        equal((entry.token, entry.logprob), (entry.top_logprobs[0].token, entry.top_logprobs[0].logprob))
        values = [top.logprob for top in entry.top_logprobs]
        equal(values, sorted(values, reverse=True))
        true(math.fsum(map(math.exp, values)) <= 1 + 1e-5, "probabilities of four tokens sum to at most one")
        equal(bytes(entry.bytes).decode(), entry.token)


@check("chat: streamed log probabilities equal the whole answer's")
def _() -> None:
    whole = chat(logprobs=True, top_logprobs=2).choices[0].logprobs.content
    chunks = chat(logprobs=True, top_logprobs=2, stream=True)
    streamed = [e for c in chunks if c.choices and c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    equal([e.token for e in streamed], [e.token for e in whole])
    for one, other in zip(streamed, whole, strict=True):
        near(one.logprob, other.logprob, 1e-4, f"log probability of {one.token!r}")


@check("completions: greedy text begins with Paris, streamed or not")
def _() -> None:
    whole = complete()
    true(whole.choices[0].text.startswith(" Paris"), f"{whole.choices[0].text!r} begins with ' Paris'")
    equal((whole.choices[0].finish_reason, whole.usage.completion_tokens), ("length", 8))
    equal(texts(complete(stream=True)), {0: whole.choices[0].text})


@check("completions: several prompts, as text and as ids, in order")
def _() -> None:
    given = [FRANCE, STORY]
    whole = complete(given, extra_body={"return_token_ids": True})
    equal([choice.index for choice in whole.choices], [0, 1])
    alone = [complete(prompt).choices[0].text for prompt in given]
    equal([choice.text for choice in whole.choices], alone)
    ids = [choice.model_extra["prompt_token_ids"] for choice in whole.choices]
    equal([choice.text for choice in complete(ids).choices], alone)


@check("completions: log probabilities as columns that fit the text")
def _() -> None:
    choice = complete(logprobs=3).choices[0]
    columns = choice.logprobs
    equal("".join(columns.tokens), choice.text)
    ends = [*columns.text_offset[1:], len(choice.text)]
    cut = [choice.text[a:b] for a, b in zip(columns.text_offset, ends, strict=True)]
    equal(cut, columns.tokens, "text cut at text_offset")
    for token, value, top in zip(columns.tokens, columns.token_logprobs, columns.top_logprobs, strict=True):
        equal((max(top, key=top.get), max(top.values())), (token, value))


@check("completions: echo scores a text as generating it did")
def _() -> None:
    made = complete(logprobs=0).choices[0]
    scored = complete(FRANCE + made.text, echo=True, logprobs=0, max_tokens=0).choices[0]
    equal((scored.text, scored.logprobs.token_logprobs[0]), (FRANCE + made.text, None))
    count = len(made.logprobs.tokens)
    equal(scored.logprobs.tokens[-count:], made.logprobs.tokens)
    pairs = zip(scored.logprobs.token_logprobs[-count:], made.logprobs.token_logprobs, strict=True)
    for one, other in pairs:
        near(one, other, 1e-4, "log probability")


@check("completions: n=3 with a seed: different choices, the same each time, streamed or not")
def _() -> None:
    fields = {"temperature": 1, "seed": 7, "n": 3, "max_tokens": 12}
    first, again = complete(STORY, **fields), complete(STORY, **fields)
    found = {choice.index: choice.text for choice in first.choices}
    equal(sorted(found), [0, 1, 2])
    true(len(set(found.values())) == 3, f"three different texts in {found}")
    equal({choice.index: choice.text for choice in again.choices}, found)
    equal(texts(complete(STORY, stream=True, **fields)), found)
    equal(first.usage.completion_tokens, 36)
    equal(first.usage.prompt_tokens, complete(STORY).usage.prompt_tokens, "prompt tokens, counted once")


@check("chat: n=3 with a seed, whole and streamed")
def _() -> None:
    fields = {"temperature": 1.2, "seed": 5, "n": 3, "max_tokens": 12}
    whole = {choice.index: choice.message.content for choice in chat(**fields).choices}
    equal(sorted(whole), [0, 1, 2])
    true(len(set(whole.values())) > 1, f"different texts in {whole}")
    equal(texts(chat(stream=True, **fields)), whole)


@check("stop strings: the text ends before them, streamed or not")
def _() -> None:
    free = complete().choices[0].text
    stop = free[3:6]
    whole = complete(stop=[stop]).choices[0]
    equal((whole.text, whole.finish_reason), (free[: free.index(stop)], "stop"))
    equal(texts(complete(stop=[stop], stream=True)), {0: whole.text})
    kept = complete(stop=[stop], extra_body={"include_stop_str_in_output": True}).choices[0].text
    equal(kept, whole.text + stop)


@check("logit_bias and allowed_token_ids choose the token")
def _() -> None:
    first = complete(max_tokens=1, extra_body={"return_token_ids": True}).choices[0]
    (token_id,) = first.model_extra["token_ids"]
    banned = complete(max_tokens=1, logit_bias={str(token_id): -100}).choices[0].text
    true(banned != first.text, f"{banned!r} differs from {first.text!r}")
    only = complete(STORY, max_tokens=3, extra_body={"allowed_token_ids": [token_id]}).choices[0].text
    equal(only, first.text * 3)


@check("a frequency penalty ends a repetition")
def _() -> None:
    prompt = "one one one one one one one one"
    plain, penalised = (complete(prompt, max_tokens=24, frequency_penalty=p).choices[0].text for p in (0, 2))
    plain_words, words = plain.split(), penalised.split()
    true(len(set(words)) > len(set(plain_words)), f"more different words in {penalised!r} than in {plain!r}")


@check("scripted: characters of several tokens are never torn, stops are cut out")
def _() -> None:
    whole = scripted("unicode").choices[0].message.content
    equal(whole, "Ä 🫠 日本 ok")
    pieces = [c.choices[0].delta.content or "" for c in scripted("unicode", stream=True) if c.choices]
    equal("".join(pieces), whole)
    true("\ufffd" not in "".join(pieces), "no replacement character")
    stopped = scripted("stopping", stop="STOP").choices[0]
    equal((stopped.message.content, stopped.finish_reason), ("one two ", "stop"))
    equal(scripted("silent").choices[0].message.content, "")


@check("async: eight streams at once equal the lone answers")
async def _() -> None:
    prompts = [f"{FRANCE} not number {i}" for i in range(8)]
    alone = [complete(prompt).choices[0].text for prompt in prompts]
    async with client(AT.model, openai.AsyncOpenAI) as many:

        async def ask(prompt: str) -> str:
            stream = await many.completions.create(
                model=AT.model.model, prompt=prompt, temperature=0, max_tokens=8, stream=True
            )
            return "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])

        equal(list(await asyncio.gather(*map(ask, prompts))), alone)


@check("errors: 400 names the parameter")
def _() -> None:
    with raises(openai.BadRequestError) as caught:
        chat(temperature=5)
    equal((caught.error.status_code, caught.error.param), (400, "temperature"))
    with raises(openai.BadRequestError) as caught:
        complete("word " * 600)
    equal(caught.error.code, "context_length_exceeded")
    with raises(openai.BadRequestError):
        chat(n=0, stream=True)


@check("errors: 401 for a wrong key, 404 for a model that is not here")
def _() -> None:
    with client(AT.model, api_key="wrong") as wrong, raises(openai.AuthenticationError) as caught:
        wrong.models.list()
    equal(caught.error.status_code, 401)
    with raises(openai.NotFoundError) as caught:
        chat(model="another")
    equal(caught.error.code, "model_not_found")


@check("errors: 503 while full, with Retry-After; leaving a stream makes room")
def _() -> None:
    def ask() -> Any:
        messages = [{"role": "user", "content": "forever"}]
        return BUSY.chat.completions.create(model=AT.busy.model, messages=messages, stream=True)

    with ask() as stream:
        next(iter(stream))
        with raises(openai.InternalServerError) as caught:
            ask()
        equal((caught.error.status_code, caught.error.code), (503, "overloaded"))
        true(int(caught.error.response.headers["retry-after"]) >= 1, "Retry-After is at least a second")

    def accepted() -> bool:
        try:
            with ask() as again:
                return bool(next(iter(again)).choices)
        except openai.InternalServerError:
            return False

    until(accepted, 10, "room after the stream was left")


if __name__ == "__main__":
    raise SystemExit(run_checks())
